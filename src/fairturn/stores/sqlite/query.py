"""Queries of documents, customers and counters."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import apsw

from fairturn.model import (
    FAILED,
    AttemptRecord,
    ContentRef,
    Customer,
    CustomerPage,
    CustomerSettings,
    Document,
    Filter,
    Kind,
    Page,
    Progress,
    State,
    Stored,
    Summary,
    by_priority,
)
from fairturn.priority import Count
from fairturn.scheduling.flows import BANDS_PER_KIND, WEIGHT_ONE, Mode, level_in
from fairturn.stores import ids
from fairturn.stores.ids import IdKey
from fairturn.stores.sqlite.attempts import read_attempts
from fairturn.stores.sqlite.rows import (
    REPAIRS,
    QueueRow,
    fetch_each,
    read_kinds,
    read_outcome_counters,
    waiting_by_kind,
)
from fairturn.stores.transitions import to_summary
from fairturn.stores.values import (
    CODES,
    COMPLETED,
    DELAYED,
    DOCUMENT_COLUMNS,
    RUNNING,
    WAITING,
    Row,
    to_document,
)
from fairturn.validation.text import spellings

# Only of the last attempt: a claim with a higher fence makes older progress invalid.
_PROGRESS = "iif(d.progress_fence = d.fence, d.progress_done, NULL), d.progress_total"
_FROM = "FROM documents d JOIN customers c ON c.number = d.customer"
_READ = f"""
    SELECT {DOCUMENT_COLUMNS}, coalesce(d.body, b.body), r.result, r.content_name, r.size_bytes,
        r.sha256, {_PROGRESS}
    {_FROM} LEFT JOIN bodies b ON b.document = d.number LEFT JOIN results r ON r.document = d.number
    WHERE d.number = ?"""
_NUMBERED = f"SELECT {DOCUMENT_COLUMNS}, {_PROGRESS} {_FROM} WHERE d.number = ?"
_EXISTS = "SELECT count(*) FROM documents WHERE number = ?"
_HIGHEST = "SELECT max(number) FROM documents WHERE number < ?"
_CUSTOMER_NUMBER = "SELECT number FROM customers WHERE name = ?"
_NEWEST = (1 << 63) - 1
_NO_KIND = -1  # with `IN ()`, SQLite could not use the index that the statement names

_CUSTOMER_COLUMNS = """
    number, name, count, count_updated_at, delayed, stored_bytes, weight, running_max, paused,
    bytes_max"""
_CUSTOMERS = f"""
    SELECT {_CUSTOMER_COLUMNS} FROM customers WHERE name > ? ORDER BY name LIMIT ?"""
_CUSTOMER = f"SELECT {_CUSTOMER_COLUMNS} FROM customers WHERE name = ?"
_FLOWS = "SELECT level, waiting FROM flows WHERE customer = ?"
# In mode `equal` a flow has all priorities, so the customer's documents are counted.
_WAITING_BY_PRIORITY = f"""
    SELECT priority, count(*) FROM documents INDEXED BY documents_flow
    WHERE state = {WAITING} AND customer = ? GROUP BY priority"""
_RUNNING_NUMBERS = "SELECT j.value FROM leases l, json_each(l.documents) j"
_RUNNING_BY_CUSTOMER = f"""
    SELECT customer, count(*) FROM documents
    WHERE state = {RUNNING} AND number IN ({_RUNNING_NUMBERS}) GROUP BY customer"""
_RUNNING = "SELECT coalesce(sum(running), 0) FROM leases"
_RUNNING_BY_KIND = f"""
    SELECT kind, count(*) FROM documents
    WHERE state = {RUNNING} AND number IN ({_RUNNING_NUMBERS}) GROUP BY kind"""
# The waiting documents of a flow are after its claimed_to, or returned. The first of each, by
# documents_flow and documents_returned.
_OLDEST = f"""
    SELECT level % {BANDS_PER_KIND}, min(since) FROM (
        SELECT f.level AS level, (
            SELECT max(d.submitted_at, coalesce(d.due_at, 0))
            FROM documents d INDEXED BY documents_flow
            WHERE d.customer = f.customer AND d.level = f.level AND d.order_number > f.claimed_to
                AND d.state = {WAITING}
            ORDER BY d.order_number LIMIT 1) AS since
        FROM flows f WHERE f.waiting > 0
        UNION ALL
        SELECT d.level, max(d.submitted_at, coalesce(d.due_at, 0))
        FROM documents d INDEXED BY documents_returned
        WHERE d.returned = 1 AND d.state = {WAITING})
    WHERE since IS NOT NULL GROUP BY 1"""
# By documents_content, results_content and attempts_content.
_CONTENTS = """
    SELECT content_name, size_bytes, sha256 FROM documents WHERE content_name IS NOT NULL
    UNION ALL
    SELECT content_name, size_bytes, sha256 FROM results WHERE content_name IS NOT NULL"""
_CONTENTS_OF_STEPS = """
    SELECT content_name, size_bytes, sha256 FROM attempts WHERE content_name IS NOT NULL"""
_HAS_STEPS = "SELECT count(*) FROM sqlite_schema WHERE name = 'attempts'"


def find(
    connection: apsw.Connection,
    queue: QueueRow,
    filter: Filter,
    after: str | None,
    size: int,
    *,
    reach: int | None = None,
) -> Page:
    """Return one page of documents, newest first."""
    before = _NEWEST if after is None else ids.decode(after, queue.key)
    lowest = 1
    if reach is not None:  # count from an existing document: an epoch leaves a gap
        highest = connection.execute(_HIGHEST, (before,)).get
        lowest = max(1, (highest or 0) + 1 - reach)
    values: dict[str, Any] = {"before": before, "size": size + 1, "lowest": lowest}
    condition = _condition(connection, queue, filter, values)
    if filter.customer is not None and filter.ids is None and filter.states != (State.RUNNING,):
        numbers = _customer_numbers(condition)
    else:
        index, walked = _walk(filter)
        numbers = f"""
            SELECT d.number FROM documents d {index}
            WHERE d.number < :before AND d.number >= :lowest AND {walked} AND {condition}
            ORDER BY d.number DESC LIMIT :size"""
    rows = connection.execute(
        f"SELECT {DOCUMENT_COLUMNS}, {_PROGRESS} {_FROM} WHERE d.number IN ({numbers}) "
        "ORDER BY d.number DESC",
        values,
    ).fetchall()
    documents = [_document(row, queue.key) for row in rows[:size]]
    if len(rows) > size:
        return Page(documents, documents[-1].id)
    return Page(documents, ids.encode(lowest, queue.key) if lowest > 1 else None)


# Filters that compare a column with their value.
_COMPARISONS = {
    "name": "d.name = :name",
    "submitted_from": "d.submitted_at >= :submitted_from",
    "submitted_before": "d.submitted_at < :submitted_before",
}


def _condition(
    connection: apsw.Connection, queue: QueueRow, filter: Filter, values: dict[str, Any]
) -> str:
    """Return the filter as an SQL condition, and add its parameters to `values`."""
    conditions = ["1"]

    def where(condition: str, **bound: Any) -> None:
        conditions.append(condition)
        values.update(bound)

    def where_in(column: str, wanted: Iterable[Any]) -> None:
        bound = {f"{column}_{n}": value for n, value in enumerate(wanted)}
        where(f"d.{column} IN ({','.join(f':{name}' for name in bound)})", **bound)

    if filter.ids is not None:
        where_in("number", (ids.decode(id, queue.key) for id in filter.ids))
    if filter.customer is not None:
        number = connection.execute(_CUSTOMER_NUMBER, (filter.customer,)).get
        where("d.customer = :customer", customer=number)
    if filter.states is not None:
        where_in("state", (CODES[state] for state in filter.states))
    if filter.priorities is not None:
        where_in("priority", filter.priorities)
    if filter.kinds is not None:
        known = [kind.number for kind in read_kinds(connection, filter.kinds)]
        where_in("kind", known or [_NO_KIND])
    if filter.name_part is not None:
        # LIKE ignores the case of ASCII letters, in half the time of lower().
        parts = {f"part_{n}": _like(part) for n, part in enumerate(spellings(filter.name_part))}
        found = " OR ".join(f"d.name LIKE :{name} ESCAPE '\\'" for name in parts)
        where(f"({found})", **parts)
    for n, tag in enumerate(filter.tags or ()):
        has_tag = f"EXISTS (SELECT 1 FROM json_each(d.tags) WHERE value = :tag_{n})"
        where(has_tag, **{f"tag_{n}": tag})
    for name, comparison in _COMPARISONS.items():
        value = getattr(filter, name)
        if value is not None:
            where(comparison, **{name: value})
    return " AND ".join(conditions)


def _like(part: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", part) + "%"


def _walk(filter: Filter) -> tuple[str, str]:
    """Return the partial index on the states of the filter and a condition that SQLite can use it
    for; without such an index, nothing, to scan the table from the newest document down."""
    if filter.ids is not None or not filter.states:
        return "", "1"
    if all(state in FAILED for state in filter.states):
        return "INDEXED BY documents_failed", f"d.state > {COMPLETED}"  # the index's condition
    if filter.states == (State.DELAYED,):
        return "INDEXED BY documents_delayed", f"d.state = {DELAYED}"
    if filter.states == (State.RUNNING,):
        return "", f"d.number IN ({_RUNNING_NUMBERS})"
    return "", "1"


def _customer_numbers(condition: str) -> str:
    """Return a query for the newest documents of a customer. documents_flow has those of each band
    whose order is their number, documents_reordered the others. The bands are found one after the
    other in documents_flow."""
    return f"""
        WITH RECURSIVE bands (band) AS (
            SELECT min(level) FROM documents INDEXED BY documents_flow WHERE customer = :customer
            UNION ALL
            SELECT (
                SELECT min(level) FROM documents INDEXED BY documents_flow
                WHERE customer = :customer AND level > band)
            FROM bands WHERE band IS NOT NULL)
        SELECT number FROM (
            SELECT n.number FROM bands CROSS JOIN documents n ON n.number IN (
                SELECT d.number FROM documents d INDEXED BY documents_flow
                WHERE d.customer = :customer AND d.level = band AND d.order_number < :before
                    AND d.order_number >= :lowest AND d.order_number = d.number AND {condition}
                ORDER BY d.order_number DESC LIMIT :size)
            UNION ALL
            SELECT number FROM (
                SELECT d.number FROM documents d INDEXED BY documents_reordered
                WHERE d.customer = :customer AND d.order_number IS NOT d.number
                    AND d.number < :before AND d.number >= :lowest AND {condition}
                ORDER BY d.number DESC LIMIT :size))
        ORDER BY number DESC LIMIT :size"""


def read(connection: apsw.Connection, queue: QueueRow, id: str) -> Stored | None:
    """Return a document with its body and result."""
    row = connection.execute(_READ, (ids.decode(id, queue.key),)).fetchone()
    if row is None:
        return None
    body, result, name, size_bytes, sha256 = row[-7:-2]
    content = None if name is None else ContentRef(name, size_bytes, sha256)
    return Stored(_document(row, queue.key), body, result, content)


def attempts(
    connection: apsw.Connection, queue: QueueRow, id: str, *, values: bool
) -> list[AttemptRecord] | None:
    """Return the stored attempts of a document, oldest first; None for an unknown id."""
    number = ids.decode(id, queue.key)
    if number is None or not connection.execute(_EXISTS, (number,)).get:
        return None
    return read_attempts(connection, number, values=values)


def numbered(connection: apsw.Connection, key: IdKey, numbers: Iterable[int]) -> list[Document]:
    """Return the documents with these numbers, in this order; unknown numbers are skipped."""
    rows = fetch_each(connection, _NUMBERED, [(number,) for number in numbers])
    return [_document(row, key) for row in rows]


def _document(row: Row, key: IdKey) -> Document:
    """Convert a row that ends with `_PROGRESS`."""
    document = to_document(row, key)
    done, total = row[-2:]
    return document if done is None else document._replace(progress=Progress(done, total))


def customers(
    connection: apsw.Connection,
    queue: QueueRow,
    now: int,
    *,
    names: Sequence[str] | None,
    after: str | None,
    size: int,
) -> CustomerPage:
    """Return one page of customers, or those with these names."""
    if names is None:
        rows = connection.execute(_CUSTOMERS, (after or "", size + 1)).fetchall()
    else:
        wanted = [(name,) for name in sorted(set(names)) if after is None or name > after]
        rows = list(connection.executemany(_CUSTOMER, wanted)) if wanted else []
    running = dict(connection.execute(_RUNNING_BY_CUSTOMER))
    page = [_customer(connection, queue, now, row, running) for row in rows[:size]]
    return CustomerPage(page, page[-1].name if len(rows) > size else None)


def _customer(
    connection: apsw.Connection,
    queue: QueueRow,
    now: int,
    row: tuple[Any, ...],
    running: dict[int, int],
) -> Customer:
    number, name, count, updated_at, delayed, stored_bytes, weight, *settings = row
    limit, paused, bytes_max = settings
    waiting: Counter[int] = Counter()
    if queue.settings.mode is Mode.EQUAL:
        waiting.update(dict(connection.execute(_WAITING_BY_PRIORITY, (number,))))
    else:
        for band, n in connection.execute(_FLOWS, (number,)):
            waiting[level_in(band)] += n
    last = None if count is None else Count(count, updated_at)
    return Customer(
        name=name,
        settings=CustomerSettings(
            weight=weight / WEIGHT_ONE, limit=limit, paused=bool(paused), bytes_max=bytes_max
        ),
        count=queue.settings.rule.shown(last, now),
        count_updated_at_us=updated_at,
        waiting=sum(waiting.values()),
        waiting_by_priority=by_priority(waiting),
        running=running.get(number, 0),
        delayed=delayed,
        stored_bytes=stored_bytes,
    )


def summary(connection: apsw.Connection, queue: QueueRow) -> Summary:
    return to_summary(
        queue.waiting,
        delayed=queue.delayed,
        running=connection.execute(_RUNNING).get,
        started=queue.claims,
        outcome_counters=read_outcome_counters(connection),
        repairs=connection.execute(REPAIRS).get,
    )


def kinds(connection: apsw.Connection, queue: QueueRow) -> list[Kind]:
    """Return all kinds of work, ordered by name."""
    waiting = waiting_by_kind(connection, queue)
    running = dict(connection.execute(_RUNNING_BY_KIND))
    return [
        Kind(
            name=kind.name,
            settings=kind.settings,
            waiting=sum(waiting[kind.number]),
            running=running.get(kind.number, 0),
        )
        for kind in sorted(read_kinds(connection), key=lambda kind: kind.name)
    ]


def oldest_waiting(connection: apsw.Connection) -> Mapping[int, int]:
    """Return, by level, since when the oldest head of line has been waiting."""
    return dict(connection.execute(_OLDEST))


def contents(connection: apsw.Connection) -> Iterator[ContentRef]:
    """Yield every external content that a document, a result or a step refers to."""
    rows: Iterable[Row] = connection.execute(_CONTENTS)
    if connection.execute(_HAS_STEPS).get:  # not in a backup with an earlier schema
        rows = chain(rows, connection.execute(_CONTENTS_OF_STEPS))
    return map(ContentRef._make, rows)
