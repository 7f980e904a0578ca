"""Cancels and retries: changes of documents that do not run."""

from collections.abc import Iterable

import apsw

from fairturn.model import CANCELS_KEPT_MAX, State, level_of
from fairturn.scheduling.flows import ArrivalEvent, CancelEvent, Event, band_of
from fairturn.stores import ids
from fairturn.stores.admission import refuse_passed
from fairturn.stores.sqlite.rows import (
    IS_RETURNED,
    CounterChanges,
    QueueRow,
    add_outcome_counters,
    fetch,
    record,
)
from fairturn.stores.transitions import OutcomeCounters
from fairturn.stores.values import CANCELLED, DEAD, DELAYED, EXPIRED, RUNNING, STATES, WAITING

_STATE = """
    SELECT state, customer, kind, level, priority, order_number FROM documents WHERE number = ?"""
_CANCEL = f"""
    UPDATE documents SET state = {CANCELLED}, level = 0, returned = 0, ended_at = ?
    WHERE number = ?"""
_ADD_CANCEL = "INSERT INTO unreported_cancels (document) VALUES (?)"
_DROP_OLD_CANCELS = """
    DELETE FROM unreported_cancels
    WHERE number <= (SELECT max(number) FROM unreported_cancels) - ?"""
_ASK_TO_STOP = "UPDATE documents SET cancel_requested = 1 WHERE number = ?"
# An expired document may never have been due: it has no order then.
_RETRY = f"""
    UPDATE documents SET state = iif(order_number IS NULL, {DELAYED}, {WAITING}), attempts = 0,
        snoozes = 0, ended_at = NULL, expires_at = ?2, level = ?1,
        returned = order_number IS NOT NULL AND {IS_RETURNED.format("?1")}
    WHERE number = ?3"""
_MAY_EXPIRE = """
    INSERT OR IGNORE INTO expirations (expires_at, document)
    SELECT expires_at, number FROM documents
    WHERE number = ? AND expires_at IS NOT NULL AND step = 0"""
# By documents_returned; and by documents_flow after the flow's claimed_to.
LOWEST_RETURNED = """
    SELECT min(order_number) FROM documents INDEXED BY documents_returned
    WHERE returned = 1 AND customer = ? AND level = ? AND order_number > ?"""
_LOWEST = """
    SELECT min(order_number) FROM documents INDEXED BY documents_flow
    WHERE customer = ?1 AND level = ?2 AND order_number > (
        SELECT claimed_to FROM flows WHERE customer = ?1 AND level = ?2)"""


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
        ((state, customer, _, band, priority, order),) = found
        if state == RUNNING:
            connection.execute(_ASK_TO_STOP, (number,))
        elif state in (WAITING, DELAYED):
            connection.execute(_CANCEL, (now, number))
            connection.execute(_ADD_CANCEL, (number,))
            outcome_counters.end(State.CANCELLED)
            if state == WAITING:
                lowest = lowest_waiting(connection, customer, band)
                events.append(CancelEvent(customer, band, order, lowest))
                changes.wait(customer, band, priority, -1)
            else:
                changes.delay(customer, -1)
            state = CANCELLED
        states.append(STATES[state])
    connection.execute(_DROP_OLD_CANCELS, (CANCELS_KEPT_MAX,))
    changes.write(connection, queue.next_number)
    add_outcome_counters(connection, outcome_counters)
    record(connection, now, events)
    return states


def lowest_waiting(connection: apsw.Connection, customer: int, band: int) -> int | None:
    """Return the lowest order that waits in a flow."""
    returned: int | None = connection.execute(LOWEST_RETURNED, (customer, band, 0)).get
    if returned is not None:
        return returned
    lowest: int | None = connection.execute(_LOWEST, (customer, band)).get
    return lowest


def retry(
    connection: apsw.Connection,
    queue: QueueRow,
    documents: Iterable[str],
    expires_at: int | None,
    now: int,
) -> list[State | None]:
    """Return dead documents to waiting, with an expiry also expired ones; return the states
    before."""
    if expires_at is not None:
        refuse_passed(expires_at, now)
    retried = (DEAD,) if expires_at is None else (DEAD, EXPIRED)
    states: list[State | None] = []
    events: list[Event] = []
    changes = CounterChanges()
    for id in documents:
        number = ids.decode(id, queue.key)
        found = fetch(connection, _STATE, (number,))
        if not found:
            states.append(None)
            continue
        ((state, customer, kind, _, priority, order),) = found
        states.append(STATES[state])
        if state not in retried:
            continue
        band = band_of(level_of(priority, queue.settings.mode), kind)
        connection.execute(_RETRY, (band, expires_at, number))
        connection.execute(_MAY_EXPIRE, (number,))
        if order is None:
            changes.delay(customer)
        else:
            changes.wait(customer, band, priority)
            events.append(ArrivalEvent(customer, band, order, 1))
    changes.write(connection, queue.next_number)
    record(connection, now, events)
    return states
