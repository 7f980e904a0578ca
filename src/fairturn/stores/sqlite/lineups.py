"""What stands before a waiting document, read from one snapshot of the file.

The engine of `turns.py` folds in what the next claim would fold in first, and is thrown away. Flows
are read, and documents only where they must be counted, up to a bound: the time does not depend on
how many wait.
"""

import json
from collections import Counter
from collections.abc import Set
from operator import itemgetter
from typing import NamedTuple

import apsw

from fairturn.clock import Uptime
from fairturn.flows import WEIGHT_ONE, Arrived, Changed, Event, Mode, Standing
from fairturn.model import Settings, State
from fairturn.situation import (
    Between,
    Front,
    Line,
    Lineup,
    charge_of,
    fronts_of,
    lines_of,
    told_apart,
)
from fairturn.stores.ending import Attempt, end_of_lease
from fairturn.stores.events import with_counts
from fairturn.stores.sqlite.rows import QueueRow, fetch, look_at_recorded
from fairturn.stores.sqlite.shelf import SqliteShelf
from fairturn.stores.values import DELAYED, RUNNING, Row
from fairturn.turns import Turns

# Of documents that are counted one by one, at most: a million take some 50 ms.
COUNTED_MAX = 1_000_000
# Of what was recorded since the last claim, in characters: as much is folded in within 100 ms.
RECORDED_MAX = 1_000_000

_LEVELS = "SELECT level, clock, weight FROM levels"
_RUNNING = f"""
    SELECT d.lease_until, d.number, d.customer, d.level, d.order_number, d.attempts,
        d.cancel_requested, d.worker, d.claimed_at
    FROM leases l CROSS JOIN json_each(l.documents) j CROSS JOIN documents d
    WHERE d.number = j.value AND d.state = {RUNNING} AND d.fence = l.fence"""
# By documents_delayed, in its order.
_DUE = f"""
    SELECT number, customer, level, order_number, due_at
    FROM documents INDEXED BY documents_delayed
    WHERE state = {DELAYED} AND due_at <= ? ORDER BY due_at, number"""

_HELD = "SELECT customer FROM standings WHERE running_max IS NOT NULL OR paused <> 0"
_CHARGED = "SELECT customer, weight, recent_costs FROM standings"
# By flows_head.
_FRONTS = """
    SELECT head_since, head_order, customer, level FROM flows INDEXED BY flows_head
    WHERE head_bound IS NOT NULL AND held = 0 AND head_bound < ?1 AND head_since < ?1"""
# The columns of a `Line`, and the name. It walks the flows, which is faster than to look each of
# them up by an index.
_LINES = """
    SELECT f.level, f.place, f.tick, f.customer, f.folded, ?, NULL, c.name
    FROM flows f NOT INDEXED LEFT JOIN customers c ON c.number = f.customer
    WHERE f.folded > 0 AND f.level IN (SELECT value FROM json_each(?))"""
_LINE, _NAME = itemgetter(slice(7)), itemgetter(3, 7)
# By the primary key.
_WAITING_OF = """
    SELECT level, sum(waiting) FROM flows
    WHERE customer IN (SELECT value FROM json_each(?)) GROUP BY level"""
_PAUSED = "SELECT paused FROM customers WHERE number = ?"

# By documents_flow, which answers by itself, from claimed_to on: there everything waits.
_IN_FLOW = "FROM documents INDEXED BY documents_flow WHERE customer = ? AND level = ?"
_COUNT_LOWER = f"""
    SELECT count(*) FROM (
        SELECT 1 {_IN_FLOW} AND order_number > ? AND order_number < ? LIMIT ?)"""
_COUNT_HIGHER = f"SELECT count(*) FROM (SELECT 1 {_IN_FLOW} AND order_number >= ? LIMIT ?)"
_CLAIMED_TO = "SELECT claimed_to, waiting FROM flows WHERE customer = ? AND level = ?"
# By documents_returned.
_RETURNED = """
    SELECT count(*) FROM documents INDEXED BY documents_returned
    WHERE returned = 1 AND customer = ? AND level = ? AND order_number < ?"""
_NO_ORDER = (1 << 63) - 1
# In mode `levels`: what is before an order, in all flows of a level.
_WAITING_IN_LEVEL = "SELECT coalesce(sum(waiting), 0) FROM flows NOT INDEXED WHERE level = ?"
_LOWER = """
    SELECT f.level, 0, 0, f.customer, (
            SELECT count(*) FROM documents d INDEXED BY documents_flow
            WHERE d.customer = f.customer AND d.level = f.level
                AND d.order_number > f.claimed_to AND d.order_number < ?1) + (
            SELECT count(*) FROM documents r INDEXED BY documents_returned
            WHERE r.returned = 1 AND r.customer = f.customer AND r.level = f.level
                AND r.order_number < ?1), 0, NULL, c.name
    FROM flows f NOT INDEXED LEFT JOIN customers c ON c.number = f.customer
    WHERE f.level = ?2 AND f.waiting > 0"""


