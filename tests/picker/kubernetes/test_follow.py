"""A pool follows an InferencePool, whatever becomes of it, its pods, and the API server."""

from __future__ import annotations

import logging

import pytest

from picker.config import Events, Prefix
from picker.kubernetes.reflector import Phase
from picker.kubernetes.view import KubernetesView
from tests.kubernetes_api import running_kubernetes
from tests.kubernetes_objects import POOL_GROUP, X_GROUP, inference_pool, objective, pod, x_pool
from tests.picker.kubernetes.following import QUICK, Followed, following

POOLS = f"inferencepools.{POOL_GROUP}"
OTHERS = {"app": "other"}


def reflector_of(followed: Followed, resource: str):
    return next(each for each in followed.kubernetes.reflectors if str(each.resource) == resource)


def pod_reflectors(followed: Followed) -> list[object]:
    return [each for each in followed.kubernetes.reflectors if str(each.resource) == "pods"]


async def test_each_target_port_of_each_ready_pod_is_an_endpoint():
    async with running_kubernetes() as api:
        api.apply(inference_pool(ports=(8000, 8001)))
        api.apply(pod("a", "10.0.0.1", {"app": "llm", "role": "decode"}))
        api.apply(pod("six", "fd00::7"))
        api.apply(pod("other", "10.0.0.9", OTHERS))
        api.apply(pod("elsewhere", "10.0.0.8", namespace="prod"))
        async with following(api) as followed:
            assert followed.names == {
                "a-rank-0": "10.0.0.1:8000",
                "a-rank-1": "10.0.0.1:8001",
                "six-rank-0": "[fd00::7]:8000",
                "six-rank-1": "[fd00::7]:8001",
            }
            assert followed.pool.endpoints["10.0.0.1:8000"].labels == {
                "app": "llm",
                "role": "decode",
            }


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"ready": False}, "it is not ready"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, "it is being deleted"),
        ({"phase": "Failed"}, "its phase is Failed"),
        ({"phase": "Succeeded"}, "its phase is Succeeded"),
        ({"ip": ""}, "it has no IP yet"),
        ({"ip": "not-an-ip"}, "its IP cannot be one: 'not-an-ip'"),
        ({"annotations": {"inference.networking.k8s.io/active-ports": ""}}, "names no port"),
    ],
)
async def test_a_pod_that_may_not_serve_leaves_at_once_and_it_is_said_why(broken, why):
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        api.apply(pod("b", "10.0.0.2"))
        async with following(api) as followed:
            assert followed.addresses == {"10.0.0.1:8000", "10.0.0.2:8000"}
            api.apply(pod("b", **{"ip": "10.0.0.2", **broken}))
            await followed.until(lambda: followed.addresses == {"10.0.0.1:8000"})
            assert why in KubernetesView(followed.kubernetes).state()["unusedPods"]["b"]
            api.apply(pod("b", "10.0.0.2"))
            await followed.until(lambda: len(followed.addresses) == 2)
            assert KubernetesView(followed.kubernetes).state()["unusedPods"] == {}


async def test_a_pod_whose_labels_no_longer_match_leaves():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        async with following(api) as followed:
            api.apply(pod("a", "10.0.0.1", OTHERS))
            await followed.until(lambda: not followed.addresses)


async def test_the_annotation_of_a_pod_narrows_its_ports():
    async with running_kubernetes() as api:
        api.apply(inference_pool(ports=(8000, 8001, 8002)))
        active = {"inference.networking.k8s.io/active-ports": "8000, 8002,x,-8001,8000,9"}
        api.apply(pod("a", "10.0.0.1", annotations=active))
        async with following(api) as followed:
            assert followed.names == {
                "a-rank-0": "10.0.0.1:8000",
                "a-rank-2": "10.0.0.1:8002",
            }


async def test_ports_that_the_pool_gives_up_are_endpoints_no_more():
    async with running_kubernetes() as api:
        api.apply(inference_pool(ports=(8000, 8001)))
        api.apply(pod("a", "10.0.0.1"))
        async with following(api) as followed:
            kept = followed.pool.endpoints["10.0.0.1:8000"]
            api.apply(inference_pool(ports=(8000,)))
            await followed.until(lambda: followed.addresses == {"10.0.0.1:8000"})
            assert followed.pool.endpoints["10.0.0.1:8000"] is kept, "what is known of it stays"
            api.apply(inference_pool(ports=(8002, 8000)))
            await followed.until(lambda: len(followed.addresses) == 2)
            assert followed.names["a-rank-0"] == "10.0.0.1:8002"


async def test_a_pool_that_selects_other_pods_never_has_some_of_both():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        for i in range(3):
            api.apply(pod(f"a{i}", f"10.0.0.{i}"))
            api.apply(pod(f"b{i}", f"10.0.1.{i}", OTHERS))
        async with following(api) as followed:
            api.apply(inference_pool(labels=OTHERS, ports=(9000,)))
            await followed.until(lambda: "10.0.1.0:9000" in followed.addresses)
            old, new = ({f"10.0.{n}.{i}:{p}" for i in range(3)} for n, p in ((0, 8000), (1, 9000)))
            assert {frozenset(each) for each in (old, new)} >= set(followed.seen)


