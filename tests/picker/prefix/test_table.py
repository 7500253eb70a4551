from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.prefix.table import Table

KEYS = st.sets(
    st.one_of(
        st.integers(0, 40),
        st.integers(0, 40).map(lambda number: number << 48),  # alike in their low bits
        st.integers(2**64 - 40, 2**64 - 1),
        st.integers(0, 2**64 - 1),
    ),
    max_size=40,
)


def array(keys: object) -> np.ndarray:
    return np.array(list(keys), np.uint64)  # type: ignore[call-overload]


class TableMachine(RuleBasedStateMachine):
    """A table is a dict, whether it is asked for many keys or for one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(300)
        self.rows: dict[int, int] = {}

    @rule(keys=KEYS, single=st.booleans())
    def insert(self, keys: set[int], single: bool) -> None:
        new = [key for key in keys if key not in self.rows][: self.table.room]
        if single:
            rows = [self.table.insert_one(key) for key in new]
        else:
            rows = self.table.insert(array(new)).tolist()
        assert not set(rows) & set(self.rows.values())
        self.rows |= zip(new, rows, strict=True)

    @rule(keys=KEYS, single=st.booleans(), all_of_them=st.booleans())
    def delete(self, keys: set[int], single: bool, all_of_them: bool) -> None:
        gone = [key for key in self.rows if all_of_them or key in keys]
        rows = [self.rows.pop(key) for key in gone]
        if single:
            for row in rows:
                self.table.delete_one(row)
        else:
            self.table.delete(np.array(rows, np.intp))

    @rule(keys=KEYS)
    def find(self, keys: set[int]) -> None:
        expected = [self.rows.get(key, -1) for key in keys]
        assert self.table.find(array(keys)).tolist() == expected
        assert [self.table.find_one(key) for key in keys] == expected

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.table) == len(self.rows)
        assert self.table.room == 300 - len(self.rows)
        assert all(0 <= row < 300 for row in self.rows.values())
        assert self.table.find(array(self.rows)).tolist() == list(self.rows.values())
        rows = np.array(list(self.rows.values()), np.intp)
        assert self.table.keys[rows].tolist() == list(self.rows)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_it_grows_to_its_limit_and_forgets_nothing() -> None:
    """It ends where some of its lines are crowded."""
    table = Table(90_000)
    keys = np.random.default_rng(1).permutation(np.arange(90_000, dtype=np.uint64) << 13)
    rows = np.concatenate([table.insert(part) for part in np.array_split(keys, 37)])
    assert sorted(rows.tolist()) == list(range(90_000))
    assert table.room == 0
    assert (table.find(keys) == rows).all()
    assert [table.find_one(key) for key in keys.tolist()] == rows.tolist()
    assert (table.find(keys + np.uint64(1)) == -1).all()
    table.delete(rows[::3])
    for row in rows[1::3].tolist():
        table.delete_one(row)
    assert (table.find(keys[2::3]) == rows[2::3]).all()
    assert (table.find(keys[::3]) == -1).all()
    assert (table.find(keys[1::3]) == -1).all()
    again = table.insert(keys[::3])
    ones = [table.insert_one(key) for key in keys[1::3].tolist()]
    assert sorted([*again.tolist(), *ones, *rows[2::3].tolist()]) == list(range(90_000))
    assert (table.find(keys[::3]) == again).all()
    assert table.find(keys[1::3]).tolist() == ones
    assert (table.find(keys[2::3]) == rows[2::3]).all()


def test_it_takes_little_memory_for_what_it_holds() -> None:
    table = Table(1 << 26)  # as much as may be configured: room that is not used costs nothing
    assert table.num_bytes < 20_000
    table.insert(np.arange(60_000, dtype=np.uint64))
    assert table.num_bytes < 60_000 * 20
