"""Stored formats that both databases share: states, documents, claims, events and settings."""

import json
from collections.abc import Callable, Iterable
from itertools import repeat
from secrets import randbits
from typing import Any

from fairturn.model import (
    DEFAULT_KIND_NAME,
    DOCUMENT_BYTES,
    AttemptOutcome,
    BodyType,
    Claim,
    Document,
    Fence,
    Settings,
    State,
)
from fairturn.scheduling.flows import (
    DEFAULT_KIND,
    ArrivalEvent,
    CancelEvent,
    CompletionEvent,
    EndEvent,
    Event,
    EventBatch,
    PurgeEvent,
    RequeueEvent,
    RunningCountsEvent,
    RunningEvent,
    SettingsEvent,
)
from fairturn.stores import ids
from fairturn.stores.ids import IdKey
from fairturn.validation.text import compact_json

Row = tuple[Any, ...]  # of a statement

STATES = tuple(State)  # by code
CODES = {state: code for code, state in enumerate(STATES)}
DELAYED, WAITING, RUNNING, COMPLETED, DEAD, CANCELLED, EXPIRED = range(
    7
)  # the codes that statements name
ATTEMPT_OUTCOMES = tuple(AttemptOutcome)  # by code
ADVANCED = ATTEMPT_OUTCOMES.index(AttemptOutcome.ADVANCED)  # the code that statements name
BODY_TYPES = {each.value: each for each in BodyType}


def codes_of(states: Iterable[State]) -> str:
    """Return the codes of states as a list for SQL."""
    return ", ".join(str(CODES[state]) for state in STATES if state in states)


# The SQL of `NewDocument.stored_bytes`, in both databases.
STORED_BYTES = f"{DOCUMENT_BYTES} + size_bytes + coalesce(octet_length(metadata), 0)"


def _column(field: str) -> str:
    """Return the column of a field of `Document`, in both databases."""
    if field == "customer":
        return "c.name"
    if field == "kind":  # the search takes 3 % of the time of a claim
        name = "(SELECT k.name FROM kinds k WHERE k.number = d.kind)"
        return f"CASE d.kind WHEN {DEFAULT_KIND} THEN '{DEFAULT_KIND_NAME}' ELSE {name} END"
    name = {"id": "number", "order": "order_number"}.get(field, field)
    return f"d.{name.removesuffix('_us').removesuffix('_json')}"


_READ = tuple(field for field in Document._fields if field != "progress")  # `query.py` adds it
DOCUMENT_COLUMNS = ", ".join(map(_column, _READ))


def to_document(row: Row, key: IdKey) -> Document:
    """Convert a row that begins with `DOCUMENT_COLUMNS`."""
    values = dict(zip(_READ, row, strict=False))
    parent = values["parent"]
    values["id"] = ids.encode(values["id"], key)
    values["state"] = STATES[values["state"]]
    values["cancel_requested"] = bool(values["cancel_requested"])
    values["body_type"] = BODY_TYPES[values["body_type"]]
    values["parent"] = None if parent is None else ids.encode(parent, key)
    return Document(**values)


# The fields that a claim sets, which it therefore does not read.
_SET_BY_CLAIM = {
    "customer", "state", "claimed_at_us", "ended_at_us", "worker", "cancel_requested", "real_cost",
    "progress",
}  # fmt: skip
_FIRST = ("order", "id", "priority", "cost", "body")  # read by the scheduler
ORDER, NUMBER, PRIORITY, COST, BODY = range(5)
_CLAIMED = _FIRST + tuple(
    field for field in Document._fields if field not in {*_FIRST, *_SET_BY_CLAIM}
)
STEP = _CLAIMED.index("step")
CLAIM_COLUMNS = ", ".join(map(_column, _CLAIMED))
# The rest of a claim of a document that has finished no step.
_OF_FIRST_STEP = (None, None, (), None)
# Creates a named tuple in a third of the time of its own constructor.
_NEW: Callable[[type[Any], Iterable[Any]], Any] = tuple.__new__


