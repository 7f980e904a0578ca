"""How values look in the file: states, documents, events, receipts."""

import json
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import apsw

from fairturn import ids
from fairturn.flows import (
    Arrived,
    Changed,
    Ended,
    Event,
    Finished,
    Left,
    Purged,
    Recorded,
    Resumed,
    Returned,
)
from fairturn.model import Claim, Document, Fence, Kind, Settings, State

Row = tuple[Any, ...]  # what a statement gives, column by column


def fetch(connection: apsw.Connection, statement: str, values: Row = ()) -> list[Row]:
    """All rows of a statement."""
    return connection.execute(statement, values).fetchall()


def fetch_each(connection: apsw.Connection, statement: str, many: Iterable[Row]) -> list[Row]:
    """All rows of a statement that is executed for each of many values."""
    return list(connection.executemany(statement, many))


STATES = (
    State.DELAYED,
    State.WAITING,
    State.RUNNING,
    State.COMPLETED,
    State.DEAD,
    State.CANCELLED,
)
DELAYED, WAITING, RUNNING, COMPLETED, DEAD, CANCELLED = range(6)
CODES = {state: code for code, state in enumerate(STATES)}
KINDS = {kind.value: kind for kind in Kind}

# Bodies up to this size lie in the document's own row.
ROW_BODY_BYTES_MAX = 1_024

# What `to_document` takes, in its order.
DOCUMENT_COLUMNS = """
    d.number, c.name, d.state, d.priority, d.count, d.submitted_at, d.due_at, d.order_number,
    d.attempts, d.claimed_at, d.ended_at, d.worker, d.error, d.cancel_requested, d.cost, d.kind,
    d.size_bytes, d.sha256, d.content_name, d.name, d.metadata, d.parent, d.real_cost
"""


def to_document(row: Row, key: int) -> Document:
    """A row that begins with `DOCUMENT_COLUMNS` as a document."""
    parent = row[21]
    return Document._make(
        (
            ids.encode(row[0], key),
            row[1],
            STATES[row[2]],
            *row[3:13],
            row[13] != 0,
            row[14],
            KINDS[row[15]],
            *row[16:21],
            None if parent is None else ids.encode(parent, key),
            row[22],
            None,  # progress, which only `reading.py` reads
        )
    )


# What a claim reads of a document that waits: the rest is known, or is given by the claim.
CLAIM_COLUMNS = """
    d.order_number, d.number, d.priority, d.cost, d.body, d.attempts, d.count, d.submitted_at,
    d.due_at, d.error, d.kind, d.size_bytes, d.sha256, d.content_name, d.name, d.metadata, d.parent
"""
ORDER, NUMBER, PRIORITY, COST, BODY = range(5)  # where they stand in such a row


def to_claims(
    rows: Iterable[Row],
    customers: Iterable[str],
    key: int,
    *,
    fence: int,
    worker: str,
    at: int,
    lease_ends_at: int,
) -> list[Claim]:
    """Rows of `CLAIM_COLUMNS` that were claimed together, put together column by column: there
    are thousands a second."""
    orders, numbers, priorities, costs, bodies, attempts, *submitted, parents = zip(
        *rows, strict=True
    )
    counts, submitted_at, due_at, errors, kinds, *contents = submitted
    document_ids = ids.encode_all(numbers, key)
    documents = zip(
        document_ids,
        customers,
        repeat(State.RUNNING),
        priorities,
        counts,
        submitted_at,
        due_at,
        orders,
        [n + 1 for n in attempts],
        repeat(at),
        repeat(None),  # ended_at
        repeat(worker),
        errors,
        repeat(False),  # cancel_requested
        costs,
        map(KINDS.__getitem__, kinds),
        *contents,
        [None if parent is None else ids.encode(parent, key) for parent in parents],
        repeat(None),  # real_cost
        repeat(None),  # progress
        strict=False,
    )
    claims = zip(
        map(Fence, document_ids, repeat(fence)),
        map(Document._make, documents),
        bodies,
        repeat(lease_ends_at),
        strict=False,
    )
    return list(map(Claim._make, claims))


# ── Events ───────────────────────────────────────────────────────────────────────────────────────

# The position is the code in the file: append, never reorder.
_EVENTS: tuple[type[Any], ...] = (
    Arrived,
    Left,
    Ended,
    Finished,
    Returned,
    Changed,
    Purged,
    Resumed,
)
_EVENT_CODES = {kind: code for code, kind in enumerate(_EVENTS)}

_RECORD = "INSERT INTO recorded (at, events) VALUES (?, ?)"
_RECORDED = "SELECT number, at, events FROM recorded ORDER BY number"
_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once, and not with each call
_FORGET_RECORDED = "DELETE FROM recorded WHERE number <= ?"


def record(connection: apsw.Connection, at: int, events: Iterable[Event]) -> None:
    """Leave word for the next claim."""
    encoded = [(_EVENT_CODES[type(event)], *event) for event in events]
    if encoded:
        connection.execute(_RECORD, (at, _encode(encoded)))


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
    return [
        Recorded(at, tuple(_EVENTS[code](*rest) for code, *rest in json.loads(events)))
        for _, at, events in rows
    ]


def customers_in_recorded(connection: apsw.Connection) -> set[int]:
    """The customers of whom something is yet to be folded in."""
    events = (event for *_, text in fetch(connection, _RECORDED) for event in json.loads(text))
    return {customer for _, customer, *_ in events}


# ── The queue's own row ──────────────────────────────────────────────────────────────────────────

_QUEUE = """
    SELECT settings, id_key, next_number, next_customer, delayed, counted, claims, fence, tick,
        turns_version, boot, waiting_1, waiting_2, waiting_3, waiting_4, waiting_5, waiting_6,
        waiting_7, waiting_8, waiting_9
    FROM queue"""


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
        "key",
        "next_customer",
        "next_number",
        "settings",
        "tick",
        "turns_version",
        "waiting",
    )

    def __init__(self, connection: apsw.Connection, cache: "SettingsCache") -> None:
        (row,) = fetch(connection, _QUEUE)
        text, self.key, self.next_number, self.next_customer, self.delayed, self.counted = row[:6]
        self.claims, self.fence, self.tick, self.turns_version, self.boot = row[6:11]
        self.waiting = row[11:]  # of each priority
        self.settings = cache.parse(text)


class SettingsCache:
    """Parses the settings only when another process has changed them."""

    def __init__(self) -> None:
        self._text = ""
        self._settings = Settings()

    def parse(self, text: str) -> Settings:
        if text != self._text:
            self._settings = Settings.from_json(text)
            self._text = text
        return self._settings
