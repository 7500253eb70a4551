"""A scorer that holds up the picker, as bad code of a user may."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request

SECONDS = "x-hang-seconds"  # a request header


@dataclass
class Hang:
    def score(self, request: Request, pods: Pods) -> Column:
        time.sleep(float(request.headers.get(SECONDS, "0")))
        return np.zeros(len(pods), np.float32)