async def test_the_old_pods_serve_until_those_newly_selected_are_known():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        api.apply(pod("a2", "10.0.0.2"))
        api.apply(pod("b", "10.0.1.1", OTHERS))
        async with following(api) as followed:
            api.forbid("list", "pods")
            api.apply(inference_pool(labels=OTHERS))
            await api.asked("list", "pods", 3)
            assert followed.addresses == {"10.0.0.1:8000", "10.0.0.2:8000"}
            api.delete(pod("a2"))
            await followed.until(lambda: followed.addresses == {"10.0.0.1:8000"})
            api.permit("list", "pods")
            await followed.until(lambda: followed.addresses == {"10.0.1.1:8000"})
            assert len(pod_reflectors(followed)) == 1


async def test_a_pool_that_goes_back_to_its_pods_before_others_are_known_keeps_them():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        api.apply(pod("b", "10.0.1.1", OTHERS))
        async with following(api) as followed:
            kept = followed.pool.endpoints["10.0.0.1:8000"]
            api.forbid("list", "pods")
            api.apply(inference_pool(labels=OTHERS))
            await api.asked("list", "pods", 3)
            api.apply(inference_pool())
            await followed.until(lambda: len(pod_reflectors(followed)) == 1)
            api.permit("list", "pods")
            api.apply(pod("c", "10.0.0.3"))
            await followed.until(lambda: followed.addresses == {"10.0.0.1:8000", "10.0.0.3:8000"})
            assert kept.alive


async def test_a_pool_that_is_deleted_has_no_endpoint_and_one_made_anew_has_them_again():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        async with following(api) as followed:
            api.delete(inference_pool())
            await followed.until(lambda: not followed.addresses)
            assert followed.pool.why_empty == "there is no InferencePool demo in namespace default"
            assert not pod_reflectors(followed), "nobody asks for its pods"
            api.apply(inference_pool(ports=(8001,)))
            await followed.until(lambda: followed.addresses == {"10.0.0.1:8001"})
            assert followed.pool.why_empty == "the pool has no endpoint"


async def test_another_pod_at_the_same_address_is_another_endpoint():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1", uid="first"))
        async with following(api) as followed:
            first = followed.pool.endpoints["10.0.0.1:8000"]
            api.delete(pod("a"))
            api.apply(pod("a", "10.0.0.1", uid="second"))
            await followed.until(
                lambda: followed.pool.endpoints.get("10.0.0.1:8000") not in (None, first)
            )
            assert not first.alive
            assert followed.pool.endpoints["10.0.0.1:8000"].incarnation == "second"


async def test_another_pod_at_the_same_address_is_found_even_where_its_coming_was_missed():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1", uid="first"))
        async with following(api) as followed:
            first = followed.pool.endpoints["10.0.0.1:8000"]
            api.hold()
            api.delete(pod("a"))
            api.apply(pod("a", "10.0.0.1", uid="second"))
            api.compact()
            api.release()
            api.cut()
            await followed.until(
                lambda: followed.pool.endpoints.get("10.0.0.1:8000") not in (None, first)
            )
            assert not first.alive


async def test_of_two_pods_at_one_address_the_newer_has_it():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("z", "10.0.0.1", creationTimestamp="2026-01-01T00:00:00Z"))
        api.apply(pod("a", "10.0.0.1", creationTimestamp="2026-01-02T00:00:00Z"))
        async with following(api) as followed:
            assert followed.names == {"a-rank-0": "10.0.0.1:8000"}
            assert followed.kubernetes.unused == {"z": "10.0.0.1:8000 is another pod's: a"}


async def test_without_a_pool_a_selector_and_ports_find_the_pods():
    async with running_kubernetes() as api:
        api.apply(pod("a", "10.0.0.1"))
        api.apply(pod("b", "10.0.0.2", OTHERS))
        settings = {"selector": {"app": "llm"}, "targetPorts": [8000, 8001]}
        async with following(api, settings) as followed:
            assert followed.addresses == {"10.0.0.1:8000", "10.0.0.1:8001"}
            assert {name for _, name, _ in api.requests} == {"pods"}


async def test_a_pool_of_the_first_group_has_one_port():
    async with running_kubernetes() as api:
        api.apply(x_pool(port=8100))
        api.apply(inference_pool())  # of the same name, and not asked for
        api.apply(pod("a", "10.0.0.1"))
        api.apply(objective("theirs", 1))
        api.apply(objective("ours", 2, pool_group=X_GROUP))
        async with following(api, {"pool": "demo", "group": X_GROUP}) as followed:
            assert followed.addresses == {"10.0.0.1:8100"}
            assert followed.priorities == {"ours": 2}


