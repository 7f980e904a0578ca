"""Outcomes, renewals, cancels and retries."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import apsw

from fairturn.clock import Uptime
from fairturn.model import (
    CANCELS_KEPT_MAX,
    Completed,
    Fence,
    Outcome,
    Progress,
    Renewed,
    State,
    kept_cost,
    level_of,
)
from fairturn.scheduling.flows import ArrivalEvent, CancelEvent, Costs, EndEvent, Event
from fairturn.stores import ids
from fairturn.stores.sqlite.rows import (
    CounterChanges,
    QueueRow,
    add_outcome_counters,
    fetch,
    fetch_each,
    record,
)
from fairturn.stores.transitions import Attempt, OutcomeCounters, end_of
from fairturn.stores.values import (
    CANCELLED,
    CODES,
    COMPLETED,
    DEAD,
    DELAYED,
    RUNNING,
    STATES,
    WAITING,
    Row,
)

# By the primary key. State and fence make every change conditional on the lease.
_HELD = f"""
    SELECT d.number, d.fence, d.priority, c.counted, d.customer, d.level, d.order_number,
        d.attempts, d.cancel_requested, d.claimed_at, d.charged_cost, d.charged_weight, d.charge
    FROM documents d JOIN customers c ON c.number = d.customer
    WHERE d.number = ? AND d.state = {RUNNING} AND d.fence = ?"""
_COMPLETE = f"""
    UPDATE documents SET state = {COMPLETED}, ended_at = ?, error = NULL, real_cost = ?
    WHERE number = ? AND state = {RUNNING} AND fence = ?"""
_END = f"""
    UPDATE documents SET state = ?, ended_at = ?, error = ?, real_cost = ?
    WHERE number = ? AND state = {RUNNING} AND fence = ?"""
_DELAY = f"""
    UPDATE documents SET state = {DELAYED}, due_at = ?, retry_at = ?, error = ?
    WHERE number = ? AND state = {RUNNING} AND fence = ?"""
_RELEASE = f"""
    UPDATE documents SET state = {WAITING}, returned = 1, attempts = attempts - 1
    WHERE number = ? AND state = {RUNNING} AND fence = ?"""
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
_STATE = "SELECT state, customer, level, priority, order_number FROM documents WHERE number = ?"
_CANCEL = f"""
    UPDATE documents SET state = {CANCELLED}, level = 0, returned = 0, ended_at = ?
    WHERE number = ?"""
_ADD_CANCEL = "INSERT INTO unreported_cancels (document) VALUES (?)"
_DROP_OLD_CANCELS = """
    DELETE FROM unreported_cancels
    WHERE number <= (SELECT max(number) FROM unreported_cancels) - ?"""
_ASK_TO_STOP = "UPDATE documents SET cancel_requested = 1 WHERE number = ?"
_RETRY = f"""
    UPDATE documents SET state = {WAITING}, returned = 1, attempts = 0, ended_at = NULL, level = ?
    WHERE number = ?"""
# By documents_returned; and by documents_flow after the flow's claimed_to.
LOWEST_RETURNED = """
    SELECT min(order_number) FROM documents INDEXED BY documents_returned
    WHERE returned = 1 AND customer = ? AND level = ? AND order_number > ?"""
_LOWEST = """
    SELECT min(order_number) FROM documents INDEXED BY documents_flow
    WHERE customer = ?1 AND level = ?2 AND order_number > (
        SELECT claimed_to FROM flows WHERE customer = ?1 AND level = ?2)"""


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
    plain = queue.counted == 0 and queue.settings.costs is not Costs.LEARNED
    if plain and all(type(outcome) is Completed for outcome in outcomes):
        connection.execute("SAVEPOINT plain")
        if _complete(connection, queue, outcomes, now):
            connection.execute("RELEASE plain")
            return []
        connection.execute("ROLLBACK TO plain; RELEASE plain")
    return _finish(connection, queue, outcomes, now, uptime)


def _complete(
    connection: apsw.Connection, queue: QueueRow, outcomes: Sequence[Any], now: int
) -> bool:
    """Complete documents with one statement each, without events: no customer has a limit, and
    costs are not learned. Return False if an outcome is stale; `_finish` determines which."""
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


def _finish(
    connection: apsw.Connection,
    queue: QueueRow,
    outcomes: Sequence[Outcome],
    now: int,
    uptime: Uptime,
) -> list[Fence]:
    documents = ids.decode_all([o.fence.document for o in outcomes], queue.key)
    numbers = [(n, o.fence.number) for n, o in zip(documents, outcomes, strict=True)]
    held = {row[:2]: row[2:] for row in fetch_each(connection, _HELD, numbers)}
    lost: list[Fence] = []
    ended: list[Row] = []
    results: list[tuple[Any, Completed]] = []
    left: list[int] = []
    events: list[Event] = []
    outcome_counters, changes = OutcomeCounters(), CounterChanges()
    for outcome, (number, fence) in zip(outcomes, numbers, strict=True):
        row = held.pop((number, fence), None)
        if row is None:
            lost.append(outcome.fence)
            continue
        left.append(fence)
        priority, counted, *rest = row
        attempt = Attempt(*rest)
        ending = end_of(attempt, outcome, queue.settings, now)
        outcome_counters.attempt(ending)
        state, event, error, real_cost, due_at = ending
        if state is State.DELAYED:
            retry_at = uptime.at + due_at - now if queue.boot == uptime.boot else None
            connection.execute(_DELAY, (due_at, retry_at, error, number, fence))
            changes.delay(attempt.customer)
        elif state is State.WAITING:
            connection.execute(_RELEASE, (number, fence))
            changes.wait(attempt.customer, attempt.level, priority)
        else:
            ended.append((CODES[state], now, error, real_cost, number, fence))
        if isinstance(outcome, Completed):
            results.append((number, outcome))
        if counted or type(event) is not EndEvent:
            events.append(event)
    connection.executemany(_END, ended)
    _add_results(connection, results)
    leave_leases(connection, left)
    changes.write(connection, queue.next_number)
    add_outcome_counters(connection, outcome_counters)
    record(connection, now, events)
    return lost


def renew(
    connection: apsw.Connection,
    queue: QueueRow,
    fences: Sequence[Fence],
    lease_until: int,
    progress: Mapping[Fence, Progress],
) -> Renewed:
    """Extend leases and store progress."""
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
    # A renewal can also shorten a lease, which claims must then expire earlier.
    sooner = [(lease_until, fence) for fence in {fence.number for fence in fences}]
    connection.executemany(_EXPIRE_SOONER, sooner)
    return renewed


def cancel(
    connection: apsw.Connection, queue: QueueRow, documents: Iterable[str], now: int
) -> list[State | None]:
    """Cancel documents, and return their states afterwards."""
    states: list[State | None] = []
    events: list[Event] = []
    outcome_counters, changes = OutcomeCounters(), CounterChanges()
    for id in documents:
        number = ids.decode(id, queue.key)
        found = fetch(connection, _STATE, (number,))
        if not found:
            states.append(None)
            continue
        ((state, customer, level, priority, order),) = found
        if state == RUNNING:
            connection.execute(_ASK_TO_STOP, (number,))
        elif state in (WAITING, DELAYED):
            connection.execute(_CANCEL, (now, number))
            connection.execute(_ADD_CANCEL, (number,))
            outcome_counters.end(State.CANCELLED)
            if state == WAITING:
                lowest = _lowest_waiting(connection, customer, level)
                events.append(CancelEvent(customer, level, order, lowest))
                changes.wait(customer, level, priority, -1)
            else:
                changes.delay(customer, -1)
            state = CANCELLED
        states.append(STATES[state])
    connection.execute(_DROP_OLD_CANCELS, (CANCELS_KEPT_MAX,))
    changes.write(connection, queue.next_number)
    add_outcome_counters(connection, outcome_counters)
    record(connection, now, events)
    return states


def _lowest_waiting(connection: apsw.Connection, customer: int, level: int) -> int | None:
    returned: int | None = connection.execute(LOWEST_RETURNED, (customer, level, 0)).get
    if returned is not None:
        return returned
    lowest: int | None = connection.execute(_LOWEST, (customer, level)).get
    return lowest


def retry(
    connection: apsw.Connection, queue: QueueRow, documents: Iterable[str], now: int
) -> list[State | None]:
    """Return dead documents to waiting, and return the states before."""
    states: list[State | None] = []
    events: list[Event] = []
    changes = CounterChanges()
    for id in documents:
        number = ids.decode(id, queue.key)
        found = fetch(connection, _STATE, (number,))
        if not found:
            states.append(None)
            continue
        ((state, customer, _, priority, order),) = found
        states.append(STATES[state])
        if state == DEAD:
            level = level_of(priority, queue.settings.mode)
            connection.execute(_RETRY, (level, number))
            changes.wait(customer, level, priority)
            events.append(ArrivalEvent(customer, level, order, 1))
    changes.write(connection, queue.next_number)
    record(connection, now, events)
    return states
