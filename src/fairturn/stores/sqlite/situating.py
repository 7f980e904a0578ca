"""The situation of a document, read from one snapshot of the file. Nothing is written."""

import json

import apsw

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
from fairturn.stores.sqlite.lineups import Ahead, Place, lineup, look_ahead
from fairturn.stores.sqlite.reading import find
from fairturn.stores.sqlite.rows import QueueRow, fetch
from fairturn.stores.values import CANCELLED, COMPLETED, DEAD, RUNNING

# Of each level, and of each flow: those that were served last.
_FLOWS_SAMPLED, _DOCUMENTS_SAMPLED = 16, 8

# By the primary keys.
_DOCUMENT = """
    SELECT d.customer, d.level, d.order_number, p.count
    FROM documents d LEFT JOIN documents p ON p.number = d.parent WHERE d.number = ?"""
_CUSTOMER = """
    SELECT count, count_updated_at, delayed, weight, running_max, paused
    FROM customers WHERE number = ?"""
_WAITING = "SELECT coalesce(sum(waiting), 0) FROM flows WHERE customer = ?"
_NAMES = "SELECT number, name FROM customers WHERE number IN (SELECT value FROM json_each(?))"

_WORKERS = "SELECT name, seen_at, idle FROM workers ORDER BY name LIMIT ?"
# By the primary key.
_ARRIVALS = "SELECT submitted_at, customer, priority FROM documents ORDER BY number DESC LIMIT ?"
_NEIGHBOURS = """
    SELECT customer, count(*) FROM documents
    WHERE number BETWEEN ? AND ? AND claimed_at >= ? AND claimed_at < ? GROUP BY customer"""
# Others further away, or near ones that were claimed again later: of these only that is known.
_MAYBE_MORE = """
    SELECT EXISTS (SELECT 1 FROM documents WHERE number < ?1)
        OR EXISTS (SELECT 1 FROM documents WHERE number > ?2)
        OR EXISTS (
            SELECT 1 FROM documents
            WHERE number BETWEEN ?1 AND ?2 AND number <> ?3 AND attempts > 1
                AND claimed_at >= ?4 AND submitted_at < ?4)"""

# The flows with the highest places were served last, and what they had last has the highest orders
# up to their claimed_to. By flows_turn or the primary key, and documents_flow.
_ATTEMPT = f"""d.claimed_at, d.number, d.customer,
    iif(d.state IN ({COMPLETED}, {DEAD}), d.ended_at - d.claimed_at, NULL)"""
_OVER = f"d.claimed_at IS NOT NULL AND d.state NOT IN ({RUNNING}, {CANCELLED})"
_LAST_OF_FLOWS = f"""
    CROSS JOIN documents d ON d.number IN (
        SELECT n.number FROM documents n INDEXED BY documents_flow
        WHERE n.customer = f.customer AND n.level = f.level AND n.order_number <= f.claimed_to
        ORDER BY n.order_number DESC LIMIT {_DOCUMENTS_SAMPLED})
    WHERE {_OVER}"""
_LAST_OF_LEVEL = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM flows INDEXED BY flows_turn
        WHERE folded > 0 AND held = 0 AND level = ? ORDER BY level DESC, place DESC, tick DESC
        LIMIT {_FLOWS_SAMPLED}) f {_LAST_OF_FLOWS}"""
_LAST_OF_ITS_FLOW = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM flows WHERE customer = ? AND level = ?) f
    {_LAST_OF_FLOWS}"""
_LAST_SUBMITTED = f"""
    SELECT {_ATTEMPT}
    FROM (SELECT number FROM documents ORDER BY number DESC LIMIT ?) n
        CROSS JOIN documents d ON d.number = n.number
    WHERE {_OVER}"""


def situation(
    connection: apsw.Connection, queue: QueueRow, id: str, now: int, uptime: Uptime
) -> Situation | None:
    """The situation of a document, or None if there is none with this id."""
    found = find(connection, queue, Filter(ids=(id,)), None, 1).documents
    if not found:
        return None
    (document,), number = found, ids.decode(id, queue.key)
    assert number is not None
    ((customer, level, order, parent_count),) = fetch(connection, _DOCUMENT, (number,))
    ((count, updated_at, delayed, weight, limit, paused),) = fetch(
        connection, _CUSTOMER, (customer,)
    )
    ahead = look_ahead(connection, queue, now, uptime)
    place = ahead.joining.get(number)
    if document.state is State.WAITING:
        place = Place(customer, level, order)
    line = None if place is None else lineup(connection, queue, ahead, place, now)
    served = _served(connection, document, number)
    names = ahead.shelf.names  # of those in the lineup
    if served is not None:
        names.update(connection.execute(_NAMES, (json.dumps([*served.by_customer]),)))
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
        waiting=connection.execute(_WAITING, (customer,)).get,
        running=sum(row[2] == customer for row in ahead.running),
        delayed=delayed,
        leased=document.state is State.RUNNING and number not in ahead.expired,
        lineup=line,
        service=_service(connection, queue, ahead, (customer, level)),
        served=served,
        names=names,
    )


def _service(
    connection: apsw.Connection, queue: QueueRow, ahead: Ahead, flow: tuple[int, int]
) -> Service:
    """How the queue is served. Of attempts that are over there is no index by time: some are
    looked up where the last ones are."""
    mode = queue.settings.mode
    over = fetch(connection, _LAST_SUBMITTED, (ARRIVALS_MAX,))
    over += fetch(connection, _LAST_OF_ITS_FLOW, flow)
    for level in range(1, LEVELS + 1):
        over += fetch(connection, _LAST_OF_LEVEL, (level,))
    latest = sorted(set(over), key=lambda row: row[:2])[-ATTEMPTS_MAX:]
    running = (
        Working(worker, claimed_at, customer, number not in ahead.expired)
        for _, number, customer, _, _, _, _, worker, claimed_at in ahead.running
    )
    return Service(
        running=tuple(sorted(running)),
        workers=tuple(Seen._make(row) for row in fetch(connection, _WORKERS, (WORKERS_MAX,))),
        attempts=tuple(
            Attempt(customer, None if duration is None else max(0, duration))
            for _, _, customer, duration in latest
        ),
        arrivals=tuple(
            Arrival(at, customer, level_of(priority, mode))
            for at, customer, priority in fetch(connection, _ARRIVALS, (ARRIVALS_MAX,))
        ),
    )


def _served(connection: apsw.Connection, document: Document, number: int) -> Served | None:
    """Who was served while the document waited, among those submitted shortly before or after."""
    if document.claimed_at is None:
        return None
    first, last = number - NEIGHBOURS_MAX, number + NEIGHBOURS_MAX
    meanwhile = (waiting_since(document), document.claimed_at)
    served = dict(connection.execute(_NEIGHBOURS, (first, last, *meanwhile)))
    more = connection.execute(_MAYBE_MORE, (first, last, number, document.claimed_at)).get
    return Served(served, not more)
