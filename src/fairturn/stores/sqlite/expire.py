"""Expiry: documents that were not started before their time, recorded in bounded steps."""

from typing import NamedTuple

import apsw

from fairturn.clock import Clock
from fairturn.model import State
from fairturn.scheduling.flows import CancelEvent
from fairturn.stores.sqlite.cancel import lowest_waiting
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.rows import (
    CounterChanges,
    QueueRow,
    add_outcome_counters,
    fetch,
    record,
    row_to_write,
)
from fairturn.stores.transitions import OutcomeCounters
from fairturn.stores.values import DELAYED, EXPIRED, WAITING, SettingsCache

# Whether a document d expires at the time of a row e. Otherwise it runs, has ended or has a counted
# attempt, or the row is of an earlier expiry.
MAY_EXPIRE = f"""
    d.state IN ({WAITING}, {DELAYED}) AND d.step = 0 AND d.attempts = 0
    AND d.expires_at = e.expires_at"""
# By the primary keys.
_DUE = f"""
    SELECT e.expires_at, e.document, {MAY_EXPIRE}, d.state, d.customer, d.level, d.priority,
        d.order_number
    FROM expirations e LEFT JOIN documents d ON d.number = e.document
    WHERE e.expires_at <= ? ORDER BY e.expires_at, e.document LIMIT ?"""
_EXPIRE = f"""
    UPDATE documents SET state = {EXPIRED}, level = 0, returned = 0, ended_at = ?
    WHERE number = ?"""
_DROP = "DELETE FROM expirations WHERE expires_at = ? AND document = ?"


class ExpiryBacklog(Exception):
    """More documents have expired than one transaction records."""


class Expired(NamedTuple):
    """How many rows of `expirations` a transaction has removed, and documents it has recorded."""

    rows: int
    documents: int


def expire(database: Database, cache: SettingsCache, clock: Clock, limit: int) -> int:
    """Record up to `limit` documents that have expired, in transactions of at most `limit` rows;
    return how many. Nothing is written if no document has expired."""
    with database.reading() as connection:
        next_expiry = QueueRow(connection, cache).next_expiry
    if next_expiry is None or next_expiry > clock.now():
        return 0
    recorded = 0
    while recorded < limit:
        at_most = limit - recorded
        with database.writing("expire") as connection:
            queue = row_to_write(connection, cache)
            expired = expire_due(connection, queue, clock.now(), at_most)
        recorded += expired.documents
        if expired.rows < at_most:
            break
    return recorded


def expire_due(connection: apsw.Connection, queue: QueueRow, now: int, limit: int) -> Expired:
    """Remove up to `limit` rows whose time has come, and record those of their documents that have
    expired, inside a transaction."""
    events, counters, changes = [], OutcomeCounters(), CounterChanges()
    rows = fetch(connection, _DUE, (now, limit))
    connection.executemany(_DROP, [row[:2] for row in rows])
    expired = [(number, rest) for _, number, may_expire, *rest in rows if may_expire]
    for number, (state, customer, band, priority, order) in expired:
        connection.execute(_EXPIRE, (now, number))
        counters.end(State.EXPIRED)
        if state == WAITING:
            following = lowest_waiting(connection, customer, band)
            events.append(CancelEvent(customer, band, order, following))
            changes.wait(customer, band, priority, -1)
        else:
            changes.delay(customer, -1)
    changes.write(connection, queue.next_number)
    add_outcome_counters(connection, counters)
    record(connection, now, events)
    return Expired(len(rows), len(expired))
