"""Outcomes and renewals."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import apsw

from fairturn.clock import Uptime
from fairturn.model import (
    Advanced,
    Completed,
    Fence,
    OutageReport,
    Outcome,
    Progress,
    Renewed,
    State,
    kept_cost,
)
from fairturn.scheduling.flows import Costs, EndEvent, Event, kind_of
from fairturn.scheduling.outages import ReportResult
from fairturn.stores import ids
from fairturn.stores.sqlite.attempts import AttemptWriter, drop_checkpoints, save_checkpoint
from fairturn.stores.sqlite.outages import StoredServices
from fairturn.stores.sqlite.rows import (
    ATTEMPTS_MAX_OF_KIND,
    IS_RETURNED,
    CounterChanges,
    KindNames,
    QueueRow,
    add_outcome_counters,
    fetch_each,
    record,
    waiting_by_kind,
)
from fairturn.stores.transitions import (
    Attempt,
    Ending,
    OutcomeCounters,
    end_of,
    storable_step,
)
from fairturn.stores.values import CODES, COMPLETED, DELAYED, RUNNING, WAITING, Row

# By the primary key. State and fence make every change conditional on the lease.
_HELD = f"""
    SELECT d.number, d.fence, d.priority, c.counted, d.worker, d.expires_at, d.customer, d.level,
        d.order_number, d.attempts, d.cancel_requested, d.claimed_at, d.charged_cost,
        d.charged_weight, d.charge, {ATTEMPTS_MAX_OF_KIND}, d.step, d.snoozes
    FROM documents d JOIN customers c ON c.number = d.customer
    WHERE d.number = ? AND d.state = {RUNNING} AND d.fence = ?"""
_COMPLETE = f"""
    UPDATE documents SET state = {COMPLETED}, ended_at = ?, error = NULL, real_cost = ?
    WHERE number = ? AND state = {RUNNING} AND fence = ?"""
_END = f"""
    UPDATE documents SET state = ?, ended_at = ?, error = ?, real_cost = ?
    WHERE number = ? AND state = {RUNNING} AND fence = ?"""
_DELAY = f"""
    UPDATE documents SET state = {DELAYED}, due_at = ?1, retry_at = ?2, error = ?3,
        attempts = attempts - ?4, snoozes = snoozes + ?4
    WHERE number = ?5 AND state = {RUNNING} AND fence = ?6"""
_RELEASE = f"""
    UPDATE documents SET state = {WAITING}, returned = 1, attempts = attempts - 1
    WHERE number = ? AND state = {RUNNING} AND fence = ?"""
_ADVANCE = f"""
    UPDATE documents SET state = {WAITING}, kind = ?1, level = ?2, cost = coalesce(?3, cost),
        step = step + 1, attempts = 0, error = NULL, returned = {IS_RETURNED.format("?2")}
    WHERE number = ?4 AND state = {RUNNING} AND fence = ?5"""
_EXPIRE_AGAIN = "INSERT OR IGNORE INTO expirations (expires_at, document) VALUES (?, ?)"
_ADD_RESULT = """
    INSERT OR REPLACE INTO results (document, result, content_name, size_bytes, sha256)
    VALUES (?, ?, ?, ?, ?)"""
_RENEW = f"""
    UPDATE documents SET lease_until = ? WHERE number = ? AND state = {RUNNING} AND fence = ?
    RETURNING cancel_requested"""
_PROGRESS = """
    UPDATE documents SET progress_done = ?, progress_total = ?, progress_fence = ?
    WHERE number = ?"""

_EXPIRE_SOONER = "UPDATE leases SET until = min(until, ?) WHERE fence = ?"
_LEAVE_LEASE = "UPDATE leases SET running = running - ? WHERE fence = ?"
_END_LEASE = "DELETE FROM leases WHERE fence = ? AND running <= 0"


def finish(
    connection: apsw.Connection,
    queue: QueueRow,
    outcomes: Sequence[Outcome],
    now: int,
    uptime: Uptime,
) -> list[Fence]:
    """Record outcomes, and return the fences of stale ones."""
    if not outcomes:
        return []
    learns = queue.settings.costs is Costs.LEARNED
    plain = queue.counted == 0 and not learns and not queue.has_outages
    if plain and all(type(outcome) is Completed for outcome in outcomes):
        connection.execute("SAVEPOINT plain")
        if _complete(connection, queue, outcomes, now):
            connection.execute("RELEASE plain")
            return []
        connection.execute("ROLLBACK TO plain; RELEASE plain")
    return _Finish(connection, queue, now, uptime).record_all(outcomes)


def _complete(
    connection: apsw.Connection, queue: QueueRow, outcomes: Sequence[Any], now: int
) -> bool:
    """Complete documents with one statement each, without events: no customer has a limit, costs
    are not learned, and no service was unavailable. Return False if an outcome is stale; `_Finish`
    determines which."""
    numbers = ids.decode_all([o.fence.document for o in outcomes], queue.key)
    ended = [
        (now, kept_cost(o), number, o.fence.number)
        for number, o in zip(numbers, outcomes, strict=True)
    ]
    before = connection.total_changes()
    connection.executemany(_COMPLETE, ended)
    if connection.total_changes() - before != len(outcomes):
        return False
    _add_results(connection, zip((row[2] for row in ended), outcomes, strict=True))
    if queue.has_checkpoints:
        drop_checkpoints(connection, (row[2] for row in ended if row[2] is not None))
    leave_leases(connection, (row[3] for row in ended))
    return True


def _add_results(connection: apsw.Connection, completed: Iterable[tuple[Any, Completed]]) -> None:
    results = [
        (number, outcome.result, *(outcome.content or (None, None, None)))
        for number, outcome in completed
        if outcome.result is not None or outcome.content is not None
    ]
    if results:
        connection.executemany(_ADD_RESULT, results)


def leave_leases(connection: apsw.Connection, fences: Iterable[int]) -> None:
    """Subtract documents that are no longer running from the leases of these fences."""
    left = Counter(fences)
    connection.executemany(_LEAVE_LEASE, [(n, fence) for fence, n in left.items()])
    connection.executemany(_END_LEASE, [(fence,) for fence in left])


class _Finish:
    """The outcomes of one call, recorded one by one, and what is written after the last."""

    def __init__(
        self, connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._now = now
        self._uptime = uptime
        self._kinds = KindNames(connection)
        self._attempts = AttemptWriter(connection, self._kinds, now)
        self._services: StoredServices | None = None
        self._ended: list[Row] = []
        self._steps_ended: list[int] = []  # documents whose checkpoint is deleted
        self._results: list[tuple[int, Completed]] = []
        self._left: list[int] = []
        self._events: list[Event] = []
        self._counters, self._changes = OutcomeCounters(), CounterChanges()

    def record_all(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        """Record the outcomes of running documents; return the fences of stale ones."""
        if self._queue.has_outages or any(type(each) is OutageReport for each in outcomes):
            self._services = StoredServices(self._connection)
        numbers = ids.decode_all([o.fence.document for o in outcomes], self._queue.key)
        keys = [(n, o.fence.number) for n, o in zip(numbers, outcomes, strict=True)]
        held = {row[:2]: row for row in fetch_each(self._connection, _HELD, keys)}
        lost: list[Fence] = []
        for outcome, key in zip(map(storable_step, outcomes), keys, strict=True):
            row = held.pop(key, None)
            if row is None:
                lost.append(outcome.fence)
            else:
                self._record(outcome, row)
        self._write()
        return lost

    def _record(self, outcome: Outcome, row: Row) -> None:
        number, fence, priority, counted, worker, expires_at, *rest = row
        attempt = Attempt(*rest)
        ending = self._end(outcome, attempt, number)
        self._attempts.store(number, worker, attempt, ending, outcome)
        self._left.append(fence)
        self._counters.attempt(ending)
        if ending.arrival is not None:
            assert isinstance(outcome, Advanced)
            band = ending.arrival.band
            self._connection.execute(_ADVANCE, (kind_of(band), band, outcome.cost, number, fence))
            self._changes.wait(attempt.customer, band, priority)
            self._steps_ended.append(number)
        elif ending.state is State.DELAYED:
            is_same_boot = self._queue.boot == self._uptime.boot
            retry_at = self._uptime.at + ending.due_at - self._now if is_same_boot else None
            values = (ending.due_at, retry_at, ending.error, not ending.counts)
            self._connection.execute(_DELAY, (*values, number, fence))
            self._changes.delay(attempt.customer)
        elif ending.state is State.WAITING:
            self._connection.execute(_RELEASE, (number, fence))
            self._changes.wait(attempt.customer, attempt.band, priority)
        else:
            ended = (CODES[ending.state], self._now, ending.error, ending.real_cost)
            self._ended.append((*ended, number, fence))
        is_first = attempt.step == 0 and attempt.attempts == 1
        if not ending.counts and expires_at is not None and is_first:
            self._connection.execute(_EXPIRE_AGAIN, (expires_at, number))
            self._queue.next_expiry = min(expires_at, self._queue.next_expiry or expires_at)
        if isinstance(outcome, Completed):
            self._results.append((number, outcome))
            self._steps_ended.append(number)
        if counted or type(ending.event) is not EndEvent:
            self._events.append(ending.event)
        if ending.arrival is not None:
            self._events.append(ending.arrival)

    def _end(self, outcome: Outcome, attempt: Attempt, number: int) -> Ending:
        """Return the ending of an attempt, and apply it to the services of its kind."""
        settings, services = self._queue.settings, self._services
        report: ReportResult | None = None
        calls = {"last_fence": self._queue.fence, "now": self._now}
        if isinstance(outcome, OutageReport):
            assert services is not None
            kind = kind_of(attempt.band)
            # Waiting documents are counted when all outcomes are recorded.
            others_wait = any(waiting_by_kind(self._connection, self._queue).get(kind, ()))
            report = services.report(
                number, self._kinds.name(kind), outcome, others_wait=others_wait, **calls
            )
        ending = end_of(
            attempt,
            outcome,
            settings,
            self._now,
            kind_number=lambda name: self._kinds.number_of_step(name, settings),
            report=report,
        )
        if services is not None:
            services.end(self._kinds.name(kind_of(attempt.band)), outcome, ending, **calls)
        return ending

    def _write(self) -> None:
        connection = self._connection
        connection.executemany(_END, self._ended)
        _add_results(connection, self._results)
        if self._queue.has_checkpoints:
            drop_checkpoints(connection, self._steps_ended)
        if self._services is not None:
            self._services.save()
            self._queue.has_outages = bool(self._services.states)
        leave_leases(connection, self._left)
        self._changes.write(connection, self._queue.next_number)
        add_outcome_counters(connection, self._counters)
        record(connection, self._now, self._events)


def renew(
    connection: apsw.Connection,
    queue: QueueRow,
    fences: Sequence[Fence],
    lease_until: int,
    *,
    progress: Mapping[Fence, Progress],
    checkpoints: Mapping[Fence, str],
) -> Renewed:
    """Extend leases, and store progress and checkpoints."""
    renewed = Renewed([], [])
    for fence in fences:
        number = ids.decode(fence.document, queue.key)
        cancelled = connection.execute(_RENEW, (lease_until, number, fence.number)).get
        if cancelled is None:
            renewed.lost.append(fence)
            continue
        if cancelled:
            renewed.cancelled.append(fence)
        if fence in progress:
            connection.execute(_PROGRESS, (*progress[fence], fence.number, number))
        if fence in checkpoints:
            assert number is not None
            save_checkpoint(connection, number, checkpoints[fence])
    # A renewal can also shorten a lease, which claims must then expire earlier.
    sooner = [(lease_until, fence) for fence in {fence.number for fence in fences}]
    connection.executemany(_EXPIRE_SOONER, sooner)
    return renewed
