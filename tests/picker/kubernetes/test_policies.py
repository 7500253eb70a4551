"""Objectives and rewrites of a pool come from both groups, by the rules of precedence."""

from __future__ import annotations

import pytest

from picker.config import Rewrite, RewriteTarget
from picker.kubernetes import policies
from tests.kubernetes_api import running_kubernetes
from tests.kubernetes_objects import (
    LLM_D,
    X_GROUP,
    Invalid,
    inference_pool,
    objective,
    pod,
    rewrite,
)
from tests.picker.kubernetes.following import event, following

REWRITES = f"inferencemodelrewrites.{X_GROUP}"


def rule(models: list[str], *targets: tuple[str, int]) -> Rewrite:
    return Rewrite(
        models=models, targets=[RewriteTarget(model=name, weight=each) for name, each in targets]
    )


async def test_objectives_of_both_groups_count_where_they_are_of_this_pool():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(objective("chat", 10))
        api.apply(objective("batch", -1, group=LLM_D))
        api.apply(objective("plain", None))
        api.apply(objective("theirs", 7, pool="other"))
        api.apply(objective("elsewhere", 7, namespace="prod"))
        api.apply(objective("of-another-group", 7, pool_group=X_GROUP))
        async with following(api) as followed:
            assert followed.priorities == {"chat": 10, "batch": -1, "plain": 0}
            api.apply(objective("chat", 2_000_000_000))
            api.delete(objective("plain", None))
            expected = {"chat": 2_000_000_000, "batch": -1}
            await followed.until(lambda: followed.priorities == expected)
            api.delete(objective("chat", 0))
            api.delete(objective("batch", 0, group=LLM_D))
            await followed.until(lambda: followed.priorities == {})


async def test_of_two_objectives_of_one_name_the_newer_group_s_counts():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(objective("chat", 1, group=LLM_D))
        api.apply(objective("chat", 2, group=X_GROUP))
        async with following(api) as followed:
            assert followed.priorities == {"chat": 1}
            api.delete(objective("chat", 1, group=LLM_D))
            await followed.until(lambda: followed.priorities == {"chat": 2})


async def test_an_objective_that_is_being_deleted_counts_no_more():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(objective("chat", 1))
        async with following(api) as followed:
            api.apply(objective("chat", 1, deletionTimestamp="2026-01-01T00:00:00Z"))
            await followed.until(lambda: followed.priorities == {})


async def test_rewrites_stand_in_the_order_of_their_precedence():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(
            rewrite(
                "newer",
                [(["m"], [("late", None)]), ([], [("any", None)])],
                creationTimestamp="2026-02-01T00:00:00Z",
            )
        )
        api.apply(
            rewrite(
                "older",
                [([], [("first-any", None)]), (["m", "n"], [("x", 3), ("y", 7)])],
                group=LLM_D,
                creationTimestamp="2026-01-01T00:00:00Z",
            )
        )
        api.apply(rewrite("theirs", [([], [("z", None)])], pool="other"))
        async with following(api) as followed:
            assert followed.rules == [
                rule(["m", "n"], ("x", 3), ("y", 7)),
                rule(["m"], ("late", 1)),
                rule([], ("first-any", 1)),
                rule([], ("any", 1)),
            ]
            api.delete(rewrite("older", [], group=LLM_D))
            await followed.until(
                lambda: followed.rules == [rule(["m"], ("late", 1)), rule([], ("any", 1))]
            )


async def test_the_earlier_name_wins_among_rewrites_of_one_second():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        for name in ("b", "a"):
            api.apply(
                rewrite(name, [(["m"], [(name, None)])], creationTimestamp="2026-01-01T00:00:00Z")
            )
        async with following(api) as followed:
            assert [each.targets[0].model for each in followed.rules] == ["a", "b"]


@pytest.mark.parametrize(
    "models", [["a\nb"], [" a"], ["x" * 10_000], [""]], ids=["line", "blank", "long", "empty"]
)
async def test_a_target_that_cannot_be_a_model_is_left_out_and_the_other_rules_hold(models, caplog):
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        bad = [(["m"], [(model, None) for model in models]), (["n"], [("good", None)])]
        api.apply(rewrite("r", bad))
        async with following(api) as followed:
            assert followed.rules == [rule(["n"], ("good", 1))]
            for i in range(3):
                api.apply(pod(f"p{i}", f"10.0.0.{i}"))
                await followed.until(lambda: len(followed.addresses) == i + 1)  # noqa: B023
            assert caplog.text.count("InferenceModelRewrite r: spec.rules[0] is left out") == 1, (
                "said once"
            )


async def test_a_rule_that_matches_in_a_way_we_do_not_know_matches_nothing():
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.apply(rewrite("r", [(["m"], [("good", None)])]))
        async with following(api) as followed:
            assert followed.rules
            thing = api.get("r", "default", REWRITES)
            thing["spec"]["rules"][0]["matches"] = [{"model": {"type": "Prefix", "value": "m"}}]
            with pytest.raises(Invalid):
                api.apply(thing)  # the CRD of today has no such type
            await api.asked("watch", REWRITES)
            api.send(event("MODIFIED", thing), REWRITES)
            await followed.until(lambda: followed.rules == [])


async def test_only_so_many_are_followed(monkeypatch, caplog):
    monkeypatch.setattr(policies, "MAX_OBJECTIVES", 2)
    monkeypatch.setattr(policies, "MAX_RULES", 2)
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        for i in range(4):
            api.apply(objective(f"o{i}", i))
        api.apply(rewrite("r", [([f"m{i}"], [("x", None)]) for i in range(4)]))
        async with following(api) as followed:
            assert followed.priorities == {"o0": 0, "o1": 1}
            assert len(followed.rules) == 2
            assert "only 2 are followed" in caplog.text
