"""The gRPC admin service's contract: its messages, and what they stand for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker.quota import admin_pb2 as pb
from picker.quota import client
from picker.quota.editor import Corrected, Diff, Pair, Why, Written
from picker.quota.ledger import Denial, Reservation, Use
from picker.quota.messages import put, take
from picker.quota.model import Grant, Key, Limit, Subject
from picker.quota.plan import Barred, Line
from picker.quota.policy import Record
from picker.quota.service import CALLS
from picker.quota.store import Count, Entry, Fault
from picker.quota.tokens import Tokens
from picker.quota.views import Verdict, View

ROOT = Path(__file__).parents[3]

text = st.text(max_size=5)
number = st.integers(-(2**62), 2**62)
moment = st.floats(allow_nan=False)
maybe = st.one_of
limits = st.builds(Limit, text, number, text, text, text, st.booleans())
grants = st.builds(Grant, text, text, number, moment, text, text)
subjects = st.builds(
    Subject,
    text,
    st.lists(limits, max_size=2).map(tuple),
    st.lists(grants, max_size=2).map(tuple),
    st.none() | text,
    st.none() | moment,
    st.none() | st.builds(Key, text, text, moment),
)
pairs = st.builds(Pair, st.none() | subjects, st.none() | subjects)
named = st.dictionaries(text, pairs, max_size=2)
revision = st.integers(0, 2**63)
counts = st.builds(Count, number, number, st.none() | moment)
views = st.builds(
    View, text, limits, moment, number, number, st.none() | moment, number, st.booleans()
)
lines = st.builds(Line, text, number, st.integers(0, 4), number, st.booleans(), moment, moment)
verdicts = st.builds(
    Verdict,
    st.booleans(),
    st.none() | views,
    st.none() | moment,
    st.none() | st.builds(Barred, text, text),
    st.lists(views, max_size=2),
)
MESSAGES: list[tuple[type[Any], st.SearchStrategy[Any]]] = [
    (pb.Record, st.builds(Record, revision, subjects)),
    (pb.Written, st.builds(Written, text, revision, st.none() | subjects, st.none() | subjects)),
    (pb.Diff, st.builds(Diff, named, named, named)),
    (pb.Corrected, st.builds(Corrected, text, limits, counts, counts)),
    (pb.VerdictReply, verdicts),
    (pb.Use, st.builds(Use, number, number, number, number, number)),
    (pb.Denial, st.builds(Denial, moment, text, text, text, number, st.none() | moment)),
    (pb.Entry, st.builds(Entry, moment, text, text, text, text, text, text, text, revision)),
    (pb.Fault, st.builds(Fault, text, number, number, number)),
    (
        pb.Reservation,
        st.builds(
            Reservation,
            text,
            text,
            text,
            st.lists(lines, max_size=2).map(tuple),
            moment,
            moment,
            st.booleans(),
        ),
    ),
    (
        pb.Why,
        st.builds(
            Why,
            reason=text,
            request_id=text,
            if_revision=st.none() | revision,
            dry_run=st.booleans(),
        ),
    ),
]


@pytest.mark.parametrize(
    ("message", "values"), MESSAGES, ids=[message.__name__ for message, _ in MESSAGES]
)
def test_what_crosses_the_wire_arrives_as_it_was(
    message: Callable[[], Any], values: st.SearchStrategy[Any]
) -> None:
    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(values)
    def crosses(value: Any) -> None:
        sent = put(message(), value).SerializeToString()
        assert take(type(message()).FromString(sent), type(value)) == value

    crosses()


def test_the_generated_modules_are_what_the_compiler_makes_of_the_contract(tmp_path: Path) -> None:
    recipe = re.search(r"^proto: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    commands = recipe[1].replace("\\\n", " ").replace("$(BIN)/python", sys.executable)
    for command in commands.replace("_out=.", f"_out={tmp_path}").splitlines():
        subprocess.run(command.split(), cwd=ROOT, check=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(made) == 2 * len(commands.splitlines())
    for path in made:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), "run `make proto`"


def test_every_call_of_the_contract_is_answered() -> None:
    methods = pb.DESCRIPTOR.services_by_name["QuotaAdmin"].methods
    assert {method.name for method in methods} == set(CALLS)
    assert {method.input_type.name for method in methods} == {f"{name}Request" for name in CALLS}
    source = Path(str(client.__file__)).read_text()
    assert set(re.findall(r'self\._(?:call|write)\(\s*"(\w+)"', source)) == set(CALLS)


def test_tokens_are_read_again_and_compared_whole(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("ada 0123456789abcdef\nbob fedcba9876543210\n")
    tokens = Tokens(file)
    assert tokens.actor("0123456789abcdef") == "ada"
    assert tokens.actor("0123456789abcdeF") is None and tokens.actor("") is None
    file.write_text("bob fedcba9876543210\n")
    assert tokens.actor("0123456789abcdef") is None


@pytest.mark.parametrize("line", ["ada", "ada short", "ada 0123456789abcdef more"])
def test_a_line_that_is_no_token_is_told_with_its_place(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# names and tokens\n{line}\n")
    with pytest.raises(ValueError, match="tokens:2: write NAME TOKEN"):
        Tokens(file)
    with pytest.raises(ValueError, match="cannot be read"):
        Tokens(tmp_path / "none")
