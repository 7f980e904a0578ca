"""Situations in a file: what is said at the limits of what is counted, and what is looked at."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.flows import Mode
from fairturn.model import Claim, Completed, CustomerSettings, NewDocument, Settings
from fairturn.position import Cause, Position, position
from fairturn.situation import ARRIVALS_MAX, ATTEMPTS_MAX, NEIGHBOURS_MAX, Notes
from fairturn.stores import lineups
from fairturn.stores.sqlite import SqliteStore, situating

START = 1_700_000_000 * SECOND_US
LEASE_US = 3_600 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "queue.db", clock=clock, synchronous="NORMAL")
    yield opened
    opened.close()


def submit(store: SqliteStore, customers: str) -> list[str]:
    return [receipt.id for receipt in store.submit([NewDocument(c, "1") for c in customers])]


def claim(store: SqliteStore, n: int = 1) -> list[Claim]:
    return store.claim(n, worker="w", lease_us=LEASE_US).claims


def place(store: SqliteStore, id: str) -> Position:
    found = store.situation(id)
    assert found is not None
    assert found.lineup is not None
    answer = position(found.lineup, mode=found.settings.mode, costs=found.settings.costs)
    assert answer is not None
    return answer


def test_a_long_line_is_counted_from_the_nearer_end(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, "a" * 21)  # until all that follow are in one level
    ids = [id for n in range(20) for id in submit(store, "ab")[:1]]
    exact = [place(store, id).before.own for id in ids]
    monkeypatch.setattr(lineups, "COUNTED_MAX", 6)

    answers = [place(store, id) for id in ids]

    for answer, before in zip(answers, exact, strict=True):
        assert answer.bounds.least <= before + answer.before.better_levels <= answer.bounds.most
    sure = [answer.bounds.exact for answer in answers]
    assert sure == [True] * 6 + [False] * 9 + [True] * 5
    assert Cause.MANY_DOCUMENTS in answers[10].causes


def test_a_long_line_without_gaps_is_known_without_counting_it(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = submit(store, "a" * 60)
    monkeypatch.setattr(lineups, "COUNTED_MAX", 3)

    assert place(store, ids[40]).bounds.most == 40


def test_in_mode_levels_a_full_level_is_not_counted(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.configure(Settings(mode=Mode.LEVELS))
    ids = submit(store, "abcabc")
    monkeypatch.setattr(lineups, "COUNTED_MAX", 5)

    answer = place(store, ids[4])

    assert answer.bounds.least <= 4 <= answer.bounds.most
    assert answer.causes == (Cause.MANY_DOCUMENTS,)


def test_when_too_much_was_recorded_the_bounds_hold_and_say_so(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, "abc" * 10)
    claim(store, 3)
    store.adjust("b", CustomerSettings(weight=3))
    ids = submit(store, "cab" * 10)
    monkeypatch.setattr(situating, "RECORDED_MAX", 100)

    answers = {id: place(store, id) for id in ids}
    order = [claimed.document.id for _ in range(60) for claimed in claim(store)]

    for id, answer in answers.items():
        assert answer.causes[-1] is Cause.UNFOLDED
        assert answer.bounds.least <= order.index(id) <= answer.bounds.most


def test_a_snapshot_reads_the_last_attempts_and_arrivals_and_no_more(
    store: SqliteStore, clock: ManualClock
) -> None:
    for _ in range(4):
        submit(store, "abcdefgh" * 20)
    for _ in range(20):
        claims = claim(store, 20)
        clock.advance(1)
        store.finish([Completed(claimed.fence) for claimed in claims])
    (id,) = submit(store, "a")

    found = store.situation(id)

    assert found is not None
    assert len(found.service.arrivals) == ARRIVALS_MAX
    assert len(found.service.attempts) == ATTEMPTS_MAX
    assert {attempt.duration for attempt in found.service.attempts} == {SECOND_US}


def test_only_the_neighbours_are_looked_at_for_who_was_served_meanwhile(
    store: SqliteStore, clock: ManualClock
) -> None:
    submit(store, "a" * (NEIGHBOURS_MAX + 5))
    (target,) = submit(store, "b")
    for _ in range(3):
        clock.advance(1)
        claim(store, 1)

    found = store.situation(target)

    assert found is not None
    assert found.served is not None
    assert not found.served.complete


def test_a_worker_is_noted_again_when_the_clock_was_set_back() -> None:
    notes = Notes()

    assert notes.due("w", START)
    assert not notes.due("w", START + 1)
    assert notes.due("w", START - SECOND_US)
