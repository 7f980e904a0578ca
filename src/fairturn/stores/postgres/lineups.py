"""What stands before a waiting document, read from one snapshot.

The engine of `turns.py` folds in what the next claim would fold in first, and is thrown away. Flows
are read, and documents only where they must be counted, up to a bound: the time does not depend on
how many wait.
"""

from collections import Counter
from collections.abc import Set
from operator import itemgetter
from typing import NamedTuple

from fairturn.clock import Uptime
from fairturn.flows import WEIGHT_ONE, Arrived, Changed, Event, Mode, Standing
from fairturn.model import Settings, State, level_of
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
from fairturn.stores.postgres.database import Session
from fairturn.stores.postgres.reading import summary
from fairturn.stores.postgres.rows import (
    NO_ORDER,
    RECORDED_COLUMNS,
    TURNS,
    QueueRow,
    TurnsRow,
    to_recorded,
)
from fairturn.stores.postgres.shelf import PostgresShelf
from fairturn.stores.values import RUNNING, WAITING, Row
from fairturn.turns import Turns

# Of documents that are counted one by one, at most: a million take some 100 ms.
COUNTED_MAX = 1_000_000
# Of what was recorded since the last claim, in rows: as much is folded in within 100 ms.
RECORDED_MAX = 20_000

_RECORDED = f"SELECT {RECORDED_COLUMNS} FROM fairturn.recorded LIMIT %s"
_RUNNING = f"""
    SELECT d.lease_until, d.number, d.customer, d.level, d.order_number, d.attempts,
        d.cancel_requested, d.worker, d.claimed_at
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE d.state = {RUNNING} AND d.fence = l.fence"""
# By documents_delayed, in its order.
_DUE = """
    SELECT number, customer, level, order_number, delayed_until FROM fairturn.documents
    WHERE delayed_until <= %s ORDER BY delayed_until, number"""
_FOLLOWING = """
    SELECT last_value + CASE WHEN is_called THEN 1 ELSE 0 END FROM fairturn.document_numbers"""

_HELD = "SELECT customer FROM fairturn.standings WHERE running_max IS NOT NULL OR paused"
_CHARGED = "SELECT customer, weight, recent_costs FROM fairturn.standings"
# By flows_head.
_FRONTS = """
    SELECT head_since, head_order, customer, level FROM fairturn.flows
    WHERE head_bound IS NOT NULL AND NOT held AND head_bound < %(before)s
        AND head_since < %(before)s"""
# The columns of a `Line`, and the name.
_LINES = """
    SELECT f.level, f.place, f.tick, f.customer, f.folded, %s::bigint, NULL, c.name
    FROM fairturn.flows f LEFT JOIN fairturn.customers c ON c.number = f.customer
    WHERE f.folded > 0 AND f.level = ANY (%s::smallint[])"""
_LINE, _NAME = itemgetter(slice(7)), itemgetter(3, 7)
# By the primary keys: what arrived, less what claims have taken, and what others have moved.
WAITING_OF = """
    SELECT w.customer, a.priority, a.n - coalesce((
            SELECT f.taken FROM fairturn.flows f
            WHERE f.customer = w.customer AND f.level = a.priority), 0) + coalesce((
            SELECT sum(m.waiting) FROM fairturn.moved m
            WHERE m.customer = w.customer AND m.priority = a.priority), 0)::bigint
    FROM unnest(%s::bigint[]) AS w(customer)
        JOIN fairturn.customers c ON c.number = w.customer
        CROSS JOIN LATERAL unnest(c.arrived) WITH ORDINALITY AS a(n, priority)"""
_PAUSED = "SELECT paused FROM fairturn.customers WHERE number = %s"

# By documents_flow, from claimed_to on.
_IN_FLOW = f"""
    FROM fairturn.documents
    WHERE customer = %s AND level = %s AND state = {WAITING} AND NOT returned"""
_COUNT_LOWER = f"""
    SELECT count(*) FROM (
        SELECT 1 {_IN_FLOW} AND order_number > %s AND order_number < %s LIMIT %s) d"""