async def test_ranks_publish_their_events_at_consecutive_ports():
    async with running_kubernetes() as api:
        api.apply(inference_pool(ports=(8000, 8001)))
        api.apply(pod("a", "fd00::1"))
        prefix = Prefix(mode="events", events=Events(port=5600, replay_port=5700))
        async with following(api, prefix=prefix) as followed:
            second = followed.pool.endpoints["[fd00::1]:8001"]
            (source,) = second.events
            assert source.address == "tcp://[fd00::1]:5601"
            assert source.replay == "tcp://[fd00::1]:5701"
        # At the usual ports, one rank's replay would be at the port of another one's events.
        async with following(api, prefix=Prefix(mode="events")) as followed:
            (source,) = followed.pool.endpoints["[fd00::1]:8001"].events
            assert (source.address, source.replay) == ("tcp://[fd00::1]:5558", "")


async def test_a_pod_with_one_rank_is_asked_where_it_publishes():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        async with following(api, prefix=Prefix(mode="events")) as followed:
            assert not followed.pool.endpoints["10.0.0.1:8000"].events


async def test_it_is_not_synced_before_all_pages_of_the_pods_have_come():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        for i in range(250):
            api.apply(pod(f"p{i}", f"10.0.{i // 250}.{i % 250 + 1}"))
        async with following(api) as followed:
            assert len(followed.addresses) == 250
            assert {len(each) for each in followed.seen} == {250}, "none in between"
            assert sum(each[:2] == ("list", "pods") for each in api.requests) == 3


async def test_what_it_waits_for_is_said():
    async with running_kubernetes() as api:
        api.forbid("list", "pods")
        async with following(api, wait=False) as followed:
            await followed.until(
                lambda: "there is no InferencePool demo" in followed.kubernetes.waiting_for
            )
            api.apply(inference_pool())
            await followed.until(
                lambda: (
                    "forbidden to list pods in namespace default: grant a "
                    'Role with apiGroups: [""], resources: ["pods"], verbs: '
                    "[list, watch]" in followed.kubernetes.waiting_for
                )
            )
            api.permit("list", "pods")
            await followed.until(lambda: followed.kubernetes.synced)
            assert followed.kubernetes.waiting_for == ""


async def test_a_missing_crd_of_pools_is_told_apart_from_a_missing_pool(caplog):
    caplog.set_level(logging.INFO)
    async with running_kubernetes(absent=[POOLS]) as api:
        api.apply(pod("a", "10.0.0.1"))
        async with following(api, wait=False) as followed:
            await followed.until(lambda: "is the CRD installed?" in followed.kubernetes.waiting_for)
            api.install(POOLS)
            api.apply(inference_pool())
            await followed.until(lambda: followed.addresses == {"10.0.0.1:8000"})


async def test_logs_say_who_came_who_left_and_who_is_not_used(caplog):
    caplog.set_level(logging.INFO)
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        api.apply(pod("b", "10.0.0.2", ready=False))
        async with following(api) as followed:
            assert "The pool has 1 endpoints; came: a-rank-0 10.0.0.1:8000" in caplog.text
            assert "1 pods are not used; of them: b: it is not ready" in caplog.text
            api.delete(pod("a"))
            await followed.until(lambda: not followed.addresses)
        assert "The pool has 0 endpoints; left: a-rank-0 10.0.0.1:8000" in caplog.text


async def test_a_forbidden_kind_that_is_not_needed_keeps_nobody_from_serving():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        objectives = f"inferenceobjectives.{X_GROUP}"
        api.apply(objective("chat", 5))
        api.forbid("list", objectives)
        async with following(api) as followed:
            assert followed.addresses == {"10.0.0.1:8000"}
            assert reflector_of(followed, objectives).phase is Phase.FAILING
            assert not followed.priorities
            api.permit("list", objectives)
            await followed.until(lambda: followed.priorities == {"chat": 5})


async def test_numbers_tell_how_the_watch_is():
    async with running_kubernetes(absent=[f"inferenceobjectives.{X_GROUP}"]) as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        async with following(api) as followed:
            await api.asked("watch", "pods")
            api.cut()
            await api.asked("watch", "pods", 2)
            page = "".join(KubernetesView(followed.kubernetes).page())
            assert 'warmpath_kubernetes_synced{resource="pods"} 1\n' in page
            assert 'warmpath_kubernetes_objects{resource="pods"} 1\n' in page
            assert f'warmpath_kubernetes_synced{{resource="{POOLS}"}} 1\n' in page
            assert f'synced{{resource="inferenceobjectives.{X_GROUP}"}} 0\n' in page
            assert 'warmpath_kubernetes_watch_restarts_total{resource="pods"} 1\n' in page
            assert 'warmpath_kubernetes_last_event_age_seconds{resource="pods"} 0.' in page
            assert 'warmpath_kubernetes_failing{resource="pods"} 0\n' in page


async def test_while_the_api_server_is_away_the_pool_stays_as_it_was():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(pod("a", "10.0.0.1"))
        async with following(api, pace=QUICK) as followed:
            api.fail("pods", *[500] * 5)
            api.fail(POOLS, *[503] * 5)
            api.cut()
            await api.asked("watch", "pods", 6)
            assert followed.seen == [frozenset({"10.0.0.1:8000"})]
            api.apply(pod("b", "10.0.0.2"))
            await followed.until(lambda: len(followed.addresses) == 2)
