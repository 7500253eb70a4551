"""A hash table from 64-bit keys to dense row numbers, looked up many keys at a time.

Row numbers are given out from 0 on and again when they are free, so that whatever is known of a key
can lie in columns beside the table. What takes memory is what is used: every array is made at its
largest at once, and the system gives it pages as they are written.

The table is lines of 16 slots, 64 bytes each: one look at memory for each key. A slot is a row
number, plus one, and some bits of the key's hash; 0 is empty. The few keys whose line is full are
in a dict beside it. It grows by linear hashing (Litwin, 1980): a few lines at a time are split in
two, so that no single insertion takes long. Lines are half full at most on average, and three
quarters before they are split: 11 bytes a row.
"""

from __future__ import annotations

import mmap
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Rows = NDArray[np.intp]

NO_ROWS: Rows = np.empty(0, np.intp)
_SLOTS = 16
_ROWS_PER_LINE = 6  # on average; 12 in lines that are about to be split
_FIRST_LINES = 256
_SPLIT = 256  # lines split at once

_32 = np.uint64(32)
_LOW = (1 << 32) - 1
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MASK = (1 << 64) - 1


def column(length: int, kind: type[np.generic]) -> NDArray[Any]:
    """An array of zeros, of which only the parts that are written take memory.

    NumPy's own would take it 2 MiB at a time, where the system has huge pages, and clearing these
    can hold up everything for milliseconds.
    """
    memory = mmap.mmap(-1, max(1, length * np.dtype(kind).itemsize), _PRIVATE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind, length)


