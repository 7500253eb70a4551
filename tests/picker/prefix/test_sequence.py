"""Which batches are applied, and in which order, whatever the network and the publisher do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from picker.prefix import sequence as module
from picker.prefix.sequence import Sequence


class Log:
    """What was applied since all was last forgotten, and what is asked."""

    def __init__(self) -> None:
        self.run: list[bytes] = []
        self.questions: list[int] = []

    def apply(self, payload: bytes) -> None:
        self.run.append(payload)

    def forget(self) -> None:
        self.run.clear()

    def ask(self, first: int) -> None:
        self.questions.append(first)


def batch(process: int, number: int) -> bytes:
    return f"{process} {number}".encode()


def batches(*numbers: int, process: int = 0) -> list[bytes]:
    return [batch(process, number) for number in numbers]


def follow(*, replayable: bool) -> tuple[Sequence, Log]:
    log = Log()
    return Sequence(log, replayable=replayable), log


def hear(sequence: Sequence, *numbers: int, process: int = 0) -> None:
    """Live batches come, and are looked at as far as that is possible."""
    for number in numbers:
        sequence.live(number, batch(process, number))
    while sequence.advance():
        pass


def answer(sequence: Sequence, *numbers: int, process: int = 0, end: bool = True) -> None:
    """Answers to the latest question come, until another one is asked."""
    asked = sequence.counts.replays
    for number in numbers:
        sequence.replayed(number, batch(process, number))
        if sequence.counts.replays != asked:
            return
    if end:
        sequence.replay_ended()
    while sequence.advance():
        pass


def fail(sequence: Sequence) -> None:
    sequence.replay_failed()
    while sequence.advance():
        pass


def joined(*numbers: int) -> tuple[Sequence, Log]:
    """A sequence that has applied these by a replay."""
    sequence, log = follow(replayable=True)
    sequence.reconnected()
    answer(sequence, *numbers)
    assert log.run == batches(*numbers)
    log.questions.clear()
    return sequence, log


def test_a_late_joiner_gets_what_was_before_it_first() -> None:
    sequence, log = follow(replayable=True)
    hear(sequence, 57, 58)
    assert (log.questions, log.run) == ([0], [])
    answer(sequence, *range(58))
    assert log.run == batches(*range(59))
    assert sequence.counts.gaps == 0


def test_a_gap_is_filled_before_the_live_batch_is_applied() -> None:
    sequence, log = joined(0, 1)
    hear(sequence, 4)
    assert log.run == batches(0, 1)
    hear(sequence, 5)
    assert log.questions == [1], "it begins with what is known, as a proof"
    answer(sequence, 1, 2, 3, 4)
    assert log.run == batches(0, 1, 2, 3, 4, 5)
    assert (sequence.counts.gaps, sequence.counts.forgotten) == (1, 0)


def test_batches_told_twice_are_applied_once() -> None:
    sequence, log = joined(0, 1)
    hear(sequence, 3)
    answer(sequence, 1, 1, 2, 2, 3, 2, 4)
    hear(sequence, 4, 5)
    assert log.run == batches(0, 1, 2, 3, 4, 5)


def test_numbers_that_fall_are_a_new_process() -> None:
    sequence, log = joined(*range(42))
    hear(sequence, 42)
    hear(sequence, 0, process=1)
    assert (log.run, log.questions) == ([], [0])
    answer(sequence, 0, process=1)
    hear(sequence, 1, process=1)
    assert log.run == batches(0, 1, process=1)
    assert sequence.counts.restarts == 1


def test_a_new_process_is_found_by_what_it_replays() -> None:
    """It has got further than the old one, so no number falls."""
    sequence, log = joined(0, 1, 2)
    sequence.reconnected()
    hear(sequence, 9, process=1)
    answer(sequence, *range(2, 10), process=1, end=False)
    assert log.questions == [2, 0]
    answer(sequence, *range(10), process=1)
    hear(sequence, 10, process=1)
    assert log.run == batches(*range(11), process=1)


def test_a_new_process_is_found_by_what_it_does_not_know() -> None:
    sequence, log = joined(0, 1, 2)
    sequence.reconnected()
    answer(sequence)
    assert (log.run, log.questions) == ([], [2, 0])
    answer(sequence, 0, process=1)
    assert log.run == batches(0, process=1)


def test_a_new_process_that_goes_on_where_the_old_one_stopped() -> None:
    sequence, log = joined(0, 1, 2)
    sequence.reconnected()
    hear(sequence, 3, process=1)
    answer(sequence, 2, 3, process=1, end=False)
    answer(sequence, 0, 1, 2, 3, process=1)
    assert log.run == batches(0, 1, 2, 3, process=1)


def test_a_connection_lost_and_found_changes_nothing() -> None:
    sequence, log = joined(0, 1, 2)
    sequence.reconnected()
    hear(sequence, 4)
    answer(sequence, 2, 3, 4)
    assert log.run == batches(0, 1, 2, 3, 4)
    assert sequence.counts.forgotten == 0


def test_what_is_no_longer_kept_clears_instead_of_guessing() -> None:
    sequence, log = joined(0, 1)
    hear(sequence, 90_000)
    answer(sequence, *range(80_000, 90_001))
    assert log.run == batches(*range(80_000, 90_001))
    assert (sequence.counts.forgotten, sequence.counts.restarts) == (1, 0)


def test_a_hole_that_the_publisher_has_itself_clears() -> None:
    sequence, log = joined(0, 1)
    hear(sequence, 4)
    answer(sequence, 1, 3, 4)
    assert log.run == batches(3, 4)


def test_answers_that_were_lost_on_the_way_are_asked_for_again() -> None:
    sequence, log = follow(replayable=True)
    sequence.reconnected()
    answer(sequence, 0, 1, 4, 5)
    assert log.questions == [0, 1]
    answer(sequence, 1, 2, 3, 4, 5)
    assert log.run == batches(*range(6))


def test_a_replay_that_stops_goes_on_where_it_was_while_it_gets_on() -> None:
    sequence, log = follow(replayable=True)
    sequence.reconnected()
    answer(sequence, 0, 1, end=False)
    fail(sequence)
    answer(sequence, 1, 2, end=False)
    fail(sequence)
    assert log.questions == [0, 1, 2]
    fail(sequence)
    assert not sequence.replaying
    hear(sequence, 3)
    assert log.run == batches(0, 1, 2, 3)


def test_an_incomplete_replay_clears_and_live_batches_go_on() -> None:
    sequence, log = joined(0, 1)
    hear(sequence, 5, 6)
    fail(sequence)
    hear(sequence, 7)
    assert log.run == batches(5, 6, 7)
    assert sequence.counts.failed_replays == 1


def test_after_a_reconnection_nothing_is_believed_that_no_replay_proves() -> None:
    sequence, log = joined(0, 1)
    sequence.reconnected()
    fail(sequence)
    assert log.run == []
    hear(sequence, 2, process=1)
    fail(sequence)
    assert log.run == batches(2, process=1)


def test_a_check_that_fails_changes_nothing() -> None:
    sequence, log = joined(0, 1)
    sequence.check()
    fail(sequence)
    assert log.run == batches(0, 1)


def test_a_check_brings_what_the_live_stream_lost_at_its_end() -> None:
    sequence, log = joined(0, 1)
    sequence.check()
    answer(sequence, 1, 2, 3)
    assert log.run == batches(0, 1, 2, 3)


def test_without_replays_a_gap_clears_and_a_late_joiner_knows_a_part() -> None:
    sequence, log = follow(replayable=False)
    sequence.reconnected()
    hear(sequence, 57, 58)
    assert log.run == batches(57, 58)
    hear(sequence, 60)
    assert log.run == batches(60)
    hear(sequence, 0, process=1)
    assert log.run == batches(0, process=1)
    assert (sequence.counts.gaps, sequence.counts.restarts) == (1, 1)
    assert log.questions == []


def test_a_publisher_that_keeps_nothing_is_followed_all_the_same() -> None:
    sequence, log = follow(replayable=True)
    sequence.reconnected()
    answer(sequence)
    hear(sequence, 7)
    answer(sequence)
    hear(sequence, 8, 9)
    assert log.run == batches(7, 8, 9)


@pytest.mark.parametrize("bound", ["MAX_HELD", "MAX_HELD_BYTES"])
def test_a_replay_is_given_up_when_too_much_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(module, bound, 20)
    sequence, log = joined(0)
    hear(sequence, 10)
    hear(sequence, *range(11, 100))
    assert log.run == batches(*range(10, 100))


def test_a_replay_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", 1000)
    sequence, log = joined(0)
    hear(sequence, 10)
    answer(sequence, *[0] * 1001, end=False)
    assert not sequence.replaying
    assert log.run == batches(10)


class Publisher:
    """One process, and what it keeps for replays."""

    def __init__(self, process: int, kept: int) -> None:
        self.process = process
        self.kept: deque[int] = deque(maxlen=kept)
        self.next = 0

    def publish(self) -> tuple[int, bytes]:
        number = self.next
        self.next += 1
        self.kept.append(number)
        return number, batch(self.process, number)


class Network(RuleBasedStateMachine):
    """A publisher that restarts, a live stream that loses, replays that stop or lose answers."""

    @initialize(kept=st.integers(1, 8))
    def join(self, kept: int) -> None:
        self.kept = kept
        self.publisher = Publisher(0, kept)
        self.log = Log()
        self.sequence = Sequence(self.log, replayable=True)
        self.pipe: list[tuple[int, bytes] | None] = [None]  # None: a connection begins
        self.answers: deque[tuple[int, bytes] | None] | None = None  # None: their end

    @rule(lost=st.lists(st.booleans(), min_size=1, max_size=4))
    def publish(self, lost: Iterable[bool]) -> None:
        for is_lost in lost:
            message = self.publisher.publish()
            if not is_lost:
                self.pipe.append(message)

    @rule()
    def publisher_loses_its_own(self) -> None:
        self.publisher.next += 1

    @rule(missed=st.integers(0, 4))
    def restart(self, missed: int) -> None:
        """The new process has published some before we are connected to it."""
        self.publisher = Publisher(self.publisher.process + 1, self.kept)
        for _ in range(missed):
            self.publisher.publish()
        self.pipe.append(None)

    @rule(missed=st.integers(0, 4))
    def reconnect(self, missed: int) -> None:
        for _ in range(missed):
            self.publisher.publish()
        self.pipe.append(None)

    @rule(count=st.integers(1, 4))
    def read_live(self, count: int) -> None:
        read, self.pipe = self.pipe[:count], self.pipe[count:]
        if None in read:
            self.sequence.reconnected()
        for message in read:
            if message is not None:
                self.sequence.live(*message)
        self.look()

    @precondition(lambda self: self.sequence.replaying)
    @rule(lost=st.lists(st.booleans(), max_size=9))
    def serve(self, lost: list[bool]) -> None:
        """The publisher reads the latest question, and answers."""
        first = self.log.questions[-1]
        numbers = [number for number in self.publisher.kept if number >= first]
        lost = lost + [False] * len(numbers)
        self.answers = deque(
            (number, batch(self.publisher.process, number))
            for number, is_lost in zip(numbers, lost, strict=False)
            if not is_lost
        )
        self.answers.append(None)

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 9))
    def read_answers(self, count: int) -> None:
        self.read_live(len(self.pipe))
        asked = len(self.log.questions)
        while count and self.answers and len(self.log.questions) == asked:
            message = self.answers.popleft()
            if message is None:
                self.sequence.replay_ended()
            else:
                self.sequence.replayed(*message)
            count -= 1
        if len(self.log.questions) != asked:
            self.answers = None
        self.look()

    @precondition(lambda self: self.sequence.replaying)
    @rule()
    def answers_stop(self) -> None:
        self.read_live(len(self.pipe))
        self.answers = None
        self.sequence.replay_failed()
        self.look()

    @rule()
    def check(self) -> None:
        self.sequence.check()

    def look(self) -> None:
        while self.sequence.advance():
            pass
        if not self.sequence.replaying:
            self.answers = None

    @rule()
    def all_is_well_in_the_end(self) -> None:
        """With nothing lost any more, all is known that the publisher has not lost itself."""
        self.publish([False])
        self.read_live(len(self.pipe))
        self.sequence.check()
        while self.sequence.replaying:
            self.serve([])
            self.read_answers(100)
        assert self.log.run[-1] == batch(self.publisher.process, self.publisher.next - 1)
        if self.sequence.counts.failed_replays == 0:
            first = self.publisher.next - 1
            while first - 1 in self.publisher.kept:
                first -= 1
            kept = batches(*range(first, self.publisher.next), process=self.publisher.process)
            assert self.log.run[-len(kept) :] == kept

    @invariant()
    def what_is_applied_is_an_unbroken_run_of_one_process(self) -> None:
        if self.log.run:
            process, first = map(int, self.log.run[0].split())
            numbers = range(first, first + len(self.log.run))
            assert self.log.run == batches(*numbers, process=process)


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
