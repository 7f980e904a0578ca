"""What becomes of claimed documents: outcomes, renewals, leases that run out; and of those that
are not claimed: delays that end, cancels, retries."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import apsw

from fairturn import ids
from fairturn.clock import Uptime
from fairturn.model import (
    CANCELS_KEPT_MAX,
    CANCELS_REPORTED_MAX,
    LEASE_US_MAX,
    Completed,
    Document,
    Fence,
    Outcome,
    Progress,
    Renewed,
    State,
    kept_cost,
    level_of,
)
from fairturn.scheduling.flows import Arrived, Costs, Ended, Event, Left
from fairturn.stores.outcome_counters import Ends
from fairturn.stores.sqlite.counters import Tally
from fairturn.stores.sqlite.query import numbered
from fairturn.stores.sqlite.rows import QueueRow, add_ends, fetch, fetch_each, record
from fairturn.stores.transitions import Attempt, end_of, end_of_lease, has_ended
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

# By the primary key; state and fence make every change conditional on the lease.
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
_GIVE_BACK = f"""
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

_LOOK_SOONER = "UPDATE leases SET until = min(until, ?) WHERE fence = ?"
_LEAVE_LEASE = "UPDATE leases SET running = running - ? WHERE fence = ?"
_END_LEASE = "DELETE FROM leases WHERE fence = ? AND running <= 0"
# By leases_until. The second part: those that end further ahead than the longest lease.
_EXPIRED_LEASES = """
    SELECT fence, documents FROM leases WHERE until <= ?1
    UNION ALL SELECT fence, documents FROM leases WHERE until > ?1 + ?2"""
_LEASES = "SELECT fence, documents FROM leases"
_IN_LEASE = f"""
    SELECT lease_until, number, priority, customer, level, order_number, attempts,
        cancel_requested
    FROM documents WHERE number = ? AND state = {RUNNING} AND fence = ?"""
_SHRINK_LEASE = "UPDATE leases SET until = ?, running = ?, documents = ? WHERE fence = ?"
_DROP_LEASE = "DELETE FROM leases WHERE fence = ?"
_EXPIRE = f"UPDATE documents SET state = {WAITING}, returned = 1, error = ? WHERE number = ?"
_EXPIRE_LAST = "UPDATE documents SET state = ?, ended_at = ?, error = ? WHERE number = ?"

# By documents_delayed, and by documents_retried.
DUE = f"""
    SELECT due_at, number, customer, level, priority, order_number
    FROM documents INDEXED BY documents_delayed
    WHERE state = {DELAYED} AND due_at <= ?1 AND retry_at IS NULL
    UNION ALL
    SELECT due_at, number, customer, level, priority, order_number
    FROM documents INDEXED BY documents_retried
    WHERE state = {DELAYED} AND retry_at <= ?2"""
_PROMOTE = f"""
    UPDATE documents SET state = {WAITING}, returned = ?, order_number = ?, due_at = ?
    WHERE number = ?"""
# By documents_retried.
_FOLLOW_WALL_CLOCK = f"""
    UPDATE documents SET retry_at = NULL WHERE state = {DELAYED} AND retry_at IS NOT NULL"""

_STATE = "SELECT state, customer, level, priority, order_number FROM documents WHERE number = ?"
_CANCEL = f"""
    UPDATE documents SET state = {CANCELLED}, level = 0, returned = 0, ended_at = ?
    WHERE number = ?"""
_ADD_CANCEL = "INSERT INTO unreported_cancels (document) VALUES (?)"
_DROP_OLD_CANCELS = """
    DELETE FROM unreported_cancels
    WHERE number <= (SELECT max(number) FROM unreported_cancels) - ?"""
_OLDEST_CANCELS = "SELECT number, document FROM unreported_cancels ORDER BY number LIMIT ?"
_REMOVE_CANCELS = "DELETE FROM unreported_cancels WHERE number <= ?"
_ASK_TO_STOP = "UPDATE documents SET cancel_requested = 1 WHERE number = ?"
_RETRY = f"""
    UPDATE documents SET state = {WAITING}, returned = 1, attempts = 0, ended_at = NULL, level = ?
    WHERE number = ?"""
# By documents_returned; and by documents_flow from the flow's claimed_to on.
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
    """Record outcomes; the answer names those whose lease was lost."""
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
    """The common case, all completed and nothing to fold in: one statement a document. False if
    some lease was lost: which one it was takes a closer look."""
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
    """Count the documents that are no longer running under these fences."""
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
    ends: list[Row] = []
    results: list[tuple[Any, Completed]] = []
    left: list[int] = []
    events: list[Event] = []
    counted_ends, tally = Ends(), Tally()
    for outcome, (number, fence) in zip(outcomes, numbers, strict=True):
        row = held.pop((number, fence), None)
        if row is None:
            lost.append(outcome.fence)
            continue
        left.append(fence)
        priority, counted, *rest = row
        attempt = Attempt(*rest)
        ending = end_of(attempt, outcome, queue.settings, now)
        counted_ends.attempt(ending)
        state, event, error, real_cost, due_at = ending
        if state is State.DELAYED:
            retry_at = uptime.at + due_at - now if queue.boot == uptime.boot else None
            connection.execute(_DELAY, (due_at, retry_at, error, number, fence))
            tally.delay(attempt.customer)
        elif state is State.WAITING:
            connection.execute(_GIVE_BACK, (number, fence))
            tally.wait(attempt.customer, attempt.level, priority)
        else:
            ends.append((CODES[state], now, error, real_cost, number, fence))
        if isinstance(outcome, Completed):
            results.append((number, outcome))
        if counted or type(event) is not Ended:
            events.append(event)
    connection.executemany(_END, ends)
    _add_results(connection, results)
    leave_leases(connection, left)
    tally.write(connection, queue.next_number)
    add_ends(connection, counted_ends)
    record(connection, now, events)
    return lost


