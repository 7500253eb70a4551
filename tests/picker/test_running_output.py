"""What is believed that running requests have said, from their pods' counters."""

from __future__ import annotations

from picker.config import EndpointSpec
from picker.engines import LoadReport
from picker.pool import Endpoint, Pool
from picker.running_output import RunningOutput


class Scene:
    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.output: RunningOutput[str] = RunningOutput(self.tokens.__setitem__)
        self.pool = Pool("test")
        self.pool.listen(self.output)
        self.pool.update([EndpointSpec(address="127.0.0.1:1"), EndpointSpec(address="127.0.0.1:2")])
        self.one, self.two = self.pool.endpoints.values()

    def told(self, endpoint: Endpoint, generated: float | None, running: float = 0.0) -> None:
        self.output.told(endpoint, LoadReport(running=running, generated=generated))


def test_what_a_pod_generates_is_shared_by_the_requests_on_it():
    scene = Scene()
    scene.told(scene.one, 1000)
    scene.output.began("a", scene.one)
    scene.told(scene.one, 1005)
    scene.output.began("b", scene.one)
    scene.told(scene.one, 1025)
    assert scene.tokens == {"a": 15, "b": 10}
    scene.output.ended("a", scene.one)
    scene.told(scene.one, 1030)
    assert scene.tokens == {"a": 15, "b": 15}


def test_fractions_of_a_token_are_not_lost():
    scene = Scene()
    scene.told(scene.one, 0)
    for name in "abc":
        scene.output.began(name, scene.one)
    for total in range(1, 31):
        scene.told(scene.one, total)
    assert all(count in (9, 10) for count in scene.tokens.values())


def test_requests_of_others_have_their_share():
    scene = Scene()
    scene.told(scene.one, 0)
    scene.output.began("ours", scene.one)
    scene.told(scene.one, 40, running=4)
    assert scene.tokens == {"ours": 10}


def test_each_pod_for_itself():
    scene = Scene()
    for pod in (scene.one, scene.two):
        scene.told(pod, 0)
    scene.output.began("a", scene.one)
    scene.output.began("b", scene.two)
    scene.told(scene.two, 7)
    assert scene.tokens == {"b": 7}


def test_the_first_page_and_a_server_that_began_again_tell_nothing_new():
    scene = Scene()
    scene.output.began("a", scene.one)
    scene.told(scene.one, 5000)
    scene.told(scene.one, None)
    scene.told(scene.one, 3)
    assert scene.tokens == {}
    scene.told(scene.one, 5)
    assert scene.tokens == {"a": 2}


def test_a_request_that_moved_is_counted_where_it_is():
    scene = Scene()
    for pod in (scene.one, scene.two):
        scene.told(pod, 0)
    scene.output.began("a", scene.one)
    scene.output.moved("a", scene.one, scene.two)
    scene.told(scene.one, 50)
    assert scene.tokens == {}
    scene.told(scene.two, 6)
    assert scene.tokens == {"a": 6}


def test_nothing_is_kept_of_pods_that_left():
    scene = Scene()
    scene.output.began("a", scene.one)
    scene.pool.update([])
    scene.output.ended("a", scene.one)
    scene.output.began("b", scene.one)
    scene.told(scene.one, 5)
    scene.told(scene.one, 9)
    assert scene.tokens == {}
