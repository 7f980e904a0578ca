"""Reading: documents, customers and numbers, each from one snapshot."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fairturn import ids
from fairturn.model import (
    FAILED,
    ContentRef,
    Customer,
    CustomerPage,
    CustomerSettings,
    Document,
    Filter,
    Page,
    Progress,
    State,
    Stored,
    Summary,
)
from fairturn.priority import LEVELS, Count
from fairturn.scheduling.flows import WEIGHT_ONE
from fairturn.stores.outcome_counters import Ends, to_summary
from fairturn.stores.postgres.rows import DOCUMENT_COLUMNS, NO_ORDER, QUEUE, QueueRow, to_queue
from fairturn.stores.postgres.session import BEGIN_SNAPSHOT, COMMIT, Session
from fairturn.stores.values import CODES, RUNNING, Row, SettingsCache, to_document
from fairturn.validation.text import spellings

# Of the last attempt; an older one's is forgotten by the claim that gave out a higher fence.
_PROGRESS = "CASE WHEN d.progress_fence = d.fence THEN d.progress END"
_FROM = "FROM fairturn.documents d JOIN fairturn.customers c ON c.number = d.customer"
_READ = f"""
    SELECT {DOCUMENT_COLUMNS}, d.body_text, d.body_bytes, r.result, r.content_name, r.size_bytes,
        r.sha256, {_PROGRESS}
    {_FROM} LEFT JOIN fairturn.results r ON r.document = d.number WHERE d.number = %s"""

# How many of a customer's documents of each priority wait: what arrived, less what claims have
# taken, and what others have moved. By the primary keys, and moved_customer.
_CUSTOMER_COLUMNS = """
    c.number, c.name, c.count, c.count_updated_at, c.weight, c.running_max, c.paused, ARRAY(
        SELECT a.n - (
                SELECT coalesce(sum(f.taken[a.priority]), 0) FROM fairturn.flows f
                WHERE f.customer = c.number) + (
                SELECT coalesce(sum(m.waiting), 0) FROM fairturn.moved m
                WHERE m.customer = c.number AND m.priority = a.priority)
        FROM unnest(c.arrived) WITH ORDINALITY AS a(n, priority)
        ORDER BY a.priority)::bigint[], (
        SELECT count(*) FROM fairturn.documents d
        WHERE d.customer = c.number AND d.delayed_until IS NOT NULL)"""
_CUSTOMERS = f"""
    SELECT {_CUSTOMER_COLUMNS} FROM fairturn.customers c
    WHERE c.name > %s ORDER BY c.name LIMIT %s"""
_NAMED = f"""
    SELECT {_CUSTOMER_COLUMNS} FROM fairturn.customers c
    WHERE c.name = ANY (%s) AND c.name > %s ORDER BY c.name LIMIT %s"""
_RUNNING_NUMBERS = "SELECT unnest(l.documents) FROM fairturn.leases l"
_RUNNING_BY_CUSTOMER = f"""
    SELECT d.customer, count(*)
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE d.state = {RUNNING} AND d.fence = l.fence GROUP BY d.customer"""
_SUMMARY = f"""
    SELECT ARRAY[{", ".join(f"sum(arrived[{n}])" for n in range(1, LEVELS + 1))}]::bigint[],
        sum(delayed)::bigint
    FROM fairturn.totals"""
_TAKEN = """
    SELECT taken, promoted, (SELECT coalesce(sum(running), 0)::bigint FROM fairturn.leases), claims,
        (SELECT ARRAY[sum(attempts), sum(retried), sum(dead), sum(cancelled)]::bigint[]
            FROM fairturn.ends), repairs
    FROM fairturn.turns ORDER BY version DESC LIMIT 1"""
_MOVED = """
    SELECT priority, sum(waiting), sum(delayed) FROM fairturn.moved GROUP BY priority"""


def queue_row(session: Session, cache: SettingsCache) -> QueueRow:
    """The queue's row, which is there since the queue was made."""
    (row,) = session.fetch(QUEUE)
    return to_queue(row, cache)


