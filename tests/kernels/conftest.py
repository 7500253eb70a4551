"""Kernels run on the GPU where there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is first imported, and is asked for again when
it first runs. Other tests, and the processes that they start, see no change.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")
        yield


with interpreter():
    import kernels.triton  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreter():
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