_COUNT_HIGHER = f"SELECT count(*) FROM (SELECT 1 {_IN_FLOW} AND order_number >= %s LIMIT %s) d"
_CLAIMED_TO = """
    SELECT CASE WHEN claimed_to < 9223372036854775807 THEN claimed_to ELSE 0 END
    FROM fairturn.flows WHERE customer = %s AND level = %s"""
# By documents_returned.
_RETURNED = """
    SELECT count(*) FROM fairturn.documents
    WHERE returned AND customer = %s AND level = %s AND order_number < %s"""
# In mode `levels`: what is before an order, in all flows of a level.
_LOWER = f"""
    SELECT f.level, 0, 0, f.customer, (
            SELECT count(*) FROM fairturn.documents d
            WHERE d.customer = f.customer AND d.level = f.level AND d.state = {WAITING}
                AND d.order_number > CASE WHEN f.claimed_to < {NO_ORDER} THEN f.claimed_to
                    ELSE 0 END
                AND d.order_number < %(order)s AND NOT d.returned) + (
            SELECT count(*) FROM fairturn.documents r
            WHERE r.returned AND r.customer = f.customer AND r.level = f.level
                AND r.order_number < %(order)s), 0, NULL, c.name
    FROM (
        SELECT w.customer, %(level)s::smallint AS level, coalesce(o.claimed_to, 0) AS claimed_to
        FROM (
            SELECT customer FROM fairturn.flows WHERE level = %(level)s AND folded > 0
            UNION
            SELECT unnest(%(singled)s::bigint[])) w
            LEFT JOIN fairturn.flows o ON o.customer = w.customer AND o.level = %(level)s) f
        LEFT JOIN fairturn.customers c ON c.number = f.customer"""


class Place(NamedTuple):
    """Where a document waits."""

    customer: int
    level: int
    order: int


class Ahead(NamedTuple):
    """The queue as the next claim will find it, when it has folded in what happened."""

    turns: Turns
    shelf: PostgresShelf
    joining: dict[int, Place]  # by number: was taken back, or became due, and so waits too
    running: list[Row]  # of `_RUNNING`
    expired: set[int]  # of those, the numbers whose leases ran out
    folded: bool  # False: that was too much


def look_ahead(session: Session, queue: QueueRow, now: int, uptime: Uptime) -> Ahead:
    """Fold in what happened since the last claim, in an engine that is not saved."""
    settings = queue.settings
    state = TurnsRow(session.fetch(TURNS)[0])
    shelf = PostgresShelf(settings.mode)
    shelf.session = session
    turns = Turns(
        shelf,
        mode=settings.mode,
        costs=settings.costs,
        patience_us=settings.patience_us,
        number=state.claims,
        tick=state.tick,
        clocks=[0, *state.clocks],
        weights=[0, *state.weights],
    )
    running = sorted(session.fetch(_RUNNING))
    ahead = Ahead(turns, shelf, {}, running, set(), folded=True)
    expired = _expired(ahead, queue, uptime, all_of_them=state.boot != uptime.boot)
    due = _due(session, ahead, now)
    rows = session.fetch(_RECORDED, (RECORDED_MAX + 1,))
    if len(rows) > RECORDED_MAX:
        return ahead._replace(folded=False)
    recorded = to_recorded(rows).recorded
    limited = {e.customer for _, es in recorded for e in es if type(e) is Changed and e.limit}
    still = [row for row in running if row[1] not in ahead.expired]
    counts = {c: dict(Counter(row[3] for row in still if row[2] == c)) for c in limited}
    happened = {event.customer for _, events in recorded for event in events}
    happened |= {event.customer for event in expired} | {event.customer for _, event in due}
    shelf.expect(happened)
    turns.fold(now, expired=expired, recorded=with_counts(recorded, counts), due=due)
    return ahead


