"""Reading: documents, customers and numbers, each from one snapshot."""

from collections.abc import Sequence
from typing import Any

import apsw

from fairturn import ids
from fairturn.flows import WEIGHT_ONE, Mode
from fairturn.model import (
    ContentRef,
    Customer,
    CustomerPage,
    CustomerSettings,
    Filter,
    Page,
    State,
    Stored,
    Summary,
    by_priority,
)
from fairturn.priority import Count
from fairturn.stores.sqlite.rows import (
    CODES,
    DOCUMENT_COLUMNS,
    RUNNING,
    WAITING,
    QueueRow,
    to_document,
)

_FROM = "FROM documents d JOIN customers c ON c.number = d.customer"
_READ = f"""
    SELECT {DOCUMENT_COLUMNS}, coalesce(d.body, b.body), r.result, r.content_name, r.size_bytes,
        r.sha256
    {_FROM} LEFT JOIN bodies b ON b.document = d.number LEFT JOIN results r ON r.document = d.number
    WHERE d.number = ?"""
_CUSTOMER_NUMBER = "SELECT number FROM customers WHERE name = ?"

_CUSTOMER_COLUMNS = "number, name, count, count_updated_at, delayed, weight, running_max, paused"
_CUSTOMERS = f"""
    SELECT {_CUSTOMER_COLUMNS} FROM customers WHERE name > ? ORDER BY name LIMIT ?"""
_CUSTOMER = f"SELECT {_CUSTOMER_COLUMNS} FROM customers WHERE name = ?"
_FLOWS = "SELECT level, waiting FROM flows WHERE customer = ?"
# In mode `equal` flows do not tell priorities apart: the customer's waiting documents do.
_WAITING_BY_PRIORITY = f"""
    SELECT priority, count(*) FROM documents INDEXED BY documents_customer
    WHERE state = {WAITING} AND customer = ? GROUP BY priority"""
_RUNNING_NUMBERS = "SELECT j.value FROM leases l, json_each(l.documents) j"
_RUNNING_BY_CUSTOMER = f"""
    SELECT customer, count(*) FROM documents
    WHERE state = {RUNNING} AND number IN ({_RUNNING_NUMBERS}) GROUP BY customer"""
_LEVELS = "SELECT level, waiting FROM levels"
_RUNNING = "SELECT coalesce(sum(running), 0) FROM leases"


def find(
    connection: apsw.Connection, queue: QueueRow, filter: Filter, after: str | None, size: int
) -> Page:
    """One page of documents, the newest first."""
    conditions: list[str] = []
    values: list[Any] = []

    def where(condition: str, *bound: Any) -> None:
        conditions.append(condition)
        values.extend(bound)

    index = ""
    if after is not None:
        where("d.number < ?", ids.decode(after, queue.key))
    if filter.ids is not None:
        numbers = [ids.decode(id, queue.key) for id in filter.ids]
        where(f"d.number IN ({','.join('?' * len(numbers))})", *numbers)
    if filter.customer is not None:
        index = "INDEXED BY documents_customer"
        where("d.customer = ?", connection.execute(_CUSTOMER_NUMBER, (filter.customer,)).get)
    if filter.states is not None:
        codes = ",".join(str(CODES[state]) for state in filter.states)
        where(f"d.state IN ({codes})")
        if not index:
            index, condition = _walk(filter.states)
            where(condition)
    if filter.priorities is not None:
        where(f"d.priority IN ({','.join('?' * len(filter.priorities))})", *filter.priorities)
    if filter.name is not None:
        where("d.name = ?", filter.name)
    if filter.submitted_from is not None:
        where("d.submitted_at >= ?", filter.submitted_from)
    if filter.submitted_before is not None:
        where("d.submitted_at < ?", filter.submitted_before)
    if filter.ids is not None:
        index = ""
    source = f"FROM documents d {index} JOIN customers c ON c.number = d.customer"
    condition = " AND ".join(conditions) or "1"
    rows = connection.execute(
        f"SELECT {DOCUMENT_COLUMNS} {source} WHERE {condition} ORDER BY d.number DESC LIMIT ?",
        (*values, size + 1),
    ).fetchall()
    documents = [to_document(row, queue.key) for row in rows[:size]]
    return Page(documents, documents[-1].id if len(rows) > size else None)


def _walk(states: tuple[State, ...]) -> tuple[str, str]:
    """The index that lists these states, in words that it can be used for; and where there is
    none, the table from the newest document down."""
    if states and all(state in (State.DEAD, State.CANCELLED) for state in states):
        return "INDEXED BY documents_failed", "d.state > 3"
    if states == (State.DELAYED,):
        return "INDEXED BY documents_delayed", "d.state = 0"
    if states == (State.RUNNING,):
        return "", f"d.number IN ({_RUNNING_NUMBERS})"
    return "", "1"


def read(connection: apsw.Connection, queue: QueueRow, id: str) -> Stored | None:
    """A document with its body and its result."""
    row = connection.execute(_READ, (ids.decode(id, queue.key),)).fetchone()
    if row is None:
        return None
    body, result, name, size_bytes, sha256 = row[-5:]
    content = None if name is None else ContentRef(name, size_bytes, sha256)
    return Stored(to_document(row, queue.key), body, result, content)


def customers(
    connection: apsw.Connection,
    queue: QueueRow,
    now: int,
    *,
    names: Sequence[str] | None,
    after: str | None,
    size: int,
) -> CustomerPage:
    """One page of customers, or those of these names that exist."""
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
    number, name, count, updated_at, delayed, weight, limit, paused = row
    if queue.settings.mode is Mode.EQUAL:
        waiting = dict(connection.execute(_WAITING_BY_PRIORITY, (number,)))
    else:
        waiting = dict(connection.execute(_FLOWS, (number,)))
    last = None if count is None else Count(count, updated_at)
    return Customer(
        name=name,
        settings=CustomerSettings(weight=weight / WEIGHT_ONE, limit=limit, paused=bool(paused)),
        count=queue.settings.rule.shown(last, now),
        count_updated_at=updated_at,
        waiting=sum(waiting.values()),
        waiting_by_priority=by_priority(waiting),
        running=running.get(number, 0),
        delayed=delayed,
    )


def summary(connection: apsw.Connection, queue: QueueRow) -> Summary:
    """The whole queue in a few numbers."""
    return Summary(
        waiting_by_priority=by_priority(dict(connection.execute(_LEVELS))),
        delayed=queue.delayed,
        running=connection.execute(_RUNNING).get,
    )