def renew(
    connection: apsw.Connection,
    queue: QueueRow,
    fences: Sequence[Fence],
    lease_until: int,
    progress: Mapping[Fence, Progress],
) -> Renewed:
    """Move the ends of leases, and keep how far the attempts are."""
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
    # A lease can become shorter too, and then it is to be looked for earlier.
    sooner = [(lease_until, fence) for fence in {fence.number for fence in fences}]
    connection.executemany(_LOOK_SOONER, sooner)
    return renewed


def end_expired(
    connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime, tally: Tally
) -> list[Event]:
    """Take back documents whose leases ran out, oldest first; after a restart of the machine,
    all that run."""
    events: list[Event] = []
    ends = Ends()
    at = uptime.at if queue.boot == uptime.boot else None
    for _, number, priority, *rest in _take_expired(connection, at):
        attempt = Attempt(*rest)
        ending = end_of_lease(attempt, queue.settings)
        ends.attempt(ending)
        state, event, error, *_ = ending
        if state is State.WAITING:
            connection.execute(_EXPIRE, (error, number))
            tally.wait(attempt.customer, attempt.level, priority)
        else:
            connection.execute(_EXPIRE_LAST, (CODES[state], now, error, number))
        events.append(event)
    add_ends(connection, ends)
    return events


def _take_expired(connection: apsw.Connection, at: int | None) -> list[Row]:
    """The documents whose leases have expired, by the end of the lease; None: all that run."""
    expired: list[Row] = []
    if at is None:
        leases = fetch(connection, _LEASES)
    else:
        leases = fetch(connection, _EXPIRED_LEASES, (at, LEASE_US_MAX))
    for fence, documents in leases:
        inside = [(number, fence) for number in json.loads(documents)]
        running = fetch_each(connection, _IN_LEASE, inside)
        left = [row for row in running if not has_ended(row[0], at)]
        expired += [row for row in running if row not in left]
        if left:
            until = min(row[0] for row in left)
            numbers = json.dumps([row[1] for row in left])
            connection.execute(_SHRINK_LEASE, (until, len(left), numbers, fence))
        else:
            connection.execute(_DROP_LEASE, (fence,))
    return sorted(expired)


def promote_due(
    connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime, tally: Tally
) -> list[tuple[int, Arrived]]:
    """Let documents wait that are due; the first time they get their order. After a restart of the
    machine retries are due by the wall clock."""
    if queue.boot != uptime.boot:
        connection.execute(_FOLLOW_WALL_CLOCK)
    due: list[tuple[int, Arrived]] = []
    promoted = []
    for moment, number, customer, level, priority, given in sorted(
        fetch(connection, DUE, (now, uptime.at))
    ):
        due_at = min(moment, now)  # later only if the wall clock has stepped back
        order = queue.next_number if given is None else given
        queue.next_number += given is None
        promoted.append((given is not None, order, due_at, number))
        tally.wait(customer, level, priority)
        tally.delay(customer, -1)
        due.append((due_at, Arrived(customer, level, order, 1)))
    if promoted:
        connection.executemany(_PROMOTE, promoted)
    return due


def cancel(
    connection: apsw.Connection, queue: QueueRow, documents: Iterable[str], now: int
) -> list[State | None]:
    """End documents that have not begun, ask running ones to stop; the states afterwards."""
    states: list[State | None] = []
    events: list[Event] = []
    ends, tally = Ends(), Tally()
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
            ends.cancel()
            if state == WAITING:
                lowest = _lowest_waiting(connection, customer, level)
                events.append(Left(customer, level, order, lowest))
                tally.wait(customer, level, priority, -1)
            else:
                tally.delay(customer, -1)
            state = CANCELLED
        states.append(STATES[state])
    connection.execute(_DROP_OLD_CANCELS, (CANCELS_KEPT_MAX,))
    tally.write(connection, queue.next_number)
    add_ends(connection, ends)
    record(connection, now, events)
    return states


def report_cancels(connection: apsw.Connection, queue: QueueRow) -> list[Document]:
    """Take the oldest cancelled documents that no claim has reported yet."""
    cancels = fetch(connection, _OLDEST_CANCELS, (CANCELS_REPORTED_MAX,))
    if not cancels:
        return []
    last, _ = cancels[-1]
    connection.execute(_REMOVE_CANCELS, (last,))
    return numbered(connection, queue.key, (document for _, document in cancels))


def _lowest_waiting(connection: apsw.Connection, customer: int, level: int) -> int | None:
    returned: int | None = connection.execute(LOWEST_RETURNED, (customer, level, 0)).get
    if returned is not None:
        return returned
    lowest: int | None = connection.execute(_LOWEST, (customer, level)).get
    return lowest


def retry(
    connection: apsw.Connection, queue: QueueRow, documents: Iterable[str], now: int
) -> list[State | None]:
    """Let dead documents wait again; the states before."""
    states: list[State | None] = []
    events: list[Event] = []
    tally = Tally()
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
            tally.wait(customer, level, priority)
            events.append(Arrived(customer, level, order, 1))
    tally.write(connection, queue.next_number)
    record(connection, now, events)
    return states
