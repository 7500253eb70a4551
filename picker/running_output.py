"""How much the running requests have said, where nobody sees their answers pass.

In continuous batching each running sequence gains one token in each step, so what a pod generated
between two scrapes was shared evenly by the requests that were on it. An estimate: those that wait
there are taken to run. It adds up to what the pod told, and the end of each request corrects it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from picker.engines import LoadReport
from picker.pool import Endpoint

R = TypeVar("R")


@dataclass(slots=True)
class _Pod(Generic[R]):
    generated: float | None = None  # as it last told
    share: float = 0.0  # tokens that a request on it since ever would have
    since: dict[R, float] = field(default_factory=dict)  # request -> `share` when it came


class RunningOutput(Generic[R]):
    """Requests, whatever stands for them, by the endpoint that they are on.

    A listener of the pool.
    """

    def __init__(self, streamed: Callable[[R, int], None]) -> None:
        """`streamed`: told how many output tokens a request is estimated to have so far."""
        self._streamed = streamed
        self._pods: dict[Endpoint, _Pod[R]] = {}

    def began(self, request: R, endpoint: Endpoint) -> None:
        """A request was sent to an endpoint."""
        pod = self._pods.get(endpoint)
        if pod is not None:
            pod.since[request] = pod.share

    def moved(self, request: R, picked: Endpoint, served: Endpoint) -> None:
        """Another endpoint answers it. What it had is not lost, for counts only grow."""
        self.ended(request, picked)
        self.began(request, served)

    def ended(self, request: R, endpoint: Endpoint) -> None:
        """It is no longer there."""
        pod = self._pods.get(endpoint)
        if pod is not None:
            pod.since.pop(request, None)

    def told(self, endpoint: Endpoint, report: LoadReport) -> None:
        """A pod told its load: `Load.on_report`. O(requests on it), if it generated anything."""
        pod = self._pods.get(endpoint)
        if pod is None or report.generated is None:
            return
        before, pod.generated = pod.generated, report.generated
        if before is None or report.generated <= before:  # the first, nothing new, or a new server
            return
        # Others' requests run there too, if more run than are ours.
        sharers = max(len(pod.since), report.running or 0.0)
        pod.share += (report.generated - before) / max(1.0, sharers)
        for request, since in pod.since.items():
            self._streamed(request, int(pod.share - since))

    def added(self, endpoint: Endpoint) -> None:
        self._pods[endpoint] = _Pod()

    def removed(self, endpoint: Endpoint) -> None:
        self._pods.pop(endpoint, None)
