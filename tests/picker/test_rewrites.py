"""Which model a request is sent as."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.config import ConfigError, Rewrite, RewriteTarget, parse
from picker.refusal import Refusal
from picker.request import LLMRequest
from picker.request import parse as parse_request
from picker.rewrites import Rewrites
from picker.service import check_config

HEADER = "x-gateway-model-name-rewrite"
LLM_D = "x-llm-d-model-name-rewrite"


def rule(*models: str, to: dict[str, int]) -> Rewrite:
    targets = [RewriteTarget(model=model, weight=weight) for model, weight in to.items()]
    return Rewrite(models=list(models), targets=targets)


def asking(model: str | None, **headers: str) -> LLMRequest:
    body = {"prompt": "x"} if model is None else {"model": model, "prompt": "x"}
    told = {"content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return parse_request("POST", "/v1/completions", told, json.dumps(body).encode())


def sent_as(rewrites: Rewrites, model: str | None, **headers: str) -> str | None:
    request = asking(model, **headers)
    rewrites.apply(request)
    assert request.asked_model == (None if request.model == model else model)
    return request.model


def test_the_first_rule_that_matches_counts() -> None:
    rewrites = Rewrites(
        [
            rule("a", "b", to={"first": 1}),
            rule("b", "c", to={"second": 1}),
            rule(to={"any": 1}),
            rule("d", to={"never": 1}),
            rule(to={"never": 1}),
        ]
    )
    found = {model: sent_as(rewrites, model) for model in ("a", "b", "c", "d", "")}
    assert found == {"a": "first", "b": "first", "c": "second", "d": "any", "": "any"}
    assert sent_as(rewrites, None) is None, "it asks for no model, and gets the pod's own"


def test_models_that_no_rule_names_stay() -> None:
    rewrites = Rewrites([rule("a", to={"b": 1})])
    assert [sent_as(rewrites, model) for model in ("A", "a ", "b")] == ["A", "a ", "b"]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"x": 1, "y": 3}, {"x": 0.25, "y": 0.75}),
        ({"x": 1, "y": 1, "z": 2}, {"x": 0.25, "y": 0.25, "z": 0.5}),
        ({"x": 0, "y": 7}, {"y": 1.0}),
        ({"x": 0, "y": 0}, {"x": 0.5, "y": 0.5}),
        ({"x": 1_000_000, "y": 1_000_000}, {"x": 0.5, "y": 0.5}),
    ],
)
def test_targets_have_their_shares(weights: dict[str, int], shares: dict[str, float]) -> None:
    rewrites = Rewrites([rule("a", to=weights)], random=Random(0))
    count = 4000
    found = Counter(sent_as(rewrites, "a") for _ in range(count))
    assert found.keys() == shares.keys()
    for model, share in shares.items():
        assert found[model] / count == pytest.approx(share, abs=0.04)


def test_a_target_may_be_the_model_itself() -> None:
    rewrites = Rewrites([rule("a", to={"a": 1, "b": 1})], random=Random(0))
    assert {sent_as(rewrites, "a") for _ in range(50)} == {"a", "b"}


def test_a_rewritten_request_is_one_for_its_target() -> None:
    """Its prefix is looked for where the target has it."""
    request = asking("a")
    Rewrites([rule("a", to={"b": 1})]).apply(request)
    assert request.salt == asking("b").salt


def test_a_header_wins_only_where_it_is_believed() -> None:
    rules = [rule("a", to={"b": 1})]
    believing = Rewrites(rules, headers=[HEADER.title(), LLM_D])
    told = {HEADER: "told"}
    assert sent_as(Rewrites(rules), "a", **told) == "b"
    assert sent_as(believing, "a", **told) == "told"
    assert sent_as(believing, "other", **told) == "told"
    assert sent_as(believing, "a", **{HEADER: "a"}) == "a"
    assert sent_as(believing, "a", **{HEADER: " "}) == "b"
    assert sent_as(believing, "a", **{LLM_D: "second"}) == "second"
    assert sent_as(believing, "a", **{LLM_D: "second", HEADER: "first"}) == "first"
    assert sent_as(believing, None, **told) is None
    assert sent_as(Rewrites([], headers=[HEADER]), "a", **told) == "told"


@pytest.mark.parametrize("value", ["x" * 257, "a\x7fb", "naïve", "a\tb"])
def test_a_believed_header_that_names_no_model_is_refused(value: str) -> None:
    with pytest.raises(Refusal) as refusal:
        sent_as(Rewrites([], headers=[HEADER]), "a", **{HEADER: value})
    assert (refusal.value.status, refusal.value.reason) == (400, "invalid_model")


def test_new_rules_take_the_place_of_the_old_ones() -> None:
    rewrites = Rewrites([rule("a", to={"b": 1})])
    assert rewrites.active
    rewrites.update([rule("c", to={"d": 1})])
    assert (sent_as(rewrites, "a"), sent_as(rewrites, "c")) == ("a", "d")
    for wrong in ([rule("c", to={})], [rule("c", to={"": 1})], [rule("c", to={"x" * 257: 1})]):
        with pytest.raises(ValueError, match=r"rewrites\[0\]"):
            rewrites.update(wrong)
        assert sent_as(rewrites, "c") == "d"
    rewrites.update([])
    assert not rewrites.active
    assert sent_as(rewrites, "c") == "c"


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from("abcd"), max_size=3),
            st.lists(st.sampled_from("wxyz"), min_size=1, max_size=3),
        ),
        max_size=5,
    ),
    st.sampled_from("abcde"),
)
def test_rules_are_found_as_if_tried_one_by_one(
    rules: Sequence[tuple[list[str], list[str]]], model: str
) -> None:
    rewrites = Rewrites([rule(*models, to=dict.fromkeys(to, 1)) for models, to in rules])
    matching = next((to for models, to in rules if not models or model in models), [model])
    assert sent_as(rewrites, model) in matching


def test_the_file_tells_what_is_wrong_with_a_rule() -> None:
    for text, message in {
        "rewrites: [{models: [a]}]": "the key 'targets' is missing",
        "rewrites: [{targets: []}]": "'targets' must name a model",
        "rewrites:\n- {targets: [{model: ''}]}": "cannot be a model's name",
        "rewrites: [{targets: [{model: a, weight: -1}]}]": "at least 0",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse(text, check=check_config)
