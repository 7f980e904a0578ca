"""Queries: documents, customers and the summary, each from one snapshot."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fairturn.model import (
    FAILED,
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
)
from fairturn.priority import LEVELS, Count
from fairturn.scheduling.flows import BANDS_PER_KIND, DEFAULT_KIND, WEIGHT_ONE
from fairturn.stores import ids
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres.rows import (
    DOCUMENT_COLUMNS,
    KIND_SETTINGS,
    NO_ORDER,
    QUEUE,
    PostgresQueueRow,
    to_kind_settings,
    to_queue,
)
from fairturn.stores.postgres.session import BEGIN_SNAPSHOT, COMMIT, Session
from fairturn.stores.transitions import OUTCOME_COLUMNS, OutcomeCounters, to_summary
from fairturn.stores.values import CODES, RUNNING, Row, SettingsCache, to_document
from fairturn.validation.text import spellings

# Of the last attempt: the progress of an earlier one has a lower fence.
_PROGRESS = "CASE WHEN d.progress_fence = d.fence THEN d.progress END"
_FROM = "FROM fairturn.documents d JOIN fairturn.customers c ON c.number = d.customer"
_READ = f"""
    SELECT {DOCUMENT_COLUMNS}, d.body_text, d.body_bytes, r.result, r.content_name, r.size_bytes,
        r.sha256, {_PROGRESS}
    {_FROM} LEFT JOIN fairturn.results r ON r.document = d.number WHERE d.number = %s"""

# The waiting documents of a customer by priority: arrivals, less those taken by claims, plus the
# changes of other operations. By the primary keys, and counter_changes_customer.
_CUSTOMER_COLUMNS = """
    c.number, c.name, c.count, c.count_updated_at, c.weight, c.running_max, c.paused, c.bytes_max,
    (c.stored_bytes - (
        SELECT coalesce(sum(r.bytes), 0) FROM fairturn.released_bytes r
        WHERE r.customer = c.number))::bigint, ARRAY(
        SELECT a.n - (
                SELECT coalesce(sum(f.taken[a.priority]), 0) FROM fairturn.flows f
                WHERE f.customer = c.number) + (
                SELECT coalesce(sum(m.waiting), 0) FROM fairturn.counter_changes m
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
    FROM fairturn.arrival_counters"""
_TAKEN = f"""
    SELECT taken, promoted, (SELECT coalesce(sum(running), 0)::bigint FROM fairturn.leases), claims,
        (SELECT ARRAY[{", ".join(f"sum({column})" for column in OUTCOME_COLUMNS)}]::bigint[]
            FROM fairturn.outcome_counters), repairs
    FROM fairturn.scheduler_states ORDER BY version DESC LIMIT 1"""
_CHANGES = """
    SELECT priority, sum(waiting), sum(delayed) FROM fairturn.counter_changes GROUP BY priority"""


_KINDS = f"SELECT number, name, {KIND_SETTINGS} FROM fairturn.kinds ORDER BY name"
_RUNNING_BY_KIND = f"""
    SELECT d.kind, count(*)
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE d.state = {RUNNING} AND d.fence = l.fence GROUP BY d.kind"""
# The waiting documents of the kinds other than the default one by priority, as of customers.
_WAITING_BY_KIND = f"""
    SELECT s.kind, ARRAY(
        SELECT coalesce(a.n, 0) - t.n + coalesce(m.n, 0)
        FROM unnest(s.taken) WITH ORDINALITY AS t(n, priority)
            LEFT JOIN (
                SELECT u.priority, sum(u.n) AS n
                FROM fairturn.kind_arrivals a
                    CROSS JOIN LATERAL unnest(a.arrived) WITH ORDINALITY AS u(n, priority)
                WHERE a.kind = s.kind GROUP BY u.priority) a ON a.priority = t.priority
            LEFT JOIN (
                SELECT c.priority, sum(c.waiting) AS n FROM fairturn.counter_changes c
                WHERE c.kind = s.kind GROUP BY c.priority) m ON m.priority = t.priority
        ORDER BY t.priority)::bigint[]
    FROM fairturn.states_of_kinds() s WHERE s.kind <> {DEFAULT_KIND}"""


def queue_row(session: Session, cache: SettingsCache) -> PostgresQueueRow:
    (row,) = session.fetch(QUEUE)
    return to_queue(row, cache)


_NUMBERED = f"SELECT {DOCUMENT_COLUMNS}, {_PROGRESS} {_FROM} WHERE d.number = ANY (%s::int8[])"
_HIGHEST = "SELECT max(number) FROM fairturn.documents WHERE number < %s"


def find(
    session: Session,
    key: IdKey,
    filter: Filter,
    after: str | None,
    size: int,
    *,
    reach: int | None = None,
) -> Page:
    """Return one page of documents, the newest first."""
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
        chosen = f"d.number = ANY (ARRAY({_newest_of_customer(condition, filter.kinds)}))"
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
    """Return the lowest number within `reach`, counted from the next existing document: an epoch
    leaves a gap before its first number."""
    ((highest,),) = session.fetch(_HIGHEST, (before,))
    return max(1, (highest or 0) + 1 - reach)


# Filters that compare a column with their value.
_COMPARISONS = {
    "name": "d.name = %(name)s",
    "submitted_from": "d.submitted_at >= %(submitted_from)s",
    "submitted_before": "d.submitted_at < %(submitted_before)s",
}


def _conditions(filter: Filter, key: IdKey, values: dict[str, Any]) -> Iterable[str]:
    """Yield the filter's conditions, and add their parameters to `values`. An index supports each
    query: documents_flow, documents_failed, documents_delayed, leases, or the primary key."""
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
    if filter.kinds is not None:
        values["kinds"] = list(filter.kinds)
        yield f"d.kind = ANY ({_KINDS_OF_FILTER})"
    if filter.name_part is not None:
        parts = {f"part_{n}": part for n, part in enumerate(spellings(filter.name_part))}
        values.update(parts)
        found = (f'strpos(lower(d.name COLLATE "C"), %({part})s) > 0' for part in parts)
        yield f"({' OR '.join(found)})"
    if filter.tags is not None:
        values["tags"] = json.dumps(filter.tags)
        yield "d.tags::jsonb @> %(tags)s::jsonb"
    for name, comparison in _COMPARISONS.items():
        value = getattr(filter, name)
        if value is not None:
            values[name] = value
            yield comparison


_KINDS_OF_FILTER = "ARRAY(SELECT k.number FROM fairturn.kinds k WHERE k.name = ANY (%(kinds)s))"
# The bands in which the customer has documents, one after the other by documents_flow.
_BANDS_OF_CUSTOMER = """
    WITH RECURSIVE owner AS (SELECT number FROM fairturn.customers WHERE name = %(customer)s),
    bands AS (
        (SELECT d.level AS band FROM fairturn.documents d
        WHERE d.customer = (SELECT number FROM owner) ORDER BY d.customer, d.level LIMIT 1)
        UNION ALL
        SELECT n.level FROM bands b CROSS JOIN LATERAL (
            SELECT d.level FROM fairturn.documents d
            WHERE d.customer = (SELECT number FROM owner) AND d.level > b.band
            ORDER BY d.customer, d.level LIMIT 1) n)"""
# Few documents are running or delayed: those of all customers are read and filtered.
_FOUND_BY_STATE = ((State.RUNNING,), (State.DELAYED,))


def _newest_of_customer(condition: str, kinds: Sequence[str] | None = None) -> str:
    """Return a query for the newest documents of a customer: of each band by documents_flow if the
    order is the number, the others by documents_reordered."""
    of_kinds = f"WHERE b.band / {BANDS_PER_KIND} = ANY ({_KINDS_OF_FILTER})"
    return f"""
        {_BANDS_OF_CUSTOMER}
        SELECT number FROM (
            SELECT f.number FROM bands b CROSS JOIN LATERAL (
                SELECT d.number FROM fairturn.documents d
                WHERE d.level = b.band AND d.order_number < %(before)s
                    AND d.order_number >= %(lowest)s AND d.order_number = d.number AND {condition}
                ORDER BY d.customer DESC, d.level DESC, d.order_number DESC LIMIT %(size)s) f
            {"" if kinds is None else of_kinds}
            UNION ALL (
                SELECT d.number FROM fairturn.documents d
                WHERE d.order_number IS DISTINCT FROM d.number AND d.number < %(before)s
                    AND d.number >= %(lowest)s AND {condition}
                ORDER BY d.number DESC LIMIT %(size)s)) f
        ORDER BY number DESC LIMIT %(size)s"""


def read(session: Session, key: IdKey, id: str) -> Stored | None:
    """Return a document with its body and its result."""
    number = ids.decode(id, key)
    rows = session.fetch(_READ, (number,)) if number is not None else []
    if not rows:
        return None
    (row,) = rows
    body_text, body_bytes, result, name, size_bytes, sha256 = row[-7:-1]
    content = None if name is None else ContentRef(name, size_bytes, sha256)
    body = body_text if body_bytes is None else body_bytes
    return Stored(_document(row, key), body, result, content)


def numbered(session: Session, key: IdKey, numbers: Sequence[int]) -> list[Document]:
    """Return the documents with these numbers, in this order, without those that do not exist."""
    found = {row[0]: row for row in session.fetch(_NUMBERED, (list(numbers),))}
    return [_document(found[number], key) for number in numbers if number in found]


def _document(row: Row, key: IdKey) -> Document:
    """Convert a row whose last column is the progress."""
    document = to_document(row, key)
    progress = row[-1]
    if progress is None:
        return document
    return document._replace(progress=Progress(*json.loads(progress)))


def customers(
    session: Session,
    queue: PostgresQueueRow,
    now: int,
    *,
    names: Sequence[str] | None,
    after: str | None,
    size: int,
) -> CustomerPage:
    """Return one page of customers, by name."""
    if names is None:
        rows = session.fetch(_CUSTOMERS, (after or "", size + 1))
    else:
        rows = session.fetch(_NAMED, (list(names), after or "", size + 1))
    page = rows[:size]
    running: dict[int, int] = dict(session.fetch(_RUNNING_BY_CUSTOMER))
    found = [_customer(queue, now, row, running) for row in page]
    return CustomerPage(found, found[-1].name if len(rows) > size else None)


def _customer(queue: PostgresQueueRow, now: int, row: Row, running: dict[int, int]) -> Customer:
    number, name, count, updated_at, weight, limit, paused, bytes_max, stored_bytes, *rest = row
    waiting, delayed = rest
    last = None if count is None else Count(count, updated_at)
    return Customer(
        name=name,
        settings=CustomerSettings(
            weight=weight / WEIGHT_ONE, limit=limit, paused=paused, bytes_max=bytes_max
        ),
        count=queue.settings.rule.shown(last, now),
        count_updated_at_us=updated_at,
        waiting=sum(waiting),
        waiting_by_priority=tuple(waiting),
        running=running.get(number, 0),
        delayed=delayed,
        stored_bytes=stored_bytes,
    )


def summary(session: Session, *, alone: bool = False) -> Summary:
    """Return the summary of the queue; with `alone`, in a snapshot of its own and one round
    trip."""
    with session.together():
        if alone:
            session.ask(BEGIN_SNAPSHOT)
        arrived = session.ask(_SUMMARY)
        taken = session.ask(_TAKEN)
        changes = session.ask(_CHANGES)
        if alone:
            session.ask(COMMIT)
    ((waiting, delayed),) = arrived.fetchall()
    ((claimed, promoted, running, started, ended, repairs),) = taken.fetchall()
    delayed -= promoted
    waiting = [n - t for n, t in zip(waiting, claimed, strict=True)]
    for priority, more, more_delayed in changes.fetchall():
        waiting[priority - 1] += more
        delayed += more_delayed
    return to_summary(
        tuple(map(int, waiting)),
        delayed=int(delayed),
        running=running,
        started=started,
        outcome_counters=OutcomeCounters(*ended),
        repairs=repairs,
    )


def kinds(session: Session) -> list[Kind]:
    """Return all kinds of work, by name."""
    waiting = waiting_by_kind(session)
    running: dict[int, int] = dict(session.fetch(_RUNNING_BY_KIND))
    return [
        Kind(
            name=name,
            settings=to_kind_settings(tuple(settings)),
            waiting=sum(waiting[number]),
            running=running.get(number, 0),
        )
        for number, name, *settings in session.fetch(_KINDS)
    ]


def waiting_by_kind(session: Session) -> dict[int, Sequence[int]]:
    """Return the numbers of waiting documents of priorities 1 to 9, by kind. The default kind has
    those that no other kind has."""
    waiting: dict[int, Sequence[int]] = dict(session.fetch(_WAITING_BY_KIND))
    rest = summary(session).waiting_by_priority
    for others in waiting.values():
        rest = tuple(n - m for n, m in zip(rest, others, strict=True))
    return {**waiting, DEFAULT_KIND: rest}
