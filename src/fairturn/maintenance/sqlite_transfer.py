"""Export of a queue in a file, to be loaded into another database."""

import json
from collections import Counter
from collections.abc import Iterator

import apsw

from fairturn.clock import Uptime
from fairturn.errors import StoreRefused
from fairturn.model import State
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import EventBatch
from fairturn.stores.sqlite.rows import QueueRow, fetch, read_outcome_counters
from fairturn.stores.transfer import SUBMITTED, ExportedDocument, ExportedQueue
from fairturn.stores.transitions import Attempt, Ending, end_of_lease, has_ended
from fairturn.stores.values import (
    CODES,
    DELAYED,
    RUNNING,
    WAITING,
    Row,
    SettingsCache,
    decode_events,
    jump,
)

_SETTINGS = "SELECT settings FROM queue"
_LEVELS = "SELECT clock, weight FROM levels ORDER BY level"
_RUNNING = f"""
    SELECT d.lease_until, d.number, d.priority, d.customer, d.level, d.order_number, d.attempts,
        d.cancel_requested
    FROM leases l, json_each(l.documents) j JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence"""
_ROWS = """
    SELECT (SELECT count(*) FROM customers), (SELECT count(*) FROM documents),
        (SELECT count(*) FROM flows) + (SELECT count(*) FROM results)
            + (SELECT count(*) FROM idempotency_keys)"""
_LIMITED = "SELECT number FROM customers INDEXED BY customers_counted WHERE counted = 1"
_CUSTOMERS = f"""
    SELECT number, name, count, count_updated_at, weight, running_max, bytes_max, stored_bytes,
        paused, coalesce(documents, 0),
        {", ".join(f"coalesce(w{n}, 0)" for n in range(1, LEVELS + 1))}
    FROM customers LEFT JOIN (
        SELECT customer, count(*) AS documents, {
    ", ".join(f"sum(state = {WAITING} AND priority = {n}) AS w{n}" for n in range(1, LEVELS + 1))
}
        FROM documents GROUP BY customer) ON customer = number
    ORDER BY number"""
_CUSTOMER_STATES = "SELECT customer, weight, running_max, paused, recent_costs FROM customer_states"
_FLOWS = """
    SELECT customer, level, place, tick, folded, running, claimed_to, head_order, head_since,
        head_bound, held
    FROM flows ORDER BY customer, level"""
_EVENTS = "SELECT at, events FROM event_log ORDER BY number"
# Retries are due by the boot clock here, and by the wall clock elsewhere. ?1 is the difference.
_DUE_AT = f"coalesce(CASE d.state WHEN {DELAYED} THEN d.retry_at + ?1 END, d.due_at)"
_EXPRESSIONS = {"due_at": _DUE_AT, "body": "coalesce(d.body, b.body)"}
_DECIDED = ExportedDocument._fields[:-1]
_COLUMNS = ", ".join(_EXPRESSIONS.get(name, f"d.{name}") for name in (*_DECIDED, *SUBMITTED))
_DOCUMENTS = f"""
    SELECT {_COLUMNS}
    FROM documents d LEFT JOIN bodies b ON b.document = d.number ORDER BY d.number"""
_RESULTS = "SELECT document, result, content_name, size_bytes, sha256 FROM results"
_UNREPORTED = "SELECT document FROM unreported_cancels ORDER BY number"
_KEYS = """
    SELECT customer, key, digest, document, count, priority, submitted_at FROM idempotency_keys"""
_WORKERS = "SELECT name, seen_at, slots FROM workers"
_ACCESS_KEYS = """
    SELECT id, role, customer, name, digest, made_at, used_at, ends_at FROM access_keys"""


