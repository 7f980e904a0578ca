"""The position of a document, compared with the real engine: the queue is drained.

A case is a list of plain values that brings a store into some state. Then, without time passing,
the position of every waiting document is computed and the queue is drained in three ways: running
documents never end, end at once, or end only when no other document can be claimed.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fairturn.clock import SECOND_US, ManualClock
from fairturn.explain.snapshot import CountRange, OverdueHead, QueueView, WaitingLine
from fairturn.model import (
    DEFAULT_KIND_NAME,
    Advanced,
    Claim,
    Completed,
    CustomerSettings,
    Failed,
    Fence,
    NewDocument,
    Outcome,
    Released,
    Settings,
    Snoozed,
    State,
)
from fairturn.scheduling.flows import Costs, Mode, level_in
from fairturn.scheduling.position import Cause, Position, position
from fairturn.scheduling.position.closed_form import DocumentsAhead
from fairturn.stores.memory import MemoryStore

START = 1_700_000_000 * SECOND_US
PATIENCE_S = 120
LEASE_US = 3_600 * SECOND_US
STEEP = (0, -1, -2, -3, -4, -5, -6, -7)  # so that few documents are in many levels

# ── Programs that bring a queue into some state ──────────────────────────────────────────────────


class Submit(NamedTuple):
    customers: str
    due_in_s: int | None = None
    cost: int | None = None
    expires_in_s: int | None = None


class Serve(NamedTuple):
    n: int
    lease_s: int = 3_600


class End(NamedTuple):
    which: int
    how: str


class Cancel(NamedTuple):
    which: int


class Adjust(NamedTuple):
    customer: str
    weight: float
    limit: int | None
    paused: bool


class Advance(NamedTuple):
    seconds: int


Step = Submit | Serve | End | Cancel | Adjust | Advance

letters = st.sampled_from("abcdef")
some_letters = st.text("abcdef", min_size=1, max_size=8)
weights = st.sampled_from([0.3, 1.0, 1.0, 2.0, 3.5])
ENDINGS = ("next step", "later")


def steps(limits: st.SearchStrategy[int | None], costs: st.SearchStrategy[int | None]) -> Any:
    dues, expiries = (st.sampled_from([None] * 7 + [seconds]) for seconds in (5, 6))
    submits = st.builds(Submit, some_letters, dues, costs, expiries)
    return st.lists(
        st.one_of(
            submits,
            submits,
            submits,
            st.builds(Serve, st.integers(1, 6), st.sampled_from([5, 3_600, 3_600])),
            st.builds(End, st.integers(0, 9), st.sampled_from(["done", "back", "again", *ENDINGS])),
            st.builds(Cancel, st.integers(0, 30)),
            st.builds(Adjust, letters, weights, limits, st.sampled_from([False] * 4 + [True])),
            st.builds(Advance, st.sampled_from([1, 6, PATIENCE_S, PATIENCE_S + 1])),
        ),
        max_size=25,
    )


def store_after(program: list[Step], queue: Settings) -> tuple[MemoryStore, list[str]]:
    """Return a store after the program, and all its documents."""
    clock = ManualClock(START)
    store = MemoryStore(settings=queue, clock=clock, key=7)
    documents: list[str] = []
    running: list[Claim] = []
    for step in program:
        match step:
            case Submit():
                due, expiry = (
                    None if seconds is None else clock.now() + seconds * SECOND_US
                    for seconds in (step.due_in_s, step.expires_in_s)
                )
                new = [
                    NewDocument(c, "1", cost=step.cost, due_at=due, expires_at=expiry)
                    for c in step.customers
                ]
                documents += [receipt.id for receipt in store.submit(new)]
            case Serve():
                lease_us = step.lease_s * SECOND_US
                running += store.claim(step.n, worker="w", lease_us=lease_us).claims
            case End() if running:
                fence = running.pop(step.which % len(running)).fence
                outcomes: dict[str, Outcome] = {
                    "done": Completed(fence, real_cost=3_000_000),
                    "back": Released(fence),
                    "again": Failed(fence, "x", SECOND_US),
                    "next step": Advanced(fence, DEFAULT_KIND_NAME),
                    "later": Snoozed(fence, SECOND_US),
                }
                store.finish([outcomes[step.how]])
            case Cancel() if documents:
                store.cancel([documents[step.which % len(documents)]])
            case Adjust():
                limit, paused = step.limit, step.paused
                changed = CustomerSettings(weight=step.weight, limit=limit, paused=paused)
                store.adjust(step.customer, changed)
            case Advance():
                clock.advance(step.seconds)
    return store, documents


def drained(store: MemoryStore, *, ending: str = "never") -> dict[str, int]:
    """Return the index of each document in the order of claims. Running documents end `"never"`,
    `"at once"`, or `"late"`: when nothing else can be claimed."""
    places: dict[str, int] = {}
    running = [
        Fence(store._id(row.number), row.fence)
        for row in store._documents.values()
        if row.state is State.RUNNING and row.lease_until > store._clock.uptime().at
    ]
    while True:
        if ending == "at once":
            store.finish([Completed(fence) for fence in running])
            running.clear()
        if claims := store.claim(1, worker="w", lease_us=LEASE_US).claims:
            places[claims[0].document.id] = len(places)
            running.append(claims[0].fence)
        elif ending == "never" or not running:
            return places
        else:
            store.finish([Completed(running.pop())])


def positions(store: MemoryStore, ids: list[str], **options: Any) -> dict[str, Position | None]:
    """Return the positions of waiting documents; None for those of a paused customer."""
    found = {}
    for id in ids:
        snapshot = store.snapshot(id)
        assert snapshot is not None
        if snapshot.queue_view is not None:
            queue = snapshot.settings
            costs, mode = queue.costs, queue.mode
            found[id] = position(snapshot.queue_view, mode=mode, costs=costs, **options)
    return found


# ── The promises ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", list(Mode))
@given(
    program=steps(limits=st.just(None), costs=st.none()),
    bounds=st.sampled_from([STEEP, Settings().bounds]),
)
@settings(max_examples=120)
def test_without_limits_it_is_exact_and_so_is_each_part_of_it(
    mode: Mode, program: list[Step], bounds: tuple[int, ...]
) -> None:
    queue = Settings(mode=mode, bounds=bounds, patience_s=PATIENCE_S)
    store, ids = store_after(program, queue)

    found = positions(store, ids)
    claims = claims_in_order(store)

    order = [claimed.id for claimed in claims]
    for id, answer in found.items():
        if answer is None:
            assert id not in order
            continue
        place = order.index(id)
        assert answer.bounds == CountRange(place, place)
        assert answer.before == parts(claims[:place], claims[place])
        assert answer.reached
        assert answer.causes == ()
        event(f"turns for the longest waiting: {answer.before.longest_waiting > 0}")
    assert set(order) <= set(found)


class Claimed(NamedTuple):
    id: str
    customer: str
    level: int
    for_longest_waiting: bool


def claims_in_order(store: MemoryStore) -> list[Claimed]:
    """Claim everything. No store reports whether a claim was for the longest waiting; the engine's
    charge shows it: there is none."""
    claims: list[Claimed] = []
    while found := store.claim(1, worker="w", lease_us=LEASE_US).claims:
        document = found[0].document
        row = store._row(document.id)
        assert row is not None
        assert row.pick is not None
        turns = store.settings().mode is not Mode.LEVELS
        uncharged = turns and row.pick.cost is None
        claims.append(Claimed(document.id, document.customer, level_in(row.band), uncharged))
    return claims


def parts(before: list[Claimed], target: Claimed) -> DocumentsAhead:
    longest = sum(claimed.for_longest_waiting for claimed in before)
    ordinary = [claimed for claimed in before if not claimed.for_longest_waiting]
    others = [claimed for claimed in ordinary if claimed.customer != target.customer]
    better = sum(claimed.level < target.level for claimed in others)
    return DocumentsAhead(better, len(others) - better, longest, len(ordinary) - len(others))


@pytest.mark.parametrize("mode", list(Mode))
@given(
    program=steps(limits=st.sampled_from([None, None, 1, 2, 3]), costs=st.none()),
    bounds=st.sampled_from([STEEP, Settings().bounds]),
)
@settings(max_examples=120)
def test_with_limits_it_is_exact_if_nothing_ends_and_the_bounds_hold_whatever_ends(
    mode: Mode, program: list[Step], bounds: tuple[int, ...]
) -> None:
    queue = Settings(mode=mode, bounds=bounds, patience_s=PATIENCE_S)
    store, ids = store_after(program, queue)

    found = positions(store, ids)
    standing = drained(store)
    flowing, stalling = (
        drained(store_after(program, queue)[0], ending=ending) for ending in ("at once", "late")
    )

    for id, answer in found.items():
        if answer is None:
            assert id not in standing
            continue
        assert answer.reached is (id in standing)
        if answer.reached:
            assert answer.before.total == standing[id]
        for place in (standing.get(id), flowing.get(id), stalling.get(id)):
            assert place is None or answer.bounds.least <= place <= answer.bounds.most
        assert answer.bounds.exact is not bool(answer.causes)
        event(f"exact: {answer.bounds.exact}, reached: {answer.reached}")


@pytest.mark.parametrize("steps_max", [0, 3, 10])
@given(program=steps(limits=st.sampled_from([None, 2]), costs=st.none()))
def test_where_turns_are_too_many_to_take_the_bounds_hold(
    steps_max: int, program: list[Step]
) -> None:
    queue = Settings(bounds=STEEP, patience_s=PATIENCE_S)
    store, ids = store_after(program, queue)

    found = positions(store, ids, steps_max=steps_max)
    standing = drained(store)

    for id, answer in found.items():
        if answer is not None and id in standing:
            assert answer.bounds.least <= standing[id] <= answer.bounds.most
            event(f"gave up: {Cause.MANY_TURNS in answer.causes}")


@pytest.mark.parametrize("costs", [Costs.KNOWN, Costs.LEARNED])
@pytest.mark.parametrize("mode", [Mode.FAIR, Mode.EQUAL])
@given(
    program=steps(
        limits=st.sampled_from([None, None, 2]),
        costs=st.sampled_from([None, 0, 1, 500_000, 7_000_000]),
    )
)
def test_where_documents_cost_differently_the_bounds_hold(
    mode: Mode, costs: Costs, program: list[Step]
) -> None:
    queue = Settings(mode=mode, costs=costs, bounds=STEEP, patience_s=PATIENCE_S)
    store, ids = store_after(program, queue)

    found = positions(store, ids)
    standing = drained(store)
    flowing, stalling = (
        drained(store_after(program, queue)[0], ending=ending) for ending in ("at once", "late")
    )

    for id, answer in found.items():
        for place in (standing.get(id), flowing.get(id), stalling.get(id)):
            if answer is not None and place is not None:
                assert answer.bounds.least <= place <= answer.bounds.most
                event(f"exact: {answer.bounds.exact}")


# ── Cases by hand ────────────────────────────────────────────────────────────────────────────────


def queue_view(
    *lines: WaitingLine,
    rank: int = 0,
    number: int = 0,
    overdue: tuple[OverdueHead, ...] = (),
    level: int = 1,
) -> QueueView:
    """Return a view of a document of customer 1."""
    return QueueView(
        customer=1,
        level=level,
        rank=CountRange(rank, rank),
        number=number,
        clock=0,
        lines=tuple(sorted(lines)),
        others_by_level={},
        overdue=overdue,
        stalled=(),
        waiting=sum(line.waiting for line in lines),
    )


def test_a_customer_with_twice_the_weight_has_twice_the_turns_before_it() -> None:
    line = queue_view(
        WaitingLine(1, 0, 1, 1, 100, 1_000), WaitingLine(1, 0, 2, 2, 1_000, 500), rank=10
    )

    answer = position(line, mode=Mode.FAIR, costs=Costs.EQUAL)

    assert answer is not None
    assert answer.before == DocumentsAhead(other_turns=20, own=10)
    assert answer.turns == {2: 20}


def test_of_two_turns_at_one_place_the_earlier_tick_comes_first() -> None:
    earlier = queue_view(WaitingLine(1, 5, 2, 1, 1, 1_000), WaitingLine(1, 5, 1, 2, 1, 1_000))
    later = queue_view(WaitingLine(1, 5, 1, 1, 1, 1_000), WaitingLine(1, 5, 2, 2, 1, 1_000))

    assert [
        answer and answer.before.total
        for answer in (
            position(case, mode=Mode.FAIR, costs=Costs.EQUAL) for case in (earlier, later)
        )
    ] == [1, 0]


def test_every_tenth_claim_before_it_is_for_the_longest_waiting_as_long_as_there_are_any() -> None:
    own, other = WaitingLine(1, 0, 1, 1, 1_000, 1_000), WaitingLine(1, 0, 2, 2, 1_000, 1_000)
    overdue = tuple(OverdueHead(n, n, n, 9) for n in range(3, 8))
    line = queue_view(own, other, rank=45, number=3, overdue=overdue)

    answer = position(line, mode=Mode.FAIR, costs=Costs.EQUAL)

    # 90 ordinary claims and five others: the claims with the numbers 10, 20, 30, 40 and 50.
    assert answer is not None
    assert answer.before == DocumentsAhead(other_turns=45, longest_waiting=5, own=45)


def test_a_document_that_had_its_turn_as_the_longest_waiting_has_no_other_one() -> None:
    own, other = WaitingLine(2, 5, 3, 1, 1, 1_000), WaitingLine(2, 0, 2, 2, 1, 1_000)
    line = queue_view(
        own, other, WaitingLine(1, 0, 1, 3, 15, 1_000), overdue=(OverdueHead(0, 1, 2, 2),), level=2
    )

    answer = position(line, mode=Mode.FAIR, costs=Costs.EQUAL)

    assert answer is not None
    assert answer.before == DocumentsAhead(better_levels=15, longest_waiting=1)


def test_a_million_documents_are_counted_without_taking_a_turn() -> None:
    lines = [WaitingLine(1, n, n, n, 100, 1_000_000) for n in range(1, 10_001)]

    answer = position(queue_view(*lines, rank=99), mode=Mode.FAIR, costs=Costs.EQUAL, steps_max=0)

    assert answer is not None
    assert answer.bounds == CountRange(990_000, 990_000)


@pytest.mark.parametrize("rank", [0, 1])
def test_bounds_know_that_the_customers_oldest_may_have_its_turn_free_of_charge(rank: int) -> None:
    own, other = WaitingLine(1, 0, 2, 1, 5, 1_000), WaitingLine(1, 0, 1, 2, 100, 100)
    overdue = (OverdueHead(0, 1, 1, 1), OverdueHead(1, 2, 2, 1))
    line = queue_view(own, other, rank=rank, number=9, overdue=overdue)

    taken = position(line, mode=Mode.FAIR, costs=Costs.EQUAL)
    bounded = position(line, mode=Mode.FAIR, costs=Costs.EQUAL, steps_max=0)

    assert taken is not None
    assert bounded is not None
    assert taken.before == (
        DocumentsAhead() if rank == 0 else DocumentsAhead(other_turns=1, longest_waiting=1)
    )
    assert bounded.causes == (Cause.MANY_TURNS,)
    assert bounded.bounds.least <= taken.before.total <= bounded.bounds.most


def test_until_something_of_its_customer_ends_everything_in_the_queue_may_come_before_it() -> None:
    line = queue_view(
        WaitingLine(1, 0, 1, 1, 5, 1_000, capacity=0), WaitingLine(1, 0, 2, 2, 3, 1_000), rank=1
    )
    queue = replace(line, waiting=1_000)  # the others are in worse levels

    answer = position(queue, mode=Mode.FAIR, costs=Costs.EQUAL)

    assert answer is not None
    assert answer.before == DocumentsAhead(other_turns=1, own=1)
    assert not answer.reached
    assert answer.bounds == CountRange(2, 996)  # without itself, and three of its line behind it


def test_a_customer_at_its_limit_may_have_a_turn_as_the_longest_waiting_when_something_ends() -> (
    None
):
    line = queue_view(WaitingLine(1, 0, 1, 1, 1, 1_000), number=9)
    stalled = replace(line, stalled=(OverdueHead(0, 1, 2, 5),), waiting=2)

    answer = position(stalled, mode=Mode.FAIR, costs=Costs.EQUAL)

    assert answer is not None
    assert answer.bounds == CountRange(0, 1)
    assert answer.causes == (Cause.LIMITS,)
    soon = position(replace(stalled, number=8), mode=Mode.FAIR, costs=Costs.EQUAL)
    assert soon is not None
    assert soon.bounds == CountRange(0, 0)  # the next claim is for the longest waiting


def test_documents_that_were_not_counted_widen_the_bounds() -> None:
    line = queue_view(WaitingLine(1, 0, 1, 1, 100, 1_000))
    unsure = replace(line, rank=CountRange(3, 50), uncounted=7)

    answer = position(unsure, mode=Mode.FAIR, costs=Costs.EQUAL)

    assert answer is not None
    assert answer.bounds == CountRange(3, 57)
    assert answer.causes == (Cause.MANY_DOCUMENTS,)


def test_what_is_not_folded_in_leaves_only_what_waits_in_all() -> None:
    line = queue_view(WaitingLine(1, 0, 1, 1, 100, 1_000), rank=4)
    unsure = replace(line, folded=False, waiting=1_000)

    answer = position(unsure, mode=Mode.FAIR, costs=Costs.EQUAL)

    assert answer is not None
    assert answer.bounds == CountRange(
        0, 904
    )  # of 1,000 it is one, and 95 of its line are behind it
    assert Cause.UNFOLDED in answer.causes
