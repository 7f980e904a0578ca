"""Rows of the file that several operations share: events, counters, the row of `queue`."""

import json
from collections.abc import Iterable

import apsw

from fairturn.priority import LEVELS
from fairturn.scheduling.flows import Event, EventBatch
from fairturn.stores.ids import IdKey
from fairturn.stores.transitions import OUTCOME_COLUMNS, OutcomeCounters
from fairturn.stores.values import (
    Row,
    SettingsCache,
    decode_events,
    encode_events,
    jump,
)


def fetch(connection: apsw.Connection, statement: str, values: Row = ()) -> list[Row]:
    """Return all rows of a statement."""
    return connection.execute(statement, values).fetchall()


def fetch_each(connection: apsw.Connection, statement: str, many: Iterable[Row]) -> list[Row]:
    """Return all rows of a statement that is executed for each of `many`."""
    return list(connection.executemany(statement, many))


# Larger bodies are in the table `bodies`.
ROW_BODY_BYTES_MAX = 1_024


# ── Events ───────────────────────────────────────────────────────────────────────────────────────

_RECORD = "INSERT INTO event_log (at, events) VALUES (?, ?)"
_EVENTS = "SELECT number, at, events FROM event_log ORDER BY number"
_DELETE_EVENTS = "DELETE FROM event_log WHERE number <= ?"


def record(connection: apsw.Connection, at: int, events: Iterable[Event]) -> None:
    """Insert events for the next claim."""
    encoded = encode_events(events)
    if encoded is not None:
        connection.execute(_RECORD, (at, encoded))


def take_events(connection: apsw.Connection) -> list[EventBatch]:
    """Return the events since the last claim, and delete them."""
    rows = fetch(connection, _EVENTS)
    if rows:
        connection.execute(_DELETE_EVENTS, (rows[-1][0],))
    return _decoded(rows)


def read_events(connection: apsw.Connection, characters_max: int) -> list[EventBatch] | None:
    """Return the events since the last claim; None if they have more than `characters_max`."""
    rows = []
    for row in connection.execute(_EVENTS):
        characters_max -= len(row[2])
        if characters_max < 0:
            return None
        rows.append(row)
    return _decoded(rows)


def _decoded(rows: list[Row]) -> list[EventBatch]:
    return [EventBatch(at, decode_events(events)) for _, at, events in rows]


def customers_in_events(connection: apsw.Connection) -> set[int]:
    """Return the customers with events that no claim has folded."""
    events = (event for *_, text in fetch(connection, _EVENTS) for event in json.loads(text))
    return {customer for _, customer, *_ in events}


# ── Outcome counters ─────────────────────────────────────────────────────────────────────────────

_OUTCOME_COUNTERS = f"SELECT {', '.join(OUTCOME_COLUMNS)} FROM outcome_counters"
_ADD_OUTCOMES = "UPDATE outcome_counters SET " + ", ".join(
    f"{column} = {column} + ?" for column in OUTCOME_COLUMNS
)


def read_outcome_counters(connection: apsw.Connection) -> OutcomeCounters:
    return OutcomeCounters(*fetch(connection, _OUTCOME_COUNTERS)[0])


def add_outcome_counters(connection: apsw.Connection, counters: OutcomeCounters) -> None:
    if any(counters.row):
        connection.execute(_ADD_OUTCOMES, counters.row)


REPAIRS = "SELECT repairs FROM queue"  # how often a claim has repaired flows


# ── The row of `queue` ───────────────────────────────────────────────────────────────────────────

_QUEUE = """
    SELECT settings, id_secret, id_key, ids_from, next_number, next_customer, delayed, counted,
        claims, fence, tick, scheduler_version, boot, waiting_1, waiting_2, waiting_3, waiting_4,
        waiting_5, waiting_6, waiting_7, waiting_8, waiting_9, is_copy
    FROM queue"""
_BEGIN_EPOCH = """
    UPDATE queue SET epoch = epoch + 1, is_copy = 0, next_number = ?, fence = ?,
        scheduler_version = ?
"""
COUNT_COUNTED = """
    UPDATE queue SET counted = (
        SELECT count(*) FROM customers INDEXED BY customers_counted WHERE counted = 1)"""