_NUMBERED = f"SELECT {DOCUMENT_COLUMNS}, {_PROGRESS} {_FROM} WHERE d.number = ANY (%s::int8[])"
_HIGHEST = "SELECT max(number) FROM fairturn.documents WHERE number < %s"


def find(
    session: Session,
    key: int,
    filter: Filter,
    after: str | None,
    size: int,
    *,
    reach: int | None = None,
) -> Page:
    """One page of documents, the newest first."""
    before = NO_ORDER if after is None else ids.decode(after, key)
    lowest = 1 if reach is None else _lowest(session, before, reach)
    values: dict[str, Any] = {
        "before": before,
        "lowest": lowest,
        "size": size + 1,
    }
    condition = " AND ".join(_conditions(filter, key, values)) or "true"
    if filter.customer is None or filter.ids is not None or filter.states in _FOUND_BY_STATE:
        chosen = f"d.number < %(before)s AND d.number >= %(lowest)s AND {condition}"
    else:
        chosen = f"d.number = ANY (ARRAY({_its_numbers(condition)}))"
    rows = session.fetch(
        f"SELECT {DOCUMENT_COLUMNS}, {_PROGRESS} {_FROM} WHERE {chosen} "
        "ORDER BY d.number DESC LIMIT %(size)s",
        values,
    )
    documents = [_document(row, key) for row in rows[:size]]
    if len(rows) > size:
        return Page(documents, documents[-1].id)
    return Page(documents, ids.encode(lowest, key) if lowest > 1 else None)


def _lowest(session: Session, before: int | None, reach: int) -> int:
    """How far down to look, from the next document on: an epoch leaves a gap before its first."""
    ((highest,),) = session.fetch(_HIGHEST, (before,))
    return max(1, (highest or 0) + 1 - reach)


def _conditions(filter: Filter, key: int, values: dict[str, Any]) -> Iterable[str]:
    """What the filter asks for, in words that an index can be used for: documents_flow,
    documents_failed, documents_delayed, the leases, or the table from the newest down. What is
    bound in it is added to the values."""
    if filter.ids is not None:
        values["ids"] = [n for id in filter.ids if (n := ids.decode(id, key)) is not None]
        yield "d.number = ANY (%(ids)s)"
    if filter.customer is not None:
        values["customer"] = filter.customer
        yield "d.customer = (SELECT number FROM fairturn.customers WHERE name = %(customer)s)"
    if filter.states is not None:
        if filter.states and all(s in FAILED for s in filter.states):
            yield "d.failed"
        if filter.states == (State.DELAYED,):
            yield "d.delayed_until IS NOT NULL"
        if filter.states == (State.RUNNING,):
            yield f"d.number IN ({_RUNNING_NUMBERS})"
        values["states"] = [CODES[state] for state in filter.states]
        yield "d.state = ANY (%(states)s::smallint[])"
    if filter.priorities is not None:
        values["priorities"] = list(filter.priorities)
        yield "d.priority = ANY (%(priorities)s::smallint[])"
    if filter.name is not None:
        values["name"] = filter.name
        yield "d.name = %(name)s"
    if filter.name_part is not None:
        parts = {f"part_{n}": part for n, part in enumerate(spellings(filter.name_part))}
        values.update(parts)
        found = (f'strpos(lower(d.name COLLATE "C"), %({part})s) > 0' for part in parts)
        yield f"({' OR '.join(found)})"
    if filter.submitted_from is not None:
        values["submitted_from"] = filter.submitted_from
        yield "d.submitted_at >= %(submitted_from)s"
    if filter.submitted_before is not None:
        values["submitted_before"] = filter.submitted_before
        yield "d.submitted_at < %(submitted_before)s"


# Few documents run or are delayed: they are looked at one by one, whoever's they are.
_FOUND_BY_STATE = ((State.RUNNING,), (State.DELAYED,))


