"""Everything of a file, for another database."""

import json
from collections.abc import Iterator

import apsw

from fairturn.errors import StoreRefused
from fairturn.flows import Recorded
from fairturn.priority import LEVELS
from fairturn.stores.events import decode_events
from fairturn.stores.sqlite.rows import QueueRow, fetch, read_ends
from fairturn.stores.values import WAITING, Row, SettingsCache
from fairturn.stores.whole import Whole, WholeDocument

_SETTINGS = "SELECT settings FROM queue"
_LEVELS = "SELECT clock, weight FROM levels ORDER BY level"
_RUNNING = "SELECT coalesce(sum(running), 0) FROM leases"
_ROWS = """
    SELECT (SELECT count(*) FROM customers), (SELECT count(*) FROM documents),
        (SELECT count(*) FROM flows) + (SELECT count(*) FROM results)
            + (SELECT count(*) FROM keys)"""
_LIMITED = "SELECT number FROM customers INDEXED BY customers_counted WHERE counted = 1"
_CUSTOMERS = f"""
    SELECT number, name, count, count_updated_at, weight, running_max, paused,
        coalesce(documents, 0), {", ".join(f"coalesce(w{n}, 0)" for n in range(1, LEVELS + 1))}
    FROM customers LEFT JOIN (
        SELECT customer, count(*) AS documents, {
    ", ".join(f"sum(state = {WAITING} AND priority = {n}) AS w{n}" for n in range(1, LEVELS + 1))
}
        FROM documents GROUP BY customer) ON customer = number
    ORDER BY number"""
_STANDINGS = "SELECT customer, weight, running_max, paused, recent_costs FROM standings"
_FLOWS = """
    SELECT customer, level, place, tick, folded, running, claimed_to, head_order, head_since,
        head_bound, held
    FROM flows ORDER BY customer, level"""
_RECORDED = "SELECT at, events FROM recorded ORDER BY number"
_COLUMNS = ", ".join(f"d.{name}" for name in WholeDocument._fields[:-1])
_DOCUMENTS = f"""
    SELECT {_COLUMNS}, coalesce(d.body, b.body)
    FROM documents d LEFT JOIN bodies b ON b.document = d.number ORDER BY d.number"""
_RESULTS = "SELECT document, result, content_name, size_bytes, sha256 FROM results"
_KEYS = "SELECT customer, key, digest, document, count, priority, submitted_at FROM keys"
_WORKERS = "SELECT name, seen_at, idle FROM workers"
_ACCESS_KEYS = """
    SELECT id, role, customer, name, digest, made_at, used_at, ends_at FROM access_keys"""


def unload(connection: apsw.Connection) -> Whole:
    """The file as it is in the transaction under way."""
    running = fetch(connection, _RUNNING)[0][0]
    if running:
        raise StoreRefused(
            f"{running:,} documents of the queue are running; let the workers finish, or stop "
            "them, and wait until leases of workers that died have run out"
        )
    queue = QueueRow(connection, SettingsCache())
    levels = fetch(connection, _LEVELS)
    ((customers, documents, others),) = fetch(connection, _ROWS)
    return Whole(
        settings=fetch(connection, _SETTINGS)[0][0],
        key=queue.key,
        next_number=queue.next_number,
        next_customer=queue.next_customer,
        claims=queue.claims,
        fence=queue.fence,
        tick=queue.tick,
        clocks=[clock for clock, _ in levels],
        weights=[weight for _, weight in levels],
        waiting=list(queue.waiting),
        delayed=queue.delayed,
        ends=read_ends(connection),
        customers_known=customers,
        documents_known=documents,
        rows=customers + documents + others,
        limited=[number for (number,) in connection.execute(_LIMITED)],
        customers=connection.execute(_CUSTOMERS),
        standings=_standings(connection),
        flows=connection.execute(_FLOWS),
        recorded=_recorded(connection),
        documents=map(WholeDocument._make, connection.execute(_DOCUMENTS)),
        results=connection.execute(_RESULTS),
        keys=connection.execute(_KEYS),
        workers=connection.execute(_WORKERS),
        access_keys=connection.execute(_ACCESS_KEYS),
    )


def _standings(connection: apsw.Connection) -> Iterator[Row]:
    for *rest, costs in connection.execute(_STANDINGS):
        yield (*rest, json.loads(costs))


def _recorded(connection: apsw.Connection) -> Iterator[Recorded]:
    for at, events in connection.execute(_RECORDED):
        yield Recorded(at, decode_events(events))
