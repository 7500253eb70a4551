"""A reflector has what the cluster has, whatever the API server does to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from picker.config import Kubernetes
from picker.kubernetes import client, reflector
from picker.kubernetes.client import Api
from picker.kubernetes.errors import ApiError
from picker.kubernetes.objects import X_GROUP, InferenceObjective, Pod
from picker.kubernetes.pace import Backoff, Pace
from picker.kubernetes.reflector import Phase, Reflector
from picker.kubernetes.resource import Resource, pods
from tests.kubernetes_api import KubernetesApi, kubeconfig, running_kubernetes
from tests.kubernetes_objects import objective, pod
from tests.picker.kubernetes.following import DEADLINE, QUICK, event

OBJECTIVES = f"inferenceobjectives.{X_GROUP}"


class Watched:
    """A reflector of pods, and the API server that it watches."""

    def __init__(self, api: KubernetesApi, api_client: Api, resource: Resource, pace: Pace) -> None:
        self.api = api
        self.changed = asyncio.Event()
        kind = Pod if resource.plural == "pods" else InferenceObjective
        self.reflector = Reflector(api_client, resource, kind, self.changed.set, pace)

    @property
    def names(self) -> set[str]:
        return set(self.reflector.objects)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():
                await self.changed.wait()
                self.changed.clear()

    async def catches_up(self) -> None:
        """It sees what happens now."""
        self.api.apply(pod("last", "10.9.9.9"))
        await self.until(lambda: "last" in self.names)


@asynccontextmanager
async def watched(
    resource: Resource | None = None, pace: Pace = QUICK, absent: tuple[str, ...] = ()
) -> AsyncIterator[Watched]:
    """With pods `a` and `b`, once they are known."""
    async with running_kubernetes(absent) as api:
        api.apply(pod("a", "10.0.0.1"))
        api.apply(pod("b", "10.0.0.2"))
        path = kubeconfig(api, Path(api.folder))
        api_client = await Api.connect(Kubernetes(kubeconfig=str(path)))
        each = Watched(api, api_client, resource or pods("default"), pace)
        each.reflector.start()
        try:
            await each.until(lambda: each.reflector.phase is not Phase.STARTING)
            yield each
        finally:
            await each.reflector.stop()
            await api_client.close()


async def test_it_sees_what_comes_changes_and_goes():
    async with watched() as each:
        assert each.names == {"a", "b"}
        each.api.apply(pod("c", "10.0.0.3"))
        each.api.apply(pod("b", "10.0.0.4"))
        each.api.delete(pod("a"))
        await each.until(lambda: each.names == {"b", "c"})
        assert each.reflector.objects["b"].status.pod_ip == "10.0.0.4"
        assert (each.reflector.lists, each.reflector.watches) == (1, 1)


@pytest.mark.parametrize("gone_as", ["event", "status"])
async def test_what_is_too_old_is_listed_anew_and_that_is_no_error(gone_as, caplog):
    async with watched() as each:
        await each.api.asked("watch", "pods")
        each.api.gone_as = gone_as
        each.api.hold()
        each.api.delete(pod("a"))
        each.api.apply(pod("c", "10.0.0.3"))
        each.api.compact()
        each.api.cut()
        each.api.release()
        await each.until(lambda: each.names == {"b", "c"})
        await each.catches_up()
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_watch_goes_on_where_it_broke_off():
    async with watched() as each:
        await each.api.asked("watch", "pods")
        each.api.cut(b'{"type": "ADDED", "object": {"metadata": {"na')
        each.api.apply(pod("c", "10.0.0.3"))
        each.api.delete(pod("a"))
        await each.until(lambda: each.names == {"b", "c"})
        assert each.reflector.lists == 1


async def test_bookmarks_tell_from_where_to_go_on():
    async with watched() as each:
        await each.api.asked("watch", "pods")
        for i in range(5):  # nothing of ours
            each.api.apply(objective(f"o{i}", i))
        each.api.compact()
        each.api.bookmark()
        await each.until(lambda: each.reflector.version == str(each.api.version))
        each.api.cut()
        await each.catches_up()
        assert each.reflector.lists == 1, "its version is not too old"


async def test_a_watch_that_is_silent_is_replaced():
    async with watched(pace=replace(QUICK, silence=0.05)) as each:
        await each.api.asked("watch", "pods")
        each.api.hold()
        await each.catches_up()
        assert each.reflector.lists == 1


async def test_slow_events_are_not_lost():
    async with watched() as each:
        await each.api.asked("watch", "pods")
        each.api.hold()
        for i in range(50):
            each.api.apply(pod(f"p{i}", f"10.0.1.{i}"))
        each.api.delete(pod("p7"))
        each.api.release()
        await each.until(lambda: len(each.names) == 51 and "p7" not in each.names)
        assert each.reflector.watches == 1


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_events_are_read_however_they_are_cut(size):
    async with watched() as each:
        await each.api.asked("watch", "pods")
        each.api.piece = size
        for i in range(5):
            each.api.apply(pod(f"p{i}", f"10.0.1.{i}"))
        each.api.delete(pod("a"))
        await each.until(lambda: each.names == {"b", *(f"p{i}" for i in range(5))})
        assert (each.reflector.lists, each.reflector.watches) == (1, 1)


ABOUT = {"name": "evil", "resourceVersion": "999999"}


@pytest.mark.parametrize(
    "line",
    [
        b"this is no JSON\n",
        b"[]\n",
        b"\xff\xfe\n",
        b'{"type": "ADDED"}\n',
        b'{"object": {}}\n',
        b"[" * 100_000 + b"\n",
        event("ADDED", "nothing"),
        event("ADDED", {"kind": "Pod"}),
        event("DELETED", {"metadata": {"name": 7}}),
        event("BOOKMARK", {}),
        event("EXPLODED", {"metadata": ABOUT}),
        event("ERROR", {"kind": "Status", "code": 500, "message": "etcd is not well"}),
        event("ERROR", [1, 2]),
    ],
)
async def test_what_is_no_event_ends_the_watch_and_all_are_listed(line):
    async with watched() as each:
        await each.api.asked("watch", "pods")
        each.api.send(line, "pods")
        await each.until(lambda: each.reflector.lists == 2)
        assert each.names == {"a", "b"}
        await each.catches_up()


async def test_an_event_without_an_end_is_not_waited_for():
    async with watched() as each:
        await each.api.asked("watch", "pods")
        each.api.send(b" " * (reflector.MAX_LINE + 1), "pods")
        await each.until(lambda: each.reflector.lists == 2)
        await each.catches_up()


async def test_an_object_that_is_not_understood_is_ignored_and_named_once(caplog):
    async with watched() as each:
        await each.api.asked("watch", "pods")
        labels = {"metadata": {"name": "b", "resourceVersion": "200", "labels": {"a": 5}}}
        for _ in range(2):
            each.api.send(event("MODIFIED", labels), "pods")
        await each.until(lambda: each.names == {"a"})
        await each.catches_up()
        assert each.reflector.lists == 1
        assert caplog.text.count("pods b is not understood and ignored") == 1


async def test_a_list_that_takes_too_long_begins_anew(monkeypatch):
    monkeypatch.setattr(reflector, "PAGE", 1)
    async with watched() as each:
        lists = sum(verb == "list" for verb, *_ in each.api.requests)
        assert lists == 2, "a page for each pod"
        lost = []

        def forget_pages(verb: str, kind: str) -> None:
            if verb == "list" and "continue" in each.api.requests[-1][2] and not lost:
                lost.append(kind)
                each.api.delete(pod("a"))
                each.api.compact()

        each.api.interrupt = forget_pages
        each.api.compact()
        each.api.cut()
        await each.until(lambda: each.names == {"b"})
        assert lost


async def test_too_many_objects_are_an_error_and_the_known_ones_stay(monkeypatch):
    async with watched() as each:
        await each.api.asked("watch", "pods")
        monkeypatch.setattr(reflector, "MAX_OBJECTS", 3)
        for i in range(5):
            each.api.apply(pod(f"p{i}", f"10.0.1.{i}"))
        await each.until(lambda: "there are more than 3 pods" in each.reflector.error)
        assert {"a", "b"} <= each.names
        assert each.reflector.phase is Phase.SYNCED
        for i in range(5):
            each.api.delete(pod(f"p{i}"))
        await each.until(lambda: each.names == {"a", "b"} and not each.reflector.error)


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_errors_of_the_api_server_pass(code):
    async with watched() as each:
        await each.api.asked("watch", "pods")
        each.api.fail("pods", *[code] * 4)
        each.api.cut()
        each.api.apply(pod("c", "10.0.0.3"))
        await each.until(lambda: each.names == {"a", "b", "c"})
        assert each.reflector.error == ""
        assert each.reflector.lists == 1, "what was known was right"


async def test_a_right_that_is_taken_away_is_named_and_what_is_known_stays(caplog):
    async with watched() as each:
        each.api.forbid("watch", "pods")
        each.api.cut()
        await each.until(lambda: bool(each.reflector.error))
        assert "forbidden to watch pods in namespace default" in each.reflector.error
        assert each.names == {"a", "b"}
        each.api.permit("watch", "pods")
        await each.catches_up()
        assert each.reflector.error == ""
        assert caplog.text.count("forbidden to watch pods") == 1, "said once, tried often"


async def test_a_kind_that_the_cluster_does_not_know_is_looked_for_again(caplog):
    caplog.set_level(logging.INFO)
    resource = Resource(X_GROUP, "v1alpha2", "inferenceobjectives", "default")
    async with watched(resource, absent=(OBJECTIVES,)) as each:
        assert each.reflector.phase is Phase.ABSENT
        await each.api.asked("list", OBJECTIVES, 3)
        assert caplog.text.count("is the CRD installed?") == 1
        each.api.install(OBJECTIVES)
        each.api.apply(objective("chat", 3))
        await each.until(lambda: each.names == {"chat"})
        each.api.remove(OBJECTIVES)
        await each.until(lambda: each.reflector.phase is Phase.ABSENT)
        assert not each.names


async def test_a_kind_that_was_there_is_not_gone_because_a_server_does_not_know_it_for_a_moment():
    resource = Resource(X_GROUP, "v1alpha2", "inferenceobjectives", "default")
    pace = replace(QUICK, absent_after=DEADLINE)
    async with watched(resource, pace) as each:
        each.api.apply(objective("chat", 3))
        await each.until(lambda: each.names == {"chat"})
        kind = each.api.kinds.pop(OBJECTIVES)
        each.api.cut()
        await each.api.asked("list", OBJECTIVES, 4)
        assert each.names == {"chat"}
        each.api.kinds[OBJECTIVES] = kind
        await each.until(lambda: not each.reflector.error)
        assert each.names == {"chat"}


async def test_credentials_that_have_expired_are_read_again():
    async with watched() as each:
        each.api.token = "another"
        kubeconfig(each.api, Path(each.api.folder))
        each.api.cut()
        await each.catches_up()


async def test_credentials_that_stay_wrong_are_an_error_that_says_so(monkeypatch):
    async with watched() as each:
        each.api.token = "another"
        each.api.cut()
        await each.until(lambda: "the API server does not know us" in each.reflector.error)
        assert each.names == {"a", "b"}
        monkeypatch.setattr(client, "RENEW_SECONDS", 0.0)
        kubeconfig(each.api, Path(each.api.folder))
        await each.catches_up()


async def test_answers_that_are_too_long_are_not_read(monkeypatch):
    async with running_kubernetes() as api:
        api.apply(pod("a", "10.0.0.1"))
        monkeypatch.setattr(client, "MAX_ANSWER", 100)
        path = kubeconfig(api, Path(api.folder))
        api_client = await Api.connect(Kubernetes(kubeconfig=str(path)))
        with pytest.raises(ApiError, match="an answer of more than 100 bytes"):
            await api_client.call("list", pods("default"))
        await api_client.close()


def test_pauses_double_up_to_the_longest_and_begin_anew():
    backoff = Backoff(Pace(first_pause=1.0, longest_pause=30.0))
    pauses = [backoff.pause() for _ in range(60)]
    for i, pause in enumerate(pauses):
        longest = min(30.0, 2.0**i)
        assert longest / 2 <= pause <= longest
    backoff.reset()
    assert backoff.pause() <= 1.0