def _expired(ahead: Ahead, queue: QueueRow, uptime: Uptime, *, all_of_them: bool) -> list[Event]:
    """Leases that ran out, oldest first; after a restart of the machine, all."""
    events: list[Event] = []
    for until, number, *rest in ahead.running:
        if not all_of_them and until > uptime.at:
            continue
        ahead.expired.add(number)
        attempt = Attempt(*rest[:5])
        ending = end_of_lease(attempt, queue.settings)
        events.append(ending.event)
        if ending.state is State.WAITING:
            ahead.joining[number] = Place(attempt.customer, attempt.level, attempt.order)
    return events


def _due(session: Session, ahead: Ahead, now: int) -> list[tuple[int, Arrived]]:
    """Delays that are over; who has no order yet gets the next one."""
    due: list[tuple[int, Arrived]] = []
    ((following,),) = session.fetch(_FOLLOWING)
    for number, customer, level, given, due_at in session.fetch(_DUE, (now,)):
        order = following if given is None else given
        following += given is None
        ahead.joining[number] = Place(customer, level, order)
        due.append((due_at, Arrived(customer, level, order, 1)))
    return due


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────


def lineup(session: Session, queue: QueueRow, ahead: Ahead, place: Place, now: int) -> Lineup:
    """What stands before the document that waits at this place."""
    rank = _rank(session, ahead, place, queue.settings.mode)
    if not ahead.folded:
        return _unfolded(session, queue, ahead, place, rank)
    settings = queue.settings
    singled = _singled(session, ahead, place)
    fronts, stalled = _fronts(session, singled, settings, now)
    lines = [line for s in singled.values() for line in lines_of(s, settings)]
    lines = [line for line in lines if line.level <= place.level]
    apart: Set[int] = {place.level}
    uncounted = 0
    if settings.mode is Mode.LEVELS:
        uncounted = _add_lower(session, ahead, singled, lines, place)
    else:
        apart = told_apart(fronts, lines, place.customer, place.level)
        lines += _others(session, ahead, singled, settings, apart)
    better = [level for level in range(1, place.level) if level not in apart]
    return Lineup(
        customer=place.customer,
        level=place.level,
        rank=rank,
        number=ahead.turns.number,
        clock=ahead.turns.clocks[place.level],
        lines=tuple(lines),
        crowds=_crowds(session, queue, singled, better),
        fronts=tuple(fronts),
        stalled=tuple(stalled),
        waiting=_waiting(session, ahead, singled),
        uncounted=uncounted,
    )


def _unfolded(
    session: Session, queue: QueueRow, ahead: Ahead, place: Place, rank: Between
) -> Lineup:
    """Too much has happened since the last claim: only how many wait in all is known."""
    customer, level, _ = place
    ((paused,),) = session.fetch(_PAUSED, (customer,))
    own = Line(level, 0, 0, customer, rank.most + 1, WEIGHT_ONE)
    return Lineup(
        customer=customer,
        level=level,
        rank=rank,
        number=ahead.turns.number,
        clock=0,
        lines=() if paused else (own,),
        crowds={},
        fronts=(),
        stalled=(),
        waiting=_waiting(session, ahead, {}),
        folded=False,
    )


def _waiting(session: Session, ahead: Ahead, singled: dict[int, Standing]) -> int:
    """How many documents wait in the queue. Whoever is paused is singled out."""
    held = (flow.waiting for s in singled.values() if s.paused for flow in s.flows.values())
    return summary(session).waiting + len(ahead.joining) - sum(held)


def _rank(session: Session, ahead: Ahead, place: Place, mode: Mode) -> Between:
    """How many documents of the flow have a lower order, counted from either end."""
    flow, order = place[:2], place.order
    others = _count(session, _RETURNED, *flow, order)
    others += sum(joined[:2] == flow and joined.order < order for joined in ahead.joining.values())
    found = session.fetch(_CLAIMED_TO, flow)
    claimed_to = found[0][0] if found else 0
    lower = _count(session, _COUNT_LOWER, *flow, claimed_to, order, COUNTED_MAX)
    if lower < COUNTED_MAX:
        return Between(lower + others, lower + others)
    higher = _count(session, _COUNT_HIGHER, *flow, order, COUNTED_MAX)
    waiting = sum(
        n
        for _, priority, n in session.fetch(WAITING_OF, ([place.customer],))
        if level_of(priority, mode) == place.level
    )
    in_line = waiting - _count(session, _RETURNED, *flow, NO_ORDER)
    if higher < COUNTED_MAX:
        return Between(in_line - higher + others, in_line - higher + others)
    # Orders are whole numbers: between two of them there is room for so many, and no more.
    most = min(in_line - higher, order - claimed_to - 1)
    return Between(lower + others, most + others)