class Table:
    """Keys and their rows."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: what it can hold, below 2^31."""
        self.max_rows = max_rows
        self.keys: Keys = column(max_rows, np.uint64)  # by row; of free ones what was there last
        self.top = 0  # rows from here on were never given out
        self._free: NDArray[np.int32] = column(max_rows, np.int32)  # a stack
        self._num_free = 0
        self._row_bits = max_rows.bit_length()
        self._max_row = (1 << self._row_bits) - 1  # plus one: what a slot says of a row
        self._first = secrets.randbits(64) | 1
        self._second = secrets.randbits(64) | 1
        max_lines = max(_FIRST_LINES, max_rows // _ROWS_PER_LINE + 2 * _SPLIT)
        self._lines = column(max_lines * _SLOTS, np.uint32).reshape(-1, _SLOTS)
        self._flat = self._lines.reshape(-1)
        self._num_lines = _FIRST_LINES
        self._level = _FIRST_LINES  # a power of two: lines before splitting began anew
        self._crowded = column(max_lines, np.bool_)  # lines with keys in:
        self._beside: dict[int, dict[int, int]] = {}  # line: key: row

    def __len__(self) -> int:
        """Rows in use."""
        return self.top - self._num_free

    @property
    def room(self) -> int:
        """Rows that can be added."""
        return self.max_rows - len(self)

    @property
    def num_bytes(self) -> int:
        """What has been written of its arrays."""
        return self._num_lines * (4 * _SLOTS + 1) + self.top * 8 + self._num_free * 4

    def find(self, keys: Keys) -> Rows:
        """The row of each key, or -1."""
        lines, tags = self._place(keys)
        slots = self._lines.take(lines, axis=0)
        slots ^= tags[:, None]
        at = np.flatnonzero(slots <= np.uint32(self._max_row))
        rows = slots.reshape(-1).take(at).astype(np.intp)
        rows -= 1
        at >>= 4
        right = self.keys.take(rows) == keys.take(at)
        if len(at) == len(keys) and right.all():
            return rows
        found: Rows = np.full(len(keys), -1, np.intp)
        found[at[right]] = rows[right]
        if self._beside:
            for position in np.flatnonzero((found < 0) & self._crowded.take(lines)).tolist():
                beside = self._beside[int(lines[position])]
                found[position] = beside.get(int(keys[position]), -1)
        return found

    def insert(self, keys: Keys) -> Rows:
        """Give rows to these keys, all different, which have none; there must be room for them."""
        count = len(keys)
        reused = min(count, self._num_free)
        rows: Rows = np.empty(count, np.intp)
        if reused:
            self._num_free -= reused
            rows[:reused] = self._free[self._num_free : self._num_free + reused][::-1]
        if reused < count:
            rows[reused:] = np.arange(self.top, self.top + count - reused)
            self.top += count - reused
        assert self.top <= self.max_rows
        self.keys[rows] = keys
        while self._num_lines * _ROWS_PER_LINE < len(self):
            self._split()
        self._put(keys, rows)
        return rows

    def delete(self, rows: Rows) -> None:
        """These rows, all different, are free; no key leads to them any more."""
        keys = self.keys.take(rows)
        lines, tags = self._place(keys)
        wanted = tags | (rows + 1).astype(np.uint32)
        at = np.flatnonzero(self._lines.take(lines, axis=0) == wanted[:, None])
        owners = at >> 4
        self._flat[(lines.take(owners) << 4) + (at & 15)] = 0
        if len(at) != len(rows):
            elsewhere = np.ones(len(rows), np.bool_)
            elsewhere[owners] = False
            for position in np.flatnonzero(elsewhere).tolist():
                self._delete_beside(int(lines[position]), int(keys[position]))
        self._free[self._num_free : self._num_free + len(rows)] = rows[::-1]
        self._num_free += len(rows)

    # The same for one key: without what each call of NumPy costs

    def find_one(self, key: int) -> int:
        """The row of a key, or -1."""
        line, tag = self._place_one(key)
        row_mask = self._max_row
        for slot in self._lines[line].tolist():
            row: int = slot ^ tag
            if row <= row_mask and self.keys.item(row - 1) == key:
                return row - 1
        if line in self._beside:
            return self._beside[line].get(key, -1)
        return -1

    def insert_one(self, key: int) -> int:
        """Give a row to a key that has none; there must be room."""
        if self._num_free:
            self._num_free -= 1
            row = self._free.item(self._num_free)
        else:
            row = self.top
            self.top += 1
        assert row < self.max_rows
        self.keys[row] = key
        while self._num_lines * _ROWS_PER_LINE < len(self):
            self._split()
        line, tag = self._place_one(key)
        slots = self._lines[line].tolist()
        if 0 in slots:
            self._lines[line, slots.index(0)] = tag | row + 1
        else:
            self._put_beside(line, key, row)
        return row

    def delete_one(self, row: int) -> None:
        """A row is free; no key leads to it any more."""
        key = self.keys.item(row)
        line, tag = self._place_one(key)
        slots = self._lines[line].tolist()
        slot = tag | row + 1
        if slot in slots:
            self._lines[line, slots.index(slot)] = 0
        else:
            self._delete_beside(line, key)
        self._free[self._num_free] = row
        self._num_free += 1

    def _place_one(self, key: int) -> tuple[int, int]:
        mixed = key * self._first & _MASK
        mixed = (mixed ^ mixed >> 32) * self._second & _MASK
        line = mixed >> 32 & 2 * self._level - 1
        if line >= self._num_lines:
            line -= self._level
        return line, max((mixed << self._row_bits) & _LOW, self._max_row + 1)

    def _put_beside(self, line: int, key: int, row: int) -> None:
        self._beside.setdefault(line, {})[key] = row
        self._crowded[line] = True

    def _delete_beside(self, line: int, key: int) -> None:
        beside = self._beside[line]
        del beside[key]
        if not beside:
            del self._beside[line]
            self._crowded[line] = False

    def _place(self, keys: Keys) -> tuple[Rows, NDArray[np.uint32]]:
        """Line and tag of each key; a tag is never 0."""
        mixed = keys * np.uint64(self._first)
        mixed ^= mixed >> _32
        mixed *= np.uint64(self._second)
        tags = mixed.astype(np.uint32)  # its low bits; moved up, to where slots have them
        tags <<= np.uint32(self._row_bits)
        np.maximum(tags, np.uint32(self._max_row + 1), out=tags)
        mixed >>= _32
        lines = mixed.view(np.intp)
        lines &= 2 * self._level - 1
        np.subtract(lines, self._level, out=lines, where=lines >= self._num_lines)
        return lines, tags

    def _put(self, keys: Keys, rows: Rows) -> None:
        """Write rows into free slots of their lines."""
        lines, slots = self._place(keys)
        slots |= (rows + 1).astype(np.uint32)
        order = lines.argsort()
        lines = lines[order]
        new = np.empty(len(lines), np.bool_)
        new[:1] = True
        np.not_equal(lines[1:], lines[:-1], out=new[1:])
        first = np.flatnonzero(new)
        free = np.flatnonzero(self._lines.take(lines[first], axis=0) == 0)
        per_line = np.bincount(free >> 4, minlength=len(first))
        group = new.cumsum()
        group -= 1
        rank = np.arange(len(lines))
        rank -= first[group]
        fits = rank < per_line[group]
        which = (per_line.cumsum() - per_line)[group] + rank
        if not fits.all():
            for position in np.flatnonzero(~fits).tolist():
                number = int(order[position])
                self._put_beside(int(lines[position]), int(keys[number]), int(rows[number]))
            which, lines, order = which[fits], lines[fits], order[fits]
        self._flat[(lines << 4) + (free[which] & 15)] = slots[order]

    def _split(self) -> None:
        """Spread the next lines over twice as many."""
        first = self._num_lines - self._level
        last = first + _SPLIT  # a level is a multiple of it
        lines = self._lines[first:last]
        slots = lines[lines != 0]
        lines[:] = 0
        rows = (slots & np.uint32(self._max_row)).astype(np.intp)
        rows -= 1
        crowded = np.flatnonzero(self._crowded[first:last]) + first
        if len(crowded):
            self._crowded[first:last] = False
            beside = [row for line in crowded.tolist() for row in self._beside.pop(line).values()]
            rows = np.concatenate((rows, np.array(beside, np.intp)))
        self._num_lines += _SPLIT
        if self._num_lines == 2 * self._level:
            self._level = self._num_lines
        if len(rows):
            self._put(self.keys.take(rows), rows)
