"""The situation of a document, read from one snapshot. Nothing is written."""

from fairturn import ids
from fairturn.clock import Uptime
from fairturn.flows import WEIGHT_ONE
from fairturn.model import CustomerSettings, Document, Filter, State, level_of
from fairturn.priority import LEVELS, Count
from fairturn.situation import (
    ARRIVALS_MAX,
    ATTEMPTS_MAX,
    NEIGHBOURS_MAX,
    WORKERS_MAX,
    Arrival,
    Attempt,
    Seen,
    Served,
    Service,
    Situation,
    Working,
    waiting_since,
)
from fairturn.stores.postgres.database import Session
from fairturn.stores.postgres.lineups import WAITING_OF, Ahead, Place, lineup, look_ahead
from fairturn.stores.postgres.reading import find
from fairturn.stores.postgres.rows import QueueRow
from fairturn.stores.values import CANCELLED, COMPLETED, DEAD, RUNNING

# Of each level, and of each flow: those that were served last.
_FLOWS_SAMPLED, _DOCUMENTS_SAMPLED = 16, 8

# By the primary keys.
_DOCUMENT = """
    SELECT d.customer, d.level, d.order_number, p.count
    FROM fairturn.documents d LEFT JOIN fairturn.documents p ON p.number = d.parent
    WHERE d.number = %s"""
_CUSTOMER = """
    SELECT c.count, c.count_updated_at, (
            SELECT count(*) FROM fairturn.documents d
            WHERE d.customer = c.number AND d.delayed_until IS NOT NULL),
        c.weight, c.running_max, c.paused
    FROM fairturn.customers c WHERE c.number = %s"""
_NAMES = "SELECT number, name FROM fairturn.customers WHERE number = ANY (%s)"

_WORKERS = "SELECT name, seen_at, idle FROM fairturn.workers ORDER BY name LIMIT %s"
# By the primary key.
_ARRIVALS = """
    SELECT submitted_at, customer, priority FROM fairturn.documents ORDER BY number DESC LIMIT %s"""
_NEIGHBOURS = """
    SELECT customer, count(*) FROM fairturn.documents
    WHERE number BETWEEN %s AND %s AND claimed_at >= %s AND claimed_at < %s GROUP BY customer"""
# Others further away, or near ones that were claimed again later: of these only that is known.
_MAYBE_MORE = """
    SELECT EXISTS (SELECT 1 FROM fairturn.documents WHERE number < %(first)s)
        OR EXISTS (SELECT 1 FROM fairturn.documents WHERE number > %(last)s)
        OR EXISTS (
            SELECT 1 FROM fairturn.documents
            WHERE number BETWEEN %(first)s AND %(last)s AND number <> %(number)s AND attempts > 1
                AND claimed_at >= %(claimed_at)s AND submitted_at < %(claimed_at)s)"""

# The flows with the highest places were served last, and what they had last has the highest orders
# up to their claimed_to. By flows_turn or the primary key, and documents_flow.
_ATTEMPT = f"""d.claimed_at, d.number, d.customer,
    CASE WHEN d.state IN ({COMPLETED}, {DEAD}) THEN d.ended_at - d.claimed_at END"""
_OVER = f"d.claimed_at IS NOT NULL AND d.state NOT IN ({RUNNING}, {CANCELLED})"
_LAST_OF_FLOWS = f"""
    CROSS JOIN LATERAL (
        SELECT * FROM fairturn.documents n
        WHERE n.customer = f.customer AND n.level = f.level AND n.order_number <= f.claimed_to
        ORDER BY n.customer DESC, n.level DESC, n.order_number DESC LIMIT {_DOCUMENTS_SAMPLED}) d
    WHERE {_OVER}"""
_LAST_OF_LEVEL = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM fairturn.flows
        WHERE folded > 0 AND NOT held AND level = %s ORDER BY level DESC, place DESC, tick DESC
        LIMIT {_FLOWS_SAMPLED}) f {_LAST_OF_FLOWS}"""
_LAST_OF_ITS_FLOW = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM fairturn.flows WHERE customer = %s AND level = %s) f
    {_LAST_OF_FLOWS}"""