def _count(session: Session, statement: str, *values: int) -> int:
    ((n,),) = session.fetch(statement, values)
    return int(n)


def _fronts(
    session: Session, singled: dict[int, Standing], settings: Settings, now: int
) -> tuple[list[Front], list[Front]]:
    """The oldest documents beyond their patience, and those of customers at their limit."""
    if settings.mode is Mode.LEVELS:
        return [], []
    fronts, stalled = fronts_of(singled.values(), settings, now)
    rows = session.fetch(_FRONTS, {"before": now - settings.patience_us})
    fronts += (front for front in map(Front._make, rows) if front.customer not in singled)
    fronts.sort()
    return fronts, stalled


def _singled(session: Session, ahead: Ahead, place: Place) -> dict[int, Standing]:
    """The customers whose lines are told apart in every level: those that were changed since the
    last claim, have a limit or are paused; and its own."""
    singled = dict(ahead.turns.standings)
    held = [customer for (customer,) in session.fetch(_HELD)]
    for customer in [place.customer, *held]:
        if customer not in singled:
            singled[customer] = ahead.shelf.standing(customer)
    return singled


def _others(
    session: Session,
    ahead: Ahead,
    singled: dict[int, Standing],
    settings: Settings,
    levels: Set[int],
) -> list[Line]:
    """The lines of all others in these levels."""
    plain = charge_of(settings, WEIGHT_ONE, ())
    rows = session.fetch(_LINES, (plain, [*levels]))
    ahead.shelf.names.update(map(_NAME, rows))
    charges = {
        customer: charge_of(settings, weight, tuple(costs))
        for customer, weight, costs in session.fetch(_CHARGED)
    }
    return [
        line if line.customer not in charges else line._replace(charge=charges[line.customer])
        for line in map(Line._make, map(_LINE, rows))
        if line.customer not in singled
    ]


def _crowds(
    session: Session, queue: QueueRow, singled: dict[int, Standing], levels: list[int]
) -> dict[int, int]:
    """How many documents of all others wait in these levels, which are no others than priorities:
    in mode `equal` there are none."""
    if not levels:
        return {}
    told: Counter[int] = Counter()
    for _, priority, n in session.fetch(WAITING_OF, ([*singled],)):
        told[priority] += n
    waiting = summary(session).waiting_by_priority
    crowds = {level: waiting[level - 1] - told[level] for level in levels}
    return {level: n for level, n in crowds.items() if n}


def _add_lower(
    session: Session,
    ahead: Ahead,
    singled: dict[int, Standing],
    lines: list[Line],
    place: Place,
) -> int:
    """In mode `levels`: let the lines of its level have only those documents that come before it,
    and add those of all others. The answer is how many more there may be, if that is too many."""
    own, level, order = place
    waiting = summary(session).waiting_by_priority[level - 1]
    values = {"order": order, "level": level, "singled": [*singled]}
    rows = session.fetch(_LOWER, values) if waiting <= COUNTED_MAX else []
    ahead.shelf.names.update(map(_NAME, rows))
    lower = Counter({row[3]: row[4] for row in rows})
    lower.update(c for c, n, o in ahead.joining.values() if n == level and o < order)
    for n, line in enumerate(lines):
        if line.level == level and line.customer != own:
            lines[n] = line._replace(waiting=lower[line.customer])
    others = (row for row in rows if row[4] and row[3] not in singled)
    lines += map(Line._make, map(_LINE, others))
    return 0 if waiting <= COUNTED_MAX else waiting
