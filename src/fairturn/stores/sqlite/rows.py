"""Rows of the file that several operations share: events, counters, kinds, the row of `queue`."""

import json
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import apsw

from fairturn.clock import SECOND_US
from fairturn.model import KindSettings, Settings
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    BANDS_PER_KIND,
    DEFAULT_KIND,
    Event,
    EventBatch,
    band_of,
    kind_of,
    level_in,
)
from fairturn.scheduling.turns import PATIENCE_EVERY
from fairturn.stores.admission import refuse_kind_beyond_max, refuse_unknown_kind
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
        waiting_5, waiting_6, waiting_7, waiting_8, waiting_9, is_copy,
        (SELECT min(service) FROM outages), (SELECT min(document) FROM checkpoints),
        (SELECT min(expires_at) FROM expirations),
        (SELECT min(number) FROM kinds INDEXED BY kinds_expiry WHERE expires_in_us IS NOT NULL)
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
    """The one row of `queue`, and which of the tables that are usually empty have rows."""

    __slots__ = (
        "boot",
        "claims",
        "counted",
        "delayed",
        "fence",
        "has_checkpoints",
        "has_expiry_rules",
        "has_outages",
        "is_copy",
        "key",
        "next_customer",
        "next_expiry",
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
        self.waiting = row[13:22]  # of each priority
        self.is_copy = row[22]
        self.has_outages, self.has_checkpoints = row[23] is not None, row[24] is not None
        self.next_expiry: int | None = row[25]
        self.has_expiry_rules = row[26] is not None
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


# ── Kinds of work ────────────────────────────────────────────────────────────────────────────────

_KIND_COLUMNS = "number, name, running_max, paused, attempts_max, expires_in_us, since_patience"
_KINDS = f"SELECT {_KIND_COLUMNS} FROM kinds ORDER BY number"
_KIND = f"SELECT {_KIND_COLUMNS} FROM kinds WHERE name = ?"
_KIND_NUMBERS = "SELECT name, number FROM kinds"
_ADD_KIND = """
    INSERT INTO kinds (number, name, since_patience) SELECT max(number) + 1, ?, 0 FROM kinds
    RETURNING number"""
_WAITING_COLUMNS = tuple(f"waiting_{n}" for n in range(1, LEVELS + 1))
_WAITING_OF_KINDS = f"SELECT number, {', '.join(_WAITING_COLUMNS)} FROM kinds WHERE number > 0"


# Of a document d, by the primary key.
ATTEMPTS_MAX_OF_KIND = "(SELECT k.attempts_max FROM kinds k WHERE k.number = d.kind)"


class KindRow(NamedTuple):
    """A row of `kinds`."""

    number: int
    name: str
    limit: int | None
    is_paused: int
    attempts_max: int | None
    expires_in_us: int | None
    stored_since_patience: int | None

    @property
    def settings(self) -> KindSettings:
        return KindSettings(
            limit=self.limit,
            paused=bool(self.is_paused),
            attempts_max=self.attempts_max,
            expires_in_s=None if self.expires_in_us is None else self.expires_in_us / SECOND_US,
        )

    def since_patience(self, claims: int) -> int:
        """Return the number of claims since the last patience claim, after `claims` claims."""
        if self.stored_since_patience is None:
            return claims % PATIENCE_EVERY
        return self.stored_since_patience


def read_kinds(connection: apsw.Connection, names: Collection[str] | None = None) -> list[KindRow]:
    """Return all kinds, or those of these names that exist."""
    if names is None:
        rows: Iterable[Row] = fetch(connection, _KINDS)
    else:
        rows = fetch_each(connection, _KIND, [(name,) for name in sorted(set(names))])
    return [KindRow._make(row) for row in rows]


def kind_numbers(connection: apsw.Connection) -> dict[str, int]:
    """Return the numbers of all kinds by name."""
    return dict(fetch(connection, _KIND_NUMBERS))


class KindNames:
    """The names of all kinds, read when one is first needed."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._numbers: dict[str, int] = {}

    @property
    def numbers(self) -> dict[str, int]:
        if not self._numbers:
            self._numbers = kind_numbers(self._connection)
        return self._numbers

    def name(self, number: int) -> str:
        """Return the name of a kind; the number itself if a damaged document names no kind."""
        return next((name for name, each in self.numbers.items() if each == number), f"{number}")

    def number_of_step(self, name: str, settings: Settings) -> int:
        """Return the number of the kind of a next step, which is created in an open queue. Raise
        `KindRefused` if there is none."""
        if name not in self.numbers:
            refuse_unknown_kind(name, settings)
            refuse_kind_beyond_max(name, len(self.numbers))
            self._numbers[name] = create_kind(self._connection, name)
        return self._numbers[name]


def create_kind(connection: apsw.Connection, name: str) -> int:
    """Insert a kind, and return its number. The caller has checked the maximum of kinds."""
    number: int = connection.execute(_ADD_KIND, (name,)).get
    return number


def waiting_by_kind(connection: apsw.Connection, queue: "QueueRow") -> dict[int, tuple[int, ...]]:
    """Return the numbers of waiting documents by priority, of each kind."""
    others = {number: tuple(waiting) for number, *waiting in fetch(connection, _WAITING_OF_KINDS)}
    default = (n - sum(rest) for n, *rest in zip(queue.waiting, *others.values(), strict=True))
    return {DEFAULT_KIND: tuple(default), **others}


# ── Documents that wait again ────────────────────────────────────────────────────────────────────

# Whether a document of the flow in this band is at or below claimed_to, where only returned
# documents wait. A flow without a row is inserted with the highest order as its claimed_to.
IS_RETURNED = """
    order_number <= coalesce((
        SELECT f.claimed_to FROM flows f
        WHERE f.customer = documents.customer AND f.level = {}), order_number)"""


# ── Counters ─────────────────────────────────────────────────────────────────────────────────────

# A flow without a row has no waiting documents: all that arrive now come after claimed_to.
MOVE_FLOW = """
    INSERT INTO flows (customer, level, waiting, claimed_to) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET waiting = waiting + excluded.waiting"""
_MOVE_DELAYED = "UPDATE customers SET delayed = delayed + ? WHERE number = ?"
# Part of an UPDATE of `queue`, with the values of `CounterChanges.counts`.
_MOVE_WAITING = ", ".join(f"{column} = {column} + ?" for column in _WAITING_COLUMNS)
MOVE_COUNTS = f"delayed = delayed + ?, {_MOVE_WAITING}"
_MOVE_QUEUE = f"UPDATE queue SET {MOVE_COUNTS}"
_MOVE_KIND = f"UPDATE kinds SET {_MOVE_WAITING} WHERE number = ?"


class CounterChanges:
    """Changes to the counts of waiting and delayed documents, written at the end of a call."""

    def __init__(self) -> None:
        self.flows: dict[tuple[int, int], int] = {}
        self.waiting: dict[int, int] = {}  # by kind and priority, numbered as bands are
        self.delayed: dict[int, int] = {}

    def wait(self, customer: int, band: int, priority: int, n: int = 1) -> None:
        flow = (customer, band)
        self.flows[flow] = self.flows.get(flow, 0) + n
        counter = band - band % BANDS_PER_KIND + priority
        self.waiting[counter] = self.waiting.get(counter, 0) + n

    def delay(self, customer: int, n: int = 1) -> None:
        self.delayed[customer] = self.delayed.get(customer, 0) + n

    def counts(self) -> tuple[int, ...]:
        """Return the values of `MOVE_COUNTS`."""
        waiting = dict.fromkeys(range(1, LEVELS + 1), 0)
        for counter, n in self.waiting.items():
            waiting[level_in(counter)] += n
        return (sum(self.delayed.values()), *waiting.values())

    def write(self, connection: apsw.Connection, next_number: int) -> None:
        """Write flows, queue, kinds and customers; claims write flows and queue themselves. A flow
        that was pruned is inserted with claimed_to below `next_number`: its documents were
        returned."""
        if self.flows:
            flows = [(*flow, n, next_number - 1) for flow, n in self.flows.items()]
            connection.executemany(MOVE_FLOW, flows)
        if self.flows or self.delayed:
            connection.execute(_MOVE_QUEUE, self.counts())
        self.write_kinds(connection)
        self.write_delayed(connection)

    def write_kinds(self, connection: apsw.Connection) -> None:
        kinds = {kind_of(counter) for counter in self.waiting} - {DEFAULT_KIND}
        if kinds:
            connection.executemany(_MOVE_KIND, [(*self._of_kind(kind), kind) for kind in kinds])

    def _of_kind(self, kind: int) -> Iterator[int]:
        return (self.waiting.get(band_of(level, kind), 0) for level in range(1, LEVELS + 1))

    def write_delayed(self, connection: apsw.Connection) -> None:
        if self.delayed:
            connection.executemany(_MOVE_DELAYED, [(n, c) for c, n in self.delayed.items()])
