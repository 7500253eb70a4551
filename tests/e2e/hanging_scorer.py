"""A scorer that holds up the picker, as bad code of a user may."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scorers.pods import Column, Pods, Request

UNTIL = "x-hang-until"  # a request header: the path of a file that ends it when it is there
AT_MOST = 60.0  # seconds, when the test that would write it has failed


@dataclass
class Hang:
    def score(self, request: Request, pods: Pods) -> Column:
        path = request.headers.get(UNTIL)
        deadline = time.monotonic() + AT_MOST
        while path is not None and not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return np.zeros(len(pods), np.float32)