# Every process loads its scheduler state again at its next claim.
INVALIDATE_SCHEDULER = "UPDATE queue SET scheduler_version = scheduler_version + 1"


class QueueRow:
    """The one row of `queue`."""

    __slots__ = (
        "boot",
        "claims",
        "counted",
        "delayed",
        "fence",
        "is_copy",
        "key",
        "next_customer",
        "next_number",
        "scheduler_version",
        "settings",
        "tick",
        "waiting",
    )

    def __init__(self, connection: apsw.Connection, cache: SettingsCache) -> None:
        (row,) = fetch(connection, _QUEUE)
        text, *key = row[:4]
        self.key = IdKey(*key)
        self.next_number, self.next_customer, self.delayed, self.counted = row[4:8]
        self.claims, self.fence, self.tick, self.scheduler_version, self.boot = row[8:13]
        self.waiting = row[13:-1]  # of each priority
        self.is_copy = row[-1]
        self.settings = cache.parse(text)

    def begin_epoch(self, connection: apsw.Connection) -> None:
        """Skip every number and fence that may have been issued, and invalidate the scheduler state
        of every process. The caller must make this transaction durable before it returns."""
        by = jump()
        self.next_number += by
        self.fence += by
        self.scheduler_version += by
        values = (self.next_number, self.fence, self.scheduler_version)
        connection.execute(_BEGIN_EPOCH, values)


def row_to_write(connection: apsw.Connection, cache: SettingsCache) -> QueueRow:
    """Return the row inside a write transaction. The first write to a copy begins a new epoch."""
    queue = QueueRow(connection, cache)
    if queue.is_copy:
        queue.begin_epoch(connection)
    return queue


# A flow without a row has no waiting documents: all that arrive now come after claimed_to.
MOVE_FLOW = """
    INSERT INTO flows (customer, level, waiting, claimed_to) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET waiting = waiting + excluded.waiting"""
_MOVE_DELAYED = "UPDATE customers SET delayed = delayed + ? WHERE number = ?"
# Part of an UPDATE of `queue`, with the values of `CounterChanges.counts`.
MOVE_COUNTS = "delayed = delayed + ?, " + ", ".join(
    f"waiting_{n} = waiting_{n} + ?" for n in range(1, LEVELS + 1)
)
_MOVE_QUEUE = f"UPDATE queue SET {MOVE_COUNTS}"


class CounterChanges:
    """Changes to the counts of waiting and delayed documents, written at the end of a call."""

    def __init__(self) -> None:
        self.flows: dict[tuple[int, int], int] = {}
        self.levels: dict[int, int] = {}
        self.delayed: dict[int, int] = {}

    def wait(self, customer: int, level: int, priority: int, n: int = 1) -> None:
        place = (customer, level)
        self.flows[place] = self.flows.get(place, 0) + n
        self.levels[priority] = self.levels.get(priority, 0) + n

    def delay(self, customer: int, n: int = 1) -> None:
        self.delayed[customer] = self.delayed.get(customer, 0) + n

    def counts(self) -> tuple[int, ...]:
        """Return the values of `MOVE_COUNTS`."""
        waiting = (self.levels.get(level, 0) for level in range(1, LEVELS + 1))
        return (sum(self.delayed.values()), *waiting)

    def write(self, connection: apsw.Connection, next_number: int) -> None:
        """Write flows, queue and customers; claims write flows and queue themselves. A flow that
        was pruned is inserted with claimed_to below `next_number`: its documents were returned."""
        if self.flows:
            flows = [(*flow, n, next_number - 1) for flow, n in self.flows.items()]
            connection.executemany(MOVE_FLOW, flows)
        if self.flows or self.delayed:
            connection.execute(_MOVE_QUEUE, self.counts())
        self.write_delayed(connection)

    def write_delayed(self, connection: apsw.Connection) -> None:
        if self.delayed:
            connection.executemany(_MOVE_DELAYED, [(n, c) for c, n in self.delayed.items()])
