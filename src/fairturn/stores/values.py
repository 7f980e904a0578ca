"""How values look in a database, whichever it is: states, documents, claims, settings."""

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from fairturn import ids
from fairturn.model import Claim, Document, Fence, Kind, Settings, State

Row = tuple[Any, ...]  # what a statement gives, column by column

# The position is the code in the database.
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
            None,  # progress, which only `query.py` reads
        )
    )


# What a claim reads of a document that waits: the rest is known, or is given by the claim.
CLAIM_COLUMNS = """
    d.order_number, d.number, d.priority, d.cost, d.body, d.attempts, d.count, d.submitted_at,
    d.due_at, d.error, d.kind, d.size_bytes, d.sha256, d.content_name, d.name, d.metadata, d.parent
"""
ORDER, NUMBER, PRIORITY, COST, BODY = range(5)  # where they stand in such a row
# What a named tuple is made with, in a third of the time that its own constructor takes.
_NEW: Callable[[type[Any], Iterable[Any]], Any] = tuple.__new__


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
    """Rows that begin with `CLAIM_COLUMNS` and were claimed together, put together column by
    column: there are thousands a second."""
    orders, numbers, priorities, costs, bodies, attempts, *rest = zip(*rows, strict=True)
    counts, submitted_at, due_at, errors, kinds = rest[:5]
    contents, parents = rest[5:10], rest[10]
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
        map(_NEW, repeat(Fence), zip(document_ids, repeat(fence), strict=False)),
        map(_NEW, repeat(Document), documents),
        bodies,
        repeat(lease_ends_at),
        strict=False,
    )
    return list(map(_NEW, repeat(Claim), claims))


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