def _its_numbers(condition: str) -> str:
    """The newest documents of a customer: by documents_flow those whose order is their number, of
    each level, and by documents_reordered the others; then the newest of all these."""
    parts = [
        f"""(SELECT d.number FROM fairturn.documents d
        WHERE d.level = {level} AND d.order_number < %(before)s AND d.order_number >= %(lowest)s
            AND d.order_number = d.number AND {condition}
        ORDER BY d.order_number DESC LIMIT %(size)s)"""
        for level in range(LEVELS + 1)
    ]
    parts.append(
        f"""(SELECT d.number FROM fairturn.documents d
        WHERE d.order_number IS DISTINCT FROM d.number AND d.number < %(before)s
            AND d.number >= %(lowest)s AND {condition}
        ORDER BY d.number DESC LIMIT %(size)s)"""
    )
    return f"{' UNION ALL '.join(parts)} ORDER BY number DESC LIMIT %(size)s"


def read(session: Session, key: int, id: str) -> Stored | None:
    """A document with its body and its result."""
    number = ids.decode(id, key)
    rows = session.fetch(_READ, (number,)) if number is not None else []
    if not rows:
        return None
    (row,) = rows
    body_text, body_bytes, result, name, size_bytes, sha256 = row[-7:-1]
    content = None if name is None else ContentRef(name, size_bytes, sha256)
    body = body_text if body_bytes is None else body_bytes
    return Stored(_document(row, key), body, result, content)


def numbered(session: Session, key: int, numbers: Sequence[int]) -> list[Document]:
    """The documents of these numbers, in this order, without those that do not exist."""
    found = {row[0]: row for row in session.fetch(_NUMBERED, (list(numbers),))}
    return [_document(found[number], key) for number in numbers if number in found]


def _document(row: Row, key: int) -> Document:
    """A row that ends with its progress as a document."""
    document = to_document(row, key)
    told = row[-1]
    return document if told is None else document._replace(progress=Progress(*json.loads(told)))


def customers(
    session: Session,
    queue: QueueRow,
    now: int,
    *,
    names: Sequence[str] | None,
    after: str | None,
    size: int,
) -> CustomerPage:
    """One page of customers, or those of these names that exist."""
    if names is None:
        rows = session.fetch(_CUSTOMERS, (after or "", size + 1))
    else:
        rows = session.fetch(_NAMED, (list(names), after or "", size + 1))
    page = rows[:size]
    running: dict[int, int] = dict(session.fetch(_RUNNING_BY_CUSTOMER))
    found = [_customer(queue, now, row, running) for row in page]
    return CustomerPage(found, found[-1].name if len(rows) > size else None)


def _customer(queue: QueueRow, now: int, row: Row, running: dict[int, int]) -> Customer:
    number, name, count, updated_at, weight, limit, paused, waiting, delayed = row
    last = None if count is None else Count(count, updated_at)
    return Customer(
        name=name,
        settings=CustomerSettings(weight=weight / WEIGHT_ONE, limit=limit, paused=paused),
        count=queue.settings.rule.shown(last, now),
        count_updated_at=updated_at,
        waiting=sum(waiting),
        waiting_by_priority=tuple(waiting),
        running=running.get(number, 0),
        delayed=delayed,
    )


def summary(session: Session, *, alone: bool = False) -> Summary:
    """The whole queue in a few numbers; `alone`: in a snapshot of its own, and one round trip."""
    with session.together():
        if alone:
            session.ask(BEGIN_SNAPSHOT)
        arrived = session.ask(_SUMMARY)
        taken = session.ask(_TAKEN)
        moved = session.ask(_MOVED)
        if alone:
            session.ask(COMMIT)
    ((waiting, delayed),) = arrived.fetchall()
    ((gone, promoted, running, started, ended, repairs),) = taken.fetchall()
    delayed -= promoted
    waiting = [n - t for n, t in zip(waiting, gone, strict=True)]
    for priority, more, more_delayed in moved.fetchall():
        waiting[priority - 1] += more
        delayed += more_delayed
    return to_summary(
        tuple(map(int, waiting)),
        delayed=int(delayed),
        running=running,
        started=started,
        ends=Ends(*ended),
        repairs=repairs,
    )