class Place(NamedTuple):
    """Where a document waits."""

    customer: int
    level: int
    order: int


class Ahead(NamedTuple):
    """The queue as the next claim will find it, when it has folded in what happened."""

    turns: Turns
    shelf: SqliteShelf
    joining: dict[int, Place]  # by number: was taken back, or became due, and so waits too
    running: list[Row]  # of `_RUNNING`
    expired: set[int]  # of those, the numbers whose leases ran out
    folded: bool  # False: that was too much


def look_ahead(connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime) -> Ahead:
    """Fold in what happened since the last claim, in an engine that is not saved."""
    settings = queue.settings
    shelf = SqliteShelf(settings.mode)
    shelf.connection = connection
    shelf.given = queue.next_number - 1
    for level, clock, weight in connection.execute(_LEVELS):
        shelf.clocks[level], shelf.weights[level] = clock, weight
    turns = Turns(
        shelf,
        mode=settings.mode,
        costs=settings.costs,
        patience_us=settings.patience_us,
        number=queue.claims,
        tick=queue.tick,
        clocks=shelf.clocks,
        weights=shelf.weights,
    )
    running = sorted(fetch(connection, _RUNNING))
    ahead = Ahead(turns, shelf, {}, running, set(), folded=True)
    expired = _expired(ahead, queue, uptime)
    due = _due(connection, ahead, queue, now)
    recorded = look_at_recorded(connection, RECORDED_MAX)
    if recorded is None:
        return ahead._replace(folded=False)
    limited = {e.customer for _, es in recorded for e in es if type(e) is Changed and e.limit}
    still = [row for row in running if row[1] not in ahead.expired]
    counts = {c: dict(Counter(row[3] for row in still if row[2] == c)) for c in limited}
    turns.fold(now, expired=expired, recorded=with_counts(recorded, counts), due=due)
    return ahead


def _expired(ahead: Ahead, queue: QueueRow, uptime: Uptime) -> list[Event]:
    """Leases that ran out, oldest first; after a restart of the machine, all."""
    events: list[Event] = []
    for until, number, *rest in ahead.running:
        if queue.boot == uptime.boot and until > uptime.at:
            continue
        ahead.expired.add(number)
        attempt = Attempt(*rest[:5])
        ending = end_of_lease(attempt, queue.settings)
        events.append(ending.event)
        if ending.state is State.WAITING:
            ahead.joining[number] = Place(attempt.customer, attempt.level, attempt.order)
    return events


def _due(
    connection: apsw.Connection, ahead: Ahead, queue: QueueRow, now: int
) -> list[tuple[int, Arrived]]:
    """Delays that are over; who has no order yet gets the next one."""
    due: list[tuple[int, Arrived]] = []
    following = queue.next_number
    for number, customer, level, given, due_at in fetch(connection, _DUE, (now,)):
        order = following if given is None else given
        following += given is None
        ahead.joining[number] = Place(customer, level, order)
        due.append((due_at, Arrived(customer, level, order, 1)))
    return due


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────


def lineup(
    connection: apsw.Connection, queue: QueueRow, ahead: Ahead, place: Place, now: int
) -> Lineup:
    """What stands before the document that waits at this place."""
    rank = _rank(connection, ahead, place)
    if not ahead.folded:
        return _unfolded(connection, queue, ahead, place, rank)
    settings = queue.settings
    singled = _singled(connection, ahead, place)
    fronts, stalled = _fronts(connection, singled, settings, now)
    lines = [line for s in singled.values() for line in lines_of(s, settings)]
    lines = [line for line in lines if line.level <= place.level]
    apart: Set[int] = {place.level}
    uncounted = 0
    if settings.mode is Mode.LEVELS:
        uncounted = _add_lower(connection, ahead, singled, lines, place)
    else:
        apart = told_apart(fronts, lines, place.customer, place.level)
        lines += _others(connection, ahead, singled, settings, apart)
    better = [level for level in range(1, place.level) if level not in apart]
    return Lineup(
        customer=place.customer,
        level=place.level,
        rank=rank,
        number=ahead.turns.number,
        clock=ahead.turns.clocks[place.level],
        lines=tuple(lines),
        crowds=_crowds(connection, queue, singled, better),
        fronts=tuple(fronts),
        stalled=tuple(stalled),
        waiting=_waiting(queue, ahead, singled),
        uncounted=uncounted,
    )


def _unfolded(
    connection: apsw.Connection, queue: QueueRow, ahead: Ahead, place: Place, rank: Between
) -> Lineup:
    """Too much has happened since the last claim: only how many wait in all is known."""
    customer, level, _ = place
    paused = connection.execute(_PAUSED, (customer,)).get
    own = Line(level, 0, 0, customer, rank.most + 1, WEIGHT_ONE)
    return Lineup(
        customer=customer,
        level=level,
        rank=rank,
        number=queue.claims,
        clock=0,
        lines=() if paused else (own,),
        crowds={},
        fronts=(),
        stalled=(),
        waiting=_waiting(queue, ahead, {}),
        folded=False,
    )