def to_claims(
    rows: Iterable[Row],
    customers: Iterable[str],
    key: IdKey,
    *,
    fence: int,
    worker: str,
    at: int,
    lease_ends_at: int,
) -> list[Claim]:
    """Convert rows that begin with `CLAIM_COLUMNS` and were claimed together. It works column by
    column, because a worker claims thousands of documents per second."""
    columns: dict[str, Iterable[Any]] = dict(zip(_CLAIMED, zip(*rows, strict=True), strict=False))
    document_ids = ids.encode_all(list(columns["id"]), key)
    columns |= {
        "id": document_ids,
        "customer": customers,
        "state": repeat(State.RUNNING),
        "attempts": [n + 1 for n in columns["attempts"]],
        "claimed_at_us": repeat(at),
        "ended_at_us": repeat(None),
        "worker": repeat(worker),
        "cancel_requested": repeat(False),
        "body_type": map(BODY_TYPES.__getitem__, columns["body_type"]),
        "parent": [None if n is None else ids.encode(n, key) for n in columns["parent"]],
        "real_cost": repeat(None),
        "progress": repeat(None),
    }
    documents = zip(*(columns[field] for field in Document._fields), strict=False)
    claims = zip(
        map(_NEW, repeat(Fence), zip(document_ids, repeat(fence), strict=False)),
        map(_NEW, repeat(Document), documents),
        columns["body"],
        repeat(lease_ends_at),
        *map(repeat, _OF_FIRST_STEP),
        strict=False,
    )
    return list(map(_NEW, repeat(Claim), claims))


# ── Events ───────────────────────────────────────────────────────────────────────────────────────

# The position is the code in the database: append, never reorder.
_EVENTS: tuple[type[Any], ...] = (
    ArrivalEvent,
    CancelEvent,
    EndEvent,
    CompletionEvent,
    RequeueEvent,
    SettingsEvent,
    PurgeEvent,
    RunningEvent,
)
_EVENT_CODES = {event: code for code, event in enumerate(_EVENTS)}


def encode_events(events: Iterable[Event]) -> str | None:
    """Return events as a JSON array; None for no events."""
    encoded = [(_EVENT_CODES[type(event)], *event) for event in events]
    return compact_json(encoded) if encoded else None


def decode_events(text: str) -> tuple[Event, ...]:
    """Return the events of a JSON array."""
    return tuple(_EVENTS[code](*rest) for code, *rest in json.loads(text))


def with_counts(batches: list[EventBatch], running: dict[int, dict[int, int]]) -> list[EventBatch]:
    """Insert a `RunningCountsEvent` before each new limit of the customers in `running`.

    `running` has the present numbers by customer and level. The numbers at each event are computed
    backwards from the ends of attempts.
    """
    counted = []
    for at, events in reversed(batches):
        backwards: list[Event] = []
        for event in reversed(events):
            backwards.append(event)
            if event.customer not in running:
                continue
            now = running[event.customer]
            if isinstance(event, EndEvent | CompletionEvent | RequeueEvent):
                ended = event.n if isinstance(event, EndEvent) else 1
                now[event.band] = now.get(event.band, 0) + ended
            elif type(event) is SettingsEvent and event.limit is not None:
                backwards.append(RunningCountsEvent(event.customer, dict(now)))
        counted.append(EventBatch(at, tuple(reversed(backwards))))
    return counted[::-1]


# ── Settings and epochs ──────────────────────────────────────────────────────────────────────────


class SettingsCache:
    """The parsed settings, which are parsed again only if their text has changed."""

    def __init__(self) -> None:
        self._text = ""
        self._settings = Settings()

    def parse(self, text: str) -> Settings:
        if text != self._text:
            self._settings = Settings.from_json(text)
            self._text = text
        return self._settings


JUMP_MIN = 1 << 32  # more numbers than are issued between a backup and its restore
_RANDOM_BITS = 40  # thousands of epochs stay below 2^53, tens of thousands below the 2^56 of an id


def jump() -> int:
    """Return the amount by which numbers and fences rise when an epoch begins."""
    return JUMP_MIN + randbits(_RANDOM_BITS)