_LAST_SUBMITTED = f"""
    SELECT {_ATTEMPT}
    FROM (SELECT number FROM fairturn.documents ORDER BY number DESC LIMIT %s) n
        JOIN fairturn.documents d ON d.number = n.number
    WHERE {_OVER}"""


def situation(
    session: Session, queue: QueueRow, id: str, now: int, uptime: Uptime
) -> Situation | None:
    """The situation of a document, or None if there is none with this id."""
    found = find(session, queue.key, Filter(ids=(id,)), None, 1).documents
    if not found:
        return None
    (document,), number = found, ids.decode(id, queue.key)
    assert number is not None
    ((customer, level, order, parent_count),) = session.fetch(_DOCUMENT, (number,))
    ((count, updated_at, delayed, weight, limit, paused),) = session.fetch(_CUSTOMER, (customer,))
    ahead = look_ahead(session, queue, now, uptime)
    place = ahead.joining.get(number)
    if document.state is State.WAITING:
        place = Place(customer, level, order)
    line = None if place is None else lineup(session, queue, ahead, place, now)
    served = _served(session, document, number)
    names = ahead.shelf.names  # of those in the lineup
    if served is not None:
        names.update(session.fetch(_NAMES, ([*served.by_customer],)))
    return Situation(
        at=now,
        settings=queue.settings,
        document=document,
        parent_count=parent_count,
        customer=customer,
        customer_settings=CustomerSettings(
            weight=weight / WEIGHT_ONE, limit=limit, paused=bool(paused)
        ),
        count=None if count is None else Count(count, updated_at),
        waiting=sum(n for *_, n in session.fetch(WAITING_OF, ([customer],))),
        running=sum(row[2] == customer for row in ahead.running),
        delayed=delayed,
        leased=document.state is State.RUNNING and number not in ahead.expired,
        lineup=line,
        service=_service(session, queue, ahead, (customer, level)),
        served=served,
        names=names,
    )


def _service(session: Session, queue: QueueRow, ahead: Ahead, flow: tuple[int, int]) -> Service:
    """How the queue is served. Of attempts that are over there is no index by time: some are
    looked up where the last ones are."""
    mode = queue.settings.mode
    over = session.fetch(_LAST_SUBMITTED, (ARRIVALS_MAX,))
    over += session.fetch(_LAST_OF_ITS_FLOW, flow)
    for level in range(1, LEVELS + 1):
        over += session.fetch(_LAST_OF_LEVEL, (level,))
    latest = sorted(set(over), key=lambda row: row[:2])[-ATTEMPTS_MAX:]
    running = (
        Working(worker, claimed_at, customer, number not in ahead.expired)
        for _, number, customer, _, _, _, _, worker, claimed_at in ahead.running
    )
    return Service(
        running=tuple(sorted(running)),
        workers=tuple(Seen._make(row) for row in session.fetch(_WORKERS, (WORKERS_MAX,))),
        attempts=tuple(
            Attempt(customer, None if duration is None else max(0, duration))
            for _, _, customer, duration in latest
        ),
        arrivals=tuple(
            Arrival(at, customer, level_of(priority, mode))
            for at, customer, priority in session.fetch(_ARRIVALS, (ARRIVALS_MAX,))
        ),
    )


def _served(session: Session, document: Document, number: int) -> Served | None:
    """Who was served while the document waited, among those submitted shortly before or after."""
    if document.claimed_at is None:
        return None
    first, last = number - NEIGHBOURS_MAX, number + NEIGHBOURS_MAX
    meanwhile = (waiting_since(document), document.claimed_at)
    served: dict[int, int] = dict(session.fetch(_NEIGHBOURS, (first, last, *meanwhile)))
    near = {"first": first, "last": last, "number": number, "claimed_at": document.claimed_at}
    ((more,),) = session.fetch(_MAYBE_MORE, near)
    return Served(served, not more)