def _waiting(queue: QueueRow, ahead: Ahead, singled: dict[int, Standing]) -> int:
    """How many documents wait in the queue. Whoever is paused is singled out."""
    held = (flow.waiting for s in singled.values() if s.paused for flow in s.flows.values())
    return sum(queue.waiting) + len(ahead.joining) - sum(held)


def _rank(connection: apsw.Connection, ahead: Ahead, place: Place) -> Between:
    """How many documents of the flow have a lower order, counted from either end."""
    flow, order = place[:2], place.order
    others = connection.execute(_RETURNED, (*flow, order)).get
    others += sum(joined[:2] == flow and joined.order < order for joined in ahead.joining.values())
    found = fetch(connection, _CLAIMED_TO, flow)
    if not found:
        return Between(others, others)
    ((claimed_to, waiting),) = found
    lower = connection.execute(_COUNT_LOWER, (*flow, claimed_to, order, COUNTED_MAX)).get
    if lower < COUNTED_MAX:
        return Between(lower + others, lower + others)
    higher = connection.execute(_COUNT_HIGHER, (*flow, order, COUNTED_MAX)).get
    in_line = waiting - connection.execute(_RETURNED, (*flow, _NO_ORDER)).get
    if higher < COUNTED_MAX:
        return Between(in_line - higher + others, in_line - higher + others)
    # Orders are whole numbers: between two of them there is room for so many, and no more.
    most = min(in_line - higher, order - claimed_to - 1)
    return Between(lower + others, most + others)


def _fronts(
    connection: apsw.Connection, singled: dict[int, Standing], settings: Settings, now: int
) -> tuple[list[Front], list[Front]]:
    """The oldest documents beyond their patience, and those of customers at their limit."""
    if settings.mode is Mode.LEVELS:
        return [], []
    fronts, stalled = fronts_of(singled.values(), settings, now)
    rows = fetch(connection, _FRONTS, (now - settings.patience_us,))
    fronts += (front for front in map(Front._make, rows) if front.customer not in singled)
    fronts.sort()
    return fronts, stalled


def _singled(connection: apsw.Connection, ahead: Ahead, place: Place) -> dict[int, Standing]:
    """The customers whose lines are told apart in every level: those that were changed since the
    last claim, have a limit or are paused; and its own."""
    singled = dict(ahead.turns.standings)
    held = [customer for (customer,) in fetch(connection, _HELD)]
    for customer in [place.customer, *held]:
        if customer not in singled:
            singled[customer] = ahead.shelf.standing(customer)
    return singled


def _others(
    connection: apsw.Connection,
    ahead: Ahead,
    singled: dict[int, Standing],
    settings: Settings,
    levels: Set[int],
) -> list[Line]:
    """The lines of all others in these levels."""
    plain = charge_of(settings, WEIGHT_ONE, ())
    rows = fetch(connection, _LINES, (plain, json.dumps([*levels])))
    ahead.shelf.names.update(map(_NAME, rows))
    charges = {
        customer: charge_of(settings, weight, tuple(json.loads(costs)))
        for customer, weight, costs in fetch(connection, _CHARGED)
    }
    return [
        line if line.customer not in charges else line._replace(charge=charges[line.customer])
        for line in map(Line._make, map(_LINE, rows))
        if line.customer not in singled
    ]


def _crowds(
    connection: apsw.Connection, queue: QueueRow, singled: dict[int, Standing], levels: list[int]
) -> dict[int, int]:
    """How many documents of all others wait in these levels, which are no others than priorities:
    in mode `equal` there are none."""
    if not levels:
        return {}
    told = dict(connection.execute(_WAITING_OF, (json.dumps([*singled]),)))
    crowds = {level: queue.waiting[level - 1] - told.get(level, 0) for level in levels}
    return {level: n for level, n in crowds.items() if n}


def _add_lower(
    connection: apsw.Connection,
    ahead: Ahead,
    singled: dict[int, Standing],
    lines: list[Line],
    place: Place,
) -> int:
    """In mode `levels`: let the lines of its level have only those documents that come before it,
    and add those of all others. The answer is how many more there may be, if that is too many."""
    own, level, order = place
    waiting: int = connection.execute(_WAITING_IN_LEVEL, (level,)).get
    rows = fetch(connection, _LOWER, (order, level)) if waiting <= COUNTED_MAX else []
    ahead.shelf.names.update(map(_NAME, rows))
    lower = Counter({row[3]: row[4] for row in rows})
    lower.update(c for c, n, o in ahead.joining.values() if n == level and o < order)
    for n, line in enumerate(lines):
        if line.level == level and line.customer != own:
            lines[n] = line._replace(waiting=lower[line.customer])
    others = (row for row in rows if row[4] and row[3] not in singled)
    lines += map(Line._make, map(_LINE, others))
    return 0 if waiting <= COUNTED_MAX else waiting