def unload(connection: apsw.Connection, now: int, uptime: Uptime) -> ExportedQueue:
    """Return the queue in the open read transaction, with expired leases ended as the next claim
    would end them. Raise `StoreRefused` if documents are running."""
    queue = QueueRow(connection, SettingsCache())
    expired = _Expired(connection, queue, now, uptime)
    outcome_counters = read_outcome_counters(connection)
    for ending in expired.endings.values():
        outcome_counters.attempt(ending)
    by = jump() if queue.is_copy else 0  # a restored copy begins a new epoch in the target
    boot_to_wall = now - uptime.at if queue.boot == uptime.boot else None
    levels = fetch(connection, _LEVELS)
    ((customers, documents, others),) = fetch(connection, _ROWS)
    return ExportedQueue(
        settings=fetch(connection, _SETTINGS)[0][0],
        key=queue.key,
        next_number=queue.next_number + by,
        next_customer=queue.next_customer,
        claims=queue.claims,
        fence=queue.fence + by,
        tick=queue.tick,
        clocks=[clock for clock, _ in levels],
        weights=[weight for _, weight in levels],
        waiting=expired.add_to(list(queue.waiting)),
        delayed=queue.delayed,
        outcome_counters=outcome_counters,
        customers_known=customers,
        documents_known=documents,
        rows=customers + documents + others,
        limited=[number for (number,) in connection.execute(_LIMITED)],
        customers=map(expired.customer, connection.execute(_CUSTOMERS)),
        customer_states=_customer_states(connection),
        flows=connection.execute(_FLOWS),
        events=_events(connection, expired),
        documents=map(expired.document, connection.execute(_DOCUMENTS, (boot_to_wall,))),
        results=connection.execute(_RESULTS),
        unreported_cancels=connection.execute(_UNREPORTED),
        keys=connection.execute(_KEYS),
        workers=connection.execute(_WORKERS),
        access_keys=connection.execute(_ACCESS_KEYS),
    )


class _Expired:
    """Documents whose leases have expired, and their endings."""

    def __init__(
        self, connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime
    ) -> None:
        self.now = now
        self.endings: dict[int, Ending] = {}  # by document number, oldest lease first
        self._waiting: Counter[tuple[int, int]] = Counter()  # by customer and priority
        running = sorted(fetch(connection, _RUNNING))
        at = uptime.at if queue.boot == uptime.boot else None
        expired = [row for row in running if has_ended(row[0], at)]
        if len(expired) < len(running):
            raise StoreRefused(
                f"{len(running) - len(expired):,} documents of the queue are running; let the "
                "workers finish or stop them, and wait until the leases of dead workers expire"
            )
        for _, number, priority, *rest in expired:
            attempt = Attempt(*rest)
            ending = self.endings[number] = end_of_lease(attempt, queue.settings)
            self._waiting[attempt.customer, priority] += ending.state is State.WAITING

    def add_to(self, waiting: list[int]) -> list[int]:
        """Add the documents that wait again to the numbers by priority."""
        for (_, priority), n in self._waiting.items():
            waiting[priority - 1] += n
        return waiting

    def customer(self, row: Row) -> Row:
        waiting = (n + self._waiting[row[0], p] for p, n in enumerate(row[-LEVELS:], start=1))
        return (*row[:-LEVELS], *waiting)

    def document(self, row: Row) -> ExportedDocument:
        document = ExportedDocument._make((*row[: len(_DECIDED)], row[len(_DECIDED) :]))
        ending = self.endings.get(document.number)
        if ending is None:
            return document
        waits = ending.state is State.WAITING
        return document._replace(
            state=CODES[ending.state],
            returned=int(waits),
            error=ending.error,
            ended_at=None if waits else self.now,
        )


def _customer_states(connection: apsw.Connection) -> Iterator[Row]:
    for *rest, costs in connection.execute(_CUSTOMER_STATES):
        yield (*rest, json.loads(costs))


def _events(connection: apsw.Connection, expired: _Expired) -> Iterator[EventBatch]:
    for at, events in connection.execute(_EVENTS):
        yield EventBatch(at, decode_events(events))
    if expired.endings:
        yield EventBatch(expired.now, tuple(ending.event for ending in expired.endings.values()))
