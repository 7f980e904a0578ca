"""Export of a queue in a file, to be loaded into another database."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import apsw

from fairturn.clock import Uptime
from fairturn.errors import StoreRefused
from fairturn.model import State
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import EventBatch, band_of, kind_of
from fairturn.scheduling.outages import ServiceState
from fairturn.stores.sqlite.attempts import ATTEMPT_COLUMNS, AttemptWriter
from fairturn.stores.sqlite.flows import to_costs
from fairturn.stores.sqlite.rows import (
    ATTEMPTS_MAX_OF_KIND,
    KindNames,
    QueueRow,
    fetch,
    read_kinds,
    read_outcome_counters,
    waiting_by_kind,
)
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
_LEVELS = "SELECT level, clock, weight, kind_time, last_claim, level_time FROM levels"
_RUNNING = f"""
    SELECT d.lease_until, d.number, d.priority, d.worker, d.claimed_at, {ATTEMPTS_MAX_OF_KIND},
        d.step, d.customer, d.level, d.order_number, d.attempts, d.cancel_requested
    FROM leases l, json_each(l.documents) j JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence"""
_ROWS = """
    SELECT (SELECT count(*) FROM customers), (SELECT count(*) FROM documents),
        (SELECT count(*) FROM flows) + (SELECT count(*) FROM results)
            + (SELECT count(*) FROM idempotency_keys) + (SELECT count(*) FROM attempts)"""
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
_CUSTOMER_STATES = """
    SELECT customer, weight, running_max, paused, recent_costs, costs_by_kind
    FROM customer_states"""
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
_ATTEMPTS = f"SELECT {', '.join(ATTEMPT_COLUMNS)} FROM attempts ORDER BY document, number"
_LAST_ATTEMPTS = """
    SELECT document, max(number) FROM attempts
    WHERE document IN (SELECT value FROM json_each(?)) GROUP BY document"""
_CHECKPOINTS = "SELECT document, value FROM checkpoints"
_KIND_SERVICES = "SELECT kind, service FROM kind_services"
_OUTAGES = f"SELECT service, {', '.join(ServiceState._fields)} FROM outages"
_UNREPORTED = "SELECT document FROM unreported_cancels ORDER BY number"
_KEYS = """
    SELECT customer, key, digest, document, count, priority, submitted_at FROM idempotency_keys"""
_WORKERS = "SELECT name, seen_at, slots, kinds FROM workers"
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
    kinds = read_kinds(connection)
    bands = range(1, band_of(LEVELS, kinds[-1].number) + 1)
    levels = {level: row for level, *row in fetch(connection, _LEVELS)}
    clocks, weights, kind_times, last_claims, level_times = zip(
        *(levels.get(band, (0,) * 5) for band in bands), strict=True
    )
    ((customers, documents, others),) = fetch(connection, _ROWS)
    return ExportedQueue(
        settings=fetch(connection, _SETTINGS)[0][0],
        key=queue.key,
        next_number=queue.next_number + by,
        next_customer=queue.next_customer,
        claims=queue.claims,
        fence=queue.fence + by,
        tick=queue.tick,
        kinds=[(*kind[:-1], kind.since_patience(queue.claims)) for kind in kinds],
        kind_services=fetch(connection, _KIND_SERVICES),
        outages=fetch(connection, _OUTAGES),
        clocks=list(clocks),
        weights=list(weights),
        kind_times=list(kind_times),
        last_claims=list(last_claims),
        level_times=list(level_times[:LEVELS]),
        waiting=expired.add_to(waiting_by_kind(connection, queue), bands),
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
        attempts=chain(connection.execute(_ATTEMPTS), expired.attempts(connection)),
        checkpoints=connection.execute(_CHECKPOINTS),
        unreported_cancels=connection.execute(_UNREPORTED),
        keys=connection.execute(_KEYS),
        workers=_workers(connection),
        access_keys=connection.execute(_ACCESS_KEYS),
    )


class _Expired:
    """Documents whose leases have expired, and their endings."""

    def __init__(
        self, connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime
    ) -> None:
        self.now = now
        self.endings: dict[int, Ending] = {}  # by document number, oldest lease first
        self._lost: list[tuple[int, str | None, Attempt]] = []
        self._waiting: Counter[int] = Counter()  # by kind and priority, as bands are numbered
        self._waiting_of: Counter[tuple[int, int]] = Counter()  # by customer and priority
        running = sorted(fetch(connection, _RUNNING))
        at = uptime.at if queue.boot == uptime.boot else None
        expired = [row for row in running if has_ended(row[0], at)]
        if len(expired) < len(running):
            raise StoreRefused(
                f"{len(running) - len(expired):,} documents of the queue are running; let the "
                "workers finish or stop them, and wait until the leases of dead workers expire"
            )
        for _, number, priority, worker, claimed_at, attempts_max, step, *rest in expired:
            attempt = Attempt(*rest)._replace(
                claimed_at=claimed_at, attempts_max=attempts_max, step=step
            )
            ending = self.endings[number] = end_of_lease(attempt, queue.settings)
            self._lost.append((number, worker, attempt))
            if ending.state is State.WAITING:
                self._waiting[band_of(priority, kind_of(attempt.band))] += 1
                self._waiting_of[attempt.customer, priority] += 1

    def add_to(self, waiting: Mapping[int, Sequence[int]], bands: Iterable[int]) -> list[int]:
        """Return the numbers by kind and priority, with the documents that wait again."""
        counts = self._waiting.copy()
        for kind, numbers in waiting.items():
            for priority, n in enumerate(numbers, start=1):
                counts[band_of(priority, kind)] += n
        return [counts[band] for band in bands]

    def customer(self, row: Row) -> Row:
        waiting = (n + self._waiting_of[row[0], p] for p, n in enumerate(row[-LEVELS:], start=1))
        return (*row[:-LEVELS], *waiting)

    def attempts(self, connection: apsw.Connection) -> Iterator[Row]:
        """Yield the rows of the attempts that have lost their lease."""
        numbers = json.dumps([number for number, *_ in self._lost])
        last: dict[int, int] = dict(fetch(connection, _LAST_ATTEMPTS, (numbers,)))
        writer = AttemptWriter(connection, KindNames(connection), self.now)
        for number, worker, attempt in self._lost:
            row = writer.row(worker, attempt, self.endings[number])
            if row is not None:
                yield (number, last.get(number, 0) + 1, *row)

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
    for *rest, costs, costs_by_kind in connection.execute(_CUSTOMER_STATES):
        yield (*rest, to_costs(costs, costs_by_kind))


def _workers(connection: apsw.Connection) -> Iterator[Row]:
    for *rest, kinds in connection.execute(_WORKERS):
        yield (*rest, None if kinds is None else json.loads(kinds))


def _events(connection: apsw.Connection, expired: _Expired) -> Iterator[EventBatch]:
    for at, events in connection.execute(_EVENTS):
        yield EventBatch(at, decode_events(events))
    if expired.endings:
        yield EventBatch(expired.now, tuple(ending.event for ending in expired.endings.values()))
