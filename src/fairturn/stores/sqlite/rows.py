"""How values look in the file: events, what ended, the queue's own row."""

import json
from collections.abc import Iterable

import apsw

from fairturn.scheduling.flows import Event, Recorded
from fairturn.stores.epoch import jump
from fairturn.stores.events import decode_events, encode_events
from fairturn.stores.outcome_counters import Ends
from fairturn.stores.values import (
    Row,
    SettingsCache,
)


def fetch(connection: apsw.Connection, statement: str, values: Row = ()) -> list[Row]:
    """All rows of a statement."""
    return connection.execute(statement, values).fetchall()


def fetch_each(connection: apsw.Connection, statement: str, many: Iterable[Row]) -> list[Row]:
    """All rows of a statement that is executed for each of many values."""
    return list(connection.executemany(statement, many))


# Bodies up to this size lie in the document's own row.
ROW_BODY_BYTES_MAX = 1_024


# ── Events ───────────────────────────────────────────────────────────────────────────────────────

_RECORD = "INSERT INTO recorded (at, events) VALUES (?, ?)"
_RECORDED = "SELECT number, at, events FROM recorded ORDER BY number"
_FORGET_RECORDED = "DELETE FROM recorded WHERE number <= ?"


def record(connection: apsw.Connection, at: int, events: Iterable[Event]) -> None:
    """Leave word for the next claim."""
    encoded = encode_events(events)
    if encoded is not None:
        connection.execute(_RECORD, (at, encoded))


def take_recorded(connection: apsw.Connection) -> list[Recorded]:
    """What was recorded since the last claim; it is gone from the file afterwards."""
    rows = fetch(connection, _RECORDED)
    if rows:
        connection.execute(_FORGET_RECORDED, (rows[-1][0],))
    return _decoded(rows)


def look_at_recorded(connection: apsw.Connection, characters_max: int) -> list[Recorded] | None:
    """What was recorded since the last claim, which stays in the file; None if it is too much."""
    rows = []
    for row in connection.execute(_RECORDED):
        characters_max -= len(row[2])
        if characters_max < 0:
            return None
        rows.append(row)
    return _decoded(rows)


def _decoded(rows: list[Row]) -> list[Recorded]:
    return [Recorded(at, decode_events(events)) for _, at, events in rows]


def customers_in_recorded(connection: apsw.Connection) -> set[int]:
    """The customers of whom something is yet to be folded in."""
    events = (event for *_, text in fetch(connection, _RECORDED) for event in json.loads(text))
    return {customer for _, customer, *_ in events}


# ── What ended ───────────────────────────────────────────────────────────────────────────────────

_ENDS = "SELECT attempts, retried, dead, cancelled FROM ends"
_ADD_ENDS = """
    UPDATE ends SET attempts = attempts + ?, retried = retried + ?, dead = dead + ?,
        cancelled = cancelled + ?"""


def read_ends(connection: apsw.Connection) -> Ends:
    """What ended, since ever."""
    return Ends(*fetch(connection, _ENDS)[0])


def add_ends(connection: apsw.Connection, ends: Ends) -> None:
    """Count what ended now."""
    if any(ends.row):
        connection.execute(_ADD_ENDS, ends.row)


# How often a claim has repaired flows.
REPAIRS = "SELECT repairs FROM queue"


# ── The queue's own row ──────────────────────────────────────────────────────────────────────────

_QUEUE = """
    SELECT settings, id_key, next_number, next_customer, delayed, counted, claims, fence, tick,
        turns_version, boot, waiting_1, waiting_2, waiting_3, waiting_4, waiting_5, waiting_6,
        waiting_7, waiting_8, waiting_9, is_copy
    FROM queue"""
_BEGIN_EPOCH = """
    UPDATE queue SET epoch = epoch + 1, is_copy = 0, next_number = ?, fence = ?, turns_version = ?
"""


COUNT_COUNTED = """
    UPDATE queue SET counted = (
        SELECT count(*) FROM customers INDEXED BY customers_counted WHERE counted = 1)"""
# Engines that processes keep from claim to claim are to be read anew.
FORGET_TURNS = "UPDATE queue SET turns_version = turns_version + 1"


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
        "settings",
        "tick",
        "turns_version",
        "waiting",
    )

    def __init__(self, connection: apsw.Connection, cache: SettingsCache) -> None:
        (row,) = fetch(connection, _QUEUE)
        text, self.key, self.next_number, self.next_customer, self.delayed, self.counted = row[:6]
        self.claims, self.fence, self.tick, self.turns_version, self.boot = row[6:11]
        self.waiting = row[11:-1]  # of each priority
        self.is_copy = row[-1]
        self.settings = cache.parse(text)

    def begin_epoch(self, connection: apsw.Connection) -> None:
        """Leave out every number and fence that may have been given out, and let every process
        read the turns anew. The transaction under way must be synced before its call returns."""
        by = jump()
        self.next_number += by
        self.fence += by
        self.turns_version += by
        values = (self.next_number, self.fence, self.turns_version)
        connection.execute(_BEGIN_EPOCH, values)


def row_to_write(connection: apsw.Connection, cache: SettingsCache) -> QueueRow:
    """The row in a transaction that writes. The first one in a copy begins a new epoch."""
    queue = QueueRow(connection, cache)
    if queue.is_copy:
        queue.begin_epoch(connection)
    return queue
