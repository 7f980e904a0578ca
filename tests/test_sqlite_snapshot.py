"""Snapshots of a file: results at the limits of what is counted, and the rows that are read."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.explain.analysis import explain
from fairturn.explain.reasons import Code
from fairturn.explain.snapshot import ARRIVALS_MAX, ATTEMPTS_MAX, NEIGHBOURS_MAX
from fairturn.model import Claim, Completed, CustomerSettings, NewDocument, Settings
from fairturn.scheduling.flows import Mode
from fairturn.scheduling.position import Cause, Position, position
from fairturn.stores import positions
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore, snapshot
from fairturn.stores.sqlite import rows as sqlite_rows
from tests.servers.queues import Databases

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
    found = store.snapshot(id)
    assert found is not None
    assert found.queue_view is not None
    answer = position(found.queue_view, mode=found.settings.mode, costs=found.settings.costs)
    assert answer is not None
    return answer


def test_a_long_line_is_counted_from_the_nearer_end(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, "a" * 21)  # until all that follow are in one level
    ids = [id for n in range(20) for id in submit(store, "ab")[:1]]
    exact = [place(store, id).before.own for id in ids]
    monkeypatch.setattr(positions, "COUNTED_MAX", 6)

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
    monkeypatch.setattr(positions, "COUNTED_MAX", 3)

    assert place(store, ids[40]).bounds.most == 40


def test_in_mode_levels_a_full_level_is_not_counted(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.configure(Settings(mode=Mode.LEVELS))
    ids = submit(store, "abcabc")
    monkeypatch.setattr(positions, "COUNTED_MAX", 5)

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
    monkeypatch.setattr(snapshot, "EVENTS_MAX", 100)

    answers = {id: place(store, id) for id in ids}
    order = [claimed.document.id for _ in range(60) for claimed in claim(store)]

    for id, answer in answers.items():
        assert answer.causes[-1] is Cause.UNFOLDED
        assert answer.bounds.least <= order.index(id) <= answer.bounds.most


# ── Too many lines to read one by one ────────────────────────────────────────────────────────────


@pytest.fixture(params=["sqlite", "postgres"])
def either(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> Iterator[SqliteStore | PostgresStore]:
    with ExitStack() as stack:
        opened: SqliteStore | PostgresStore
        if request.param == "sqlite":
            opened = SqliteStore(tmp_path / "queue.db", clock=clock, synchronous="NORMAL")
        else:
            databases = stack.enter_context(Databases(recycled=True))
            opened = PostgresStore(databases.new(), clock=clock)
        stack.callback(opened.close)
        yield opened


def fill(store: Store, clock: ManualClock, mode: Mode) -> list[str]:
    """Submit one to nine documents per customer, some with a weight or a limit; serve some."""
    chance = Random(7)
    store.configure(Settings(mode=mode, patience_s=60.0))
    customers = [f"c{n}" for n in range(30)]
    store.adjust("c3", CustomerSettings(weight=3))
    store.adjust("c4", CustomerSettings(weight=0.25))
    store.adjust("c5", CustomerSettings(limit=2))
    ids: list[str] = []
    for _ in range(3):
        names = [name for name in customers for _ in range(chance.randint(1, 3))]
        chance.shuffle(names)
        ids += [receipt.id for receipt in store.submit([NewDocument(c, "1") for c in names])]
        claimed = store.claim(10, worker="w", lease_us=LEASE_US).claims
        ids = [id for id in ids if id not in {claim.document.id for claim in claimed}]
        clock.advance(1)
    return ids


@pytest.mark.parametrize("mode", [Mode.FAIR, Mode.EQUAL])
def test_lines_that_are_added_up_give_the_same_explanation_as_lines_that_are_read(
    either: SqliteStore | PostgresStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
) -> None:
    ids = fill(either, clock, mode)
    snapshots = [either.snapshot(id) for id in ids]
    read = [explain(found) for found in snapshots if found is not None]

    monkeypatch.setattr(positions, "LINES_MAX", 3)
    crowded = [found for found in map(either.snapshot, ids) if found is not None]

    views = [found.queue_view for found in crowded if found.queue_view is not None]
    assert any(view.other_lines.lines for view in views)
    for one, added_up in zip(read, map(explain, crowded), strict=True):
        assert added_up.position is not None
        assert one.position is not None
        assert added_up.position.before == one.position.before
        assert added_up.position.bounds == one.position.bounds
        assert added_up.reasons == one.reasons


@pytest.mark.parametrize("mode", [Mode.FAIR, Mode.EQUAL])
def test_beyond_the_patience_lines_that_are_added_up_give_bounds_that_hold(
    either: SqliteStore | PostgresStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
) -> None:
    ids = fill(either, clock, mode)
    clock.advance(100)
    read = [explain(found) for found in map(either.snapshot, ids) if found is not None]

    monkeypatch.setattr(positions, "LINES_MAX", 3)
    added_up = [explain(found) for found in map(either.snapshot, ids) if found is not None]

    ahead = [[r for r in one.reasons if r.code is Code.PATIENCE_OVER] for one in read]
    assert any(ahead)
    assert ahead == [[r for r in one.reasons if r.code is Code.PATIENCE_OVER] for one in added_up]
    for one, other in zip(read, added_up, strict=True):
        assert one.position is not None
        assert other.position is not None
        assert other.position.bounds.least <= one.position.before.total
        assert one.position.before.total <= other.position.bounds.most
        assert Cause.MANY_TURNS in other.position.causes or other.position.bounds.exact


def test_the_rows_that_an_explanation_reads_do_not_grow_with_the_customers(
    store: SqliteStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "LINES_MAX", 20)
    rows = 0
    fetch = sqlite_rows.fetch

    def counted(*args: Any) -> list[Any]:
        nonlocal rows
        found = fetch(*args)
        rows += len(found)
        return found

    monkeypatch.setattr(snapshot, "fetch", counted)
    read = []
    for first in range(0, 6_000, 2_000):
        names = [f"c{n}" for n in range(first, first + 2_000)]
        *_, last = store.submit([NewDocument(name, "1") for name in names])
        claim(store)
        clock.advance(200)
        rows = 0
        found = store.snapshot(last.id)
        assert found is not None
        assert found.queue_view is not None
        read.append((rows, len(found.queue_view.lines), len(found.queue_view.overdue)))

    numbers, lines, overdue = zip(*read, strict=True)
    assert (set(lines), set(overdue)) == ({1}, {1})  # its own
    assert max(numbers) - min(numbers) < 10  # running documents


# ── What is sampled ──────────────────────────────────────────────────────────────────────────────


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

    found = store.snapshot(id)

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

    found = store.snapshot(target)

    assert found is not None
    assert found.served is not None
    assert not found.served.complete
