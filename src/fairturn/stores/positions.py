"""What stands before a waiting document, read from one snapshot of a database.

The engine of `turns.py` folds in what the next claim would fold in first, and is thrown away. Flows
are read, and documents only where they must be counted, up to a bound: the time does not depend on
how many wait.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from operator import itemgetter
from typing import NamedTuple, Protocol

from fairturn.explain.snapshot import (
    Between,
    Crowd,
    Front,
    Line,
    Lineup,
    charge_of,
    fronts_of,
    lines_of,
    told_apart,
)
from fairturn.model import Settings, State
from fairturn.scheduling.flows import WEIGHT_ONE, Arrived, Changed, Event, Mode, Recorded, Standing
from fairturn.scheduling.turns import Turns
from fairturn.stores.events import with_counts
from fairturn.stores.transitions import Attempt, end_of_lease, has_ended
from fairturn.stores.values import Row

# Of documents that are counted one by one, at most: a million take some 100 ms.
COUNTED_MAX = 1_000_000
# Lines, and customers beyond their patience, that are read one by one. Where there are more, the
# database adds them up in one scan of the flows (`Crowd`), and the position has bounds.
LINES_MAX = 10_000
LARGEST = 5  # customers of a crowd that can be named
_LINE, _NAME = itemgetter(slice(7)), itemgetter(3, 7)

FlowKey = tuple[int, int]  # customer, level


class Place(NamedTuple):
    """Where a document waits."""

    customer: int
    level: int
    order: int


class NamedShelf(Protocol):
    """What the engine reads, with the names of the customers that were read."""

    names: dict[int, str]

    def standing(self, customer: int) -> Standing: ...


class Sight(Protocol):
    """One snapshot of a queue, as this module reads it."""

    settings: Settings
    now: int
    turns: Turns  # as the last claim left it
    leases_end_at: int | None  # those up to it ran out; None: all did, with the boot
    following: int  # the next order that is given out

    @property
    def shelf(self) -> NamedShelf:
        """What the engine reads from."""
        ...

    @property
    def waiting(self) -> Sequence[int]:
        """How many documents wait, of priorities 1 to 9."""
        ...

    def running(self) -> list[Row]:
        """lease_until, number, customer, level, order_number, attempts, cancel_requested, worker
        and claimed_at of what runs."""
        ...

    def due(self) -> list[Row]:
        """number, customer, level, order_number and due_at of delays that are over, in order."""
        ...

    def recorded(self) -> list[Recorded] | None:
        """What was recorded since the last claim; None if it is too much."""
        ...

    def expect(self, customers: Collection[int]) -> None:
        """The engine will read these customers."""
        ...

    def held(self) -> list[int]:
        """Customers with a limit, or paused."""
        ...

    def charged(self) -> Iterable[tuple[int, int, Sequence[int]]]:
        """Customers that are not as by default: their weights and recent costs."""
        ...

    def fronts(self, before: int, most: int) -> list[Row]:
        """The columns of a `Front`, of up to `most` flows whose customers' heads are that since
        before."""
        ...

    def lines(self, charge: int, levels: Collection[int], most: int) -> list[Row]:
        """The columns of a `Line`, with this charge, and the name; of up to `most` flows of these
        levels."""
        ...

    def crowd(self, level: int, place: int, tick: int, without: Collection[int]) -> Row:
        """Of all flows of a level but for those of some customers: how many they are; their
        documents; how many of these have a turn before (place, tick); and how many flows have any
        of those. A turn costs what the weight of its customer says."""
        ...

    def largest(
        self, level: int, place: int, tick: int, without: Collection[int], most: int
    ) -> list[Row]:
        """customer, documents before the place, and name, of those that have most of them."""
        ...

    def count_fronts(
        self, before: int, own: tuple[int, int], without: Collection[int]
    ) -> tuple[int, int]:
        """How many flows `fronts` would have without those of some customers; and how many of them
        have a lower (head_since, head_order) than `own`."""
        ...

    def lower(self, level: int, order: int, singled: Collection[int]) -> list[Row]:
        """The same for all flows of a level in which something waits, and those of the customers
        singled out: with how many documents have a lower order."""
        ...

    def waiting_of(self, customers: Collection[int]) -> dict[int, int]:
        """How many documents of these customers wait, by level."""
        ...

    def is_paused(self, customer: int) -> bool: ...

    def claimed_to(self, flow: FlowKey) -> int | None:
        """After this order what waits was not returned; None: nothing like that waits."""
        ...

    def waiting_in(self, flow: FlowKey) -> int: ...

    def returned(self, flow: FlowKey, before: int | None) -> int:
        """How many documents of a flow were returned, of lower orders than this one."""
        ...

    def between(self, flow: FlowKey, after: int, before: int, most: int) -> int:
        """How many others wait between two orders, up to so many."""
        ...

    def not_before(self, flow: FlowKey, order: int, most: int) -> int:
        """How many others wait from an order on, up to so many."""
        ...


class Ahead(NamedTuple):
    """The queue as the next claim will find it, when it has folded in what happened."""

    joining: dict[int, Place]  # by number: was taken back, or became due, and so waits too
    running: list[Row]
    expired: set[int]  # of those, the numbers whose leases ran out
    folded: bool  # False: that was too much


def look_ahead(sight: Sight) -> Ahead:
    """Fold in what happened since the last claim, in an engine that is not saved."""
    ahead = Ahead({}, sorted(sight.running()), set(), folded=True)
    expired = _expired(sight, ahead)
    due = _due(sight, ahead)
    recorded = sight.recorded()
    if recorded is None:
        return ahead._replace(folded=False)
    limited = {e.customer for _, es in recorded for e in es if type(e) is Changed and e.limit}
    still = [row for row in ahead.running if row[1] not in ahead.expired]
    counts = {c: dict(Counter(row[3] for row in still if row[2] == c)) for c in limited}
    happened = {event.customer for _, events in recorded for event in events}
    happened |= {event.customer for event in expired} | {event.customer for _, event in due}
    sight.expect(happened)
    recorded = with_counts(recorded, counts)
    sight.turns.fold(sight.now, expired=expired, recorded=recorded, due=due)
    return ahead


def _expired(sight: Sight, ahead: Ahead) -> list[Event]:
    """Leases that ran out, oldest first; after a restart of the machine, all."""
    events: list[Event] = []
    for until, number, *rest in ahead.running:
        if not has_ended(until, sight.leases_end_at):
            continue
        ahead.expired.add(number)
        attempt = Attempt(*rest[:5])
        ending = end_of_lease(attempt, sight.settings)
        events.append(ending.event)
        if ending.state is State.WAITING:
            ahead.joining[number] = Place(attempt.customer, attempt.level, attempt.order)
    return events


def _due(sight: Sight, ahead: Ahead) -> list[tuple[int, Arrived]]:
    """Delays that are over; who has no order yet gets the next one."""
    due: list[tuple[int, Arrived]] = []
    following = sight.following
    for number, customer, level, given, due_at in sight.due():
        order = following if given is None else given
        following += given is None
        ahead.joining[number] = Place(customer, level, order)
        due.append((due_at, Arrived(customer, level, order, 1)))
    return due


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────


def lineup(sight: Sight, ahead: Ahead, place: Place) -> Lineup:
    """What stands before the document that waits at this place."""
    rank = _rank(sight, ahead, place)
    if not ahead.folded:
        return _unfolded(sight, ahead, place, rank)
    settings, turns = sight.settings, sight.turns
    singled = _singled(sight, place)
    fronts, stalled = fronts_of(singled.values(), settings, sight.now)
    lines = [line for s in singled.values() for line in lines_of(s, settings)]
    lines = [line for line in lines if line.level <= place.level]
    apart: Set[int] = {place.level}
    uncounted, crowd = 0, None
    if settings.mode is Mode.LEVELS:
        uncounted = _add_lower(sight, ahead, singled, lines, place)
    else:
        told = _tell_apart(sight, singled, place, fronts, lines)
        if told is None:
            crowd = _crowd(sight, singled, place, fronts=fronts, lines=lines, rank=rank)
        else:
            apart, fronts, lines = told
    better = [level for level in range(1, place.level) if level not in apart]
    return Lineup(
        customer=place.customer,
        level=place.level,
        rank=rank,
        number=turns.number,
        clock=turns.clocks[place.level],
        lines=tuple(lines),
        crowds=_crowds(sight, singled, better),
        fronts=tuple(fronts),
        stalled=tuple(stalled),
        waiting=_waiting(sight, ahead, singled),
        uncounted=uncounted,
        crowd=crowd,
    )


def _tell_apart(
    sight: Sight,
    singled: dict[int, Standing],
    place: Place,
    fronts: list[Front],
    lines: list[Line],
) -> tuple[Set[int], list[Front], list[Line]] | None:
    """The levels whose lines are told apart, all fronts, and the lines of these levels; None if
    there are more than `LINES_MAX`. Given are those of the customers singled out."""
    rows = sight.fronts(sight.now - sight.settings.patience_us, LINES_MAX + 1)
    if len(rows) > LINES_MAX:
        return None
    fronts = fronts + [front for front in map(Front._make, rows) if front.customer not in singled]
    apart = told_apart(fronts, lines, place.customer, place.level)
    others = _others(sight, singled, apart)
    return None if others is None else (apart, sorted(fronts), lines + others)


def _crowd(
    sight: Sight,
    singled: dict[int, Standing],
    place: Place,
    *,
    fronts: list[Front],
    lines: list[Line],
    rank: Between,
) -> Crowd:
    """All other lines of the level together. `position` counts with the least and the highest rank,
    and with one less than the least, if the oldest document may have a turn of its own."""
    own = next((ln for ln in lines if (ln.customer, ln.level) == place[:2]), None)
    front = next((front for front in fronts if front.customer == place.customer), None)
    patient = sight.now - sight.settings.patience_us
    mine = (0, 0) if front is None else front[:2]
    beyond, ahead = sight.count_fronts(patient, mine, singled)
    if own is None:  # paused: it has no position
        return Crowd(0, 0, {}, 0, {}, beyond, ahead)

    def turn(rank: int) -> tuple[int, int]:
        return own.virtual_time + rank * own.charge, own.tick

    number, waiting, before, customers = sight.crowd(place.level, *turn(rank.least), singled)
    earlier = {max(0, rank.least - 1)} if front is not None else set()
    before_by_rank = {rank.least: before or 0}
    for other in {rank.most, *earlier} - {rank.least}:
        before_by_rank[other] = sight.crowd(place.level, *turn(other), singled)[2] or 0
    largest = sight.largest(place.level, *turn(rank.least), singled, LARGEST)
    sight.shelf.names.update((customer, name) for customer, _, name in largest)
    return Crowd(
        lines=number,
        waiting=waiting or 0,
        before=before_by_rank,
        customers=customers,
        largest={customer: n for customer, n, _ in largest if n},
        fronts=beyond,
        fronts_ahead=ahead,
    )


def _unfolded(sight: Sight, ahead: Ahead, place: Place, rank: Between) -> Lineup:
    """Too much has happened since the last claim: only how many wait in all is known."""
    customer, level, _ = place
    own = Line(level, 0, 0, customer, rank.most + 1, WEIGHT_ONE)
    return Lineup(
        customer=customer,
        level=level,
        rank=rank,
        number=sight.turns.number,
        clock=0,
        lines=() if sight.is_paused(customer) else (own,),
        crowds={},
        fronts=(),
        stalled=(),
        waiting=_waiting(sight, ahead, {}),
        folded=False,
    )


def _waiting(sight: Sight, ahead: Ahead, singled: dict[int, Standing]) -> int:
    """How many documents wait in the queue. Whoever is paused is singled out."""
    held = (flow.waiting for s in singled.values() if s.paused for flow in s.flows.values())
    return sum(sight.waiting) + len(ahead.joining) - sum(held)


def _rank(sight: Sight, ahead: Ahead, place: Place) -> Between:
    """How many documents of the flow have a lower order, counted from either end."""
    flow, order = place[:2], place.order
    others = sight.returned(flow, order)
    others += sum(joined[:2] == flow and joined.order < order for joined in ahead.joining.values())
    claimed_to = sight.claimed_to(flow)
    if claimed_to is None:
        return Between(others, others)
    lower = sight.between(flow, claimed_to, order, COUNTED_MAX)
    if lower < COUNTED_MAX:
        return Between(lower + others, lower + others)
    higher = sight.not_before(flow, order, COUNTED_MAX)
    in_line = sight.waiting_in(flow) - sight.returned(flow, None)
    if higher < COUNTED_MAX:
        return Between(in_line - higher + others, in_line - higher + others)
    # Orders are whole numbers: between two of them there is room for so many, and no more.
    most = min(in_line - higher, order - claimed_to - 1)
    return Between(lower + others, most + others)


def _singled(sight: Sight, place: Place) -> dict[int, Standing]:
    """The customers whose lines are told apart in every level: those that were changed since the
    last claim, have a limit or are paused; and its own."""
    singled = dict(sight.turns.standings)
    for customer in [place.customer, *sight.held()]:
        if customer not in singled:
            singled[customer] = sight.shelf.standing(customer)
    return singled


def _others(sight: Sight, singled: dict[int, Standing], levels: Set[int]) -> list[Line] | None:
    """The lines of all others in these levels; None if there are more than `LINES_MAX`."""
    rows = sight.lines(charge_of(sight.settings, WEIGHT_ONE, ()), levels, LINES_MAX + 1)
    if len(rows) > LINES_MAX:
        return None
    sight.shelf.names.update(map(_NAME, rows))
    charges = {
        customer: charge_of(sight.settings, weight, tuple(costs))
        for customer, weight, costs in sight.charged()
    }
    return [
        line if line.customer not in charges else line._replace(charge=charges[line.customer])
        for line in map(Line._make, map(_LINE, rows))
        if line.customer not in singled
    ]


def _crowds(sight: Sight, singled: dict[int, Standing], levels: list[int]) -> dict[int, int]:
    """How many documents of all others wait in these levels, which are no others than priorities:
    in mode `equal` there are none."""
    if not levels:
        return {}
    told = sight.waiting_of(singled)
    crowds = {level: sight.waiting[level - 1] - told.get(level, 0) for level in levels}
    return {level: n for level, n in crowds.items() if n}


def _add_lower(
    sight: Sight, ahead: Ahead, singled: dict[int, Standing], lines: list[Line], place: Place
) -> int:
    """In mode `levels`: let the lines of its level have only those documents that come before it,
    and add those of all others. The answer is how many more there may be, if that is too many."""
    own, level, order = place
    waiting = sight.waiting[level - 1]
    rows = sight.lower(level, order, singled) if waiting <= COUNTED_MAX else []
    sight.shelf.names.update(map(_NAME, rows))
    lower = Counter({row[3]: row[4] for row in rows})
    lower.update(c for c, n, o in ahead.joining.values() if n == level and o < order)
    for n, line in enumerate(lines):
        if line.level == level and line.customer != own:
            lines[n] = line._replace(waiting=lower[line.customer])
    others = (row for row in rows if row[4] and row[3] not in singled)
    lines += map(Line._make, map(_LINE, others))
    return 0 if waiting <= COUNTED_MAX else waiting
