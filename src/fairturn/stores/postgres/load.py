"""Bulk load of a queue from another database into a new schema, in one transaction."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from psycopg.types.json import Jsonb

from fairturn.errors import StoreRefused
from fairturn.model import FAILED, BodyType, NewDocument, Settings
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import DEFAULT_KIND, band_of
from fairturn.scheduling.outages import ServiceState
from fairturn.stores.postgres.rows import MAY_EXPIRE, settings_columns
from fairturn.stores.postgres.session import BEGIN, LOCK_SETTINGS, Session
from fairturn.stores.transfer import SUBMITTED, ExportedDocument, ExportedQueue
from fairturn.stores.transitions import OUTCOME_COLUMNS
from fairturn.stores.values import DELAYED, STATES, Row, encode_events

_PROGRESS_EVERY = 1_000  # rows

# A used queue may have no documents: they can all be pruned.
_IS_NEW = """
    SELECT NOT EXISTS (SELECT 1 FROM fairturn.customers)
        AND NOT EXISTS (SELECT 1 FROM fairturn.access_keys)
        AND NOT EXISTS (SELECT 1 FROM fairturn.kinds WHERE number > 0)
        AND NOT (SELECT is_called FROM fairturn.document_numbers)"""
_CUSTOMERS = (
    "number, name, count, count_updated_at, weight, running_max, bytes_max, stored_bytes, paused, "
    "submitted, arrived",
    ("int8", "text", "int8", "int8", "int4", "int4", "int8", "int8", "bool", "int8", "int8[]"),
)
_CUSTOMER_STATES = (
    "customer, weight, running_max, paused, recent_costs, costs_by_kind",
    ("int8", "int4", "int4", "bool", "int8[]", "jsonb"),
)
_FLOWS = (
    "customer, level, place, tick, folded, running, taken, claimed_to, head_order, head_since, "
    "held",
    ("int8", "int2", *["int8"] * 4, "int8[]", *["int8"] * 3, "bool"),
)
_EVENTS = ("at, customers, events", ("int8", "int8[]", "text"))
# Columns of `documents` that are neither 8-byte integers nor text.
_DOCUMENT_TYPES = {
    **dict.fromkeys(("returned", "failed", "cancel_requested"), "bool"),
    **dict.fromkeys(("level", "priority", "state", "kind"), "int2"),
    **dict.fromkeys(("sha256", "body_bytes"), "bytea"),
    **dict.fromkeys(("attempts", "step", "snoozes"), "int4"),
}
_ANNOTATIONS = NewDocument.__annotations__ | ExportedDocument.__annotations__
_TEXTS = {name for name, type in _ANNOTATIONS.items() if type in (str, str | None, BodyType)}
_CHILDREN = ("parent, made", ("int8", "int4"))
_RESULTS = (
    "document, result, content_name, size_bytes, sha256",
    ("int8", "text", "text", "int8", "bytea"),
)
_ATTEMPTS = (
    "document, number, kind, step, attempt, worker, claimed_at, ended_at, outcome, error, details, "
    "content_name, size_bytes, sha256, value",
    (
        *("int8", "int4", "int2", "int4", "int4", "text", "int8", "int8", "int2", "text"),
        *("text", "text", "int8", "bytea", "text"),
    ),
)
_CHECKPOINTS = ("document, value", ("int8", "text"))
_EXPIRATIONS = f"""
    INSERT INTO fairturn.expirations (expires_at, document)
    SELECT d.expires_at, d.number FROM fairturn.documents d
    WHERE d.expires_at IS NOT NULL AND {MAY_EXPIRE}"""
_KEYS = (
    "customer, key, digest, document, count, priority, submitted_at",
    ("int8", "text", "bytea", "int8", "int8", "int2", "int8"),
)
_WORKERS = ("name, seen_at, slots, kinds", ("text", "int8", "int8", "text[]"))
_NINE = "int8[]"  # a value for each level or priority
_KINDS = (
    "number, name, running_max, paused, attempts_max, expires_in_us",
    ("int2", "text", "int4", "bool", "int4", "int8"),
)
_KIND_SERVICES = ("kind, service", ("int2", "text"))
_OUTAGES = (
    f"service, {', '.join(ServiceState._fields)}",
    ("text", "int8", "int8", "int8", "text", *["int8"] * 3, "bool", *["int8"] * 4),
)
_KIND_STATES = (
    "kind, version, since_patience, clocks, weights, kind_times, last_claims",
    ("int2", "int8", "int8", _NINE, _NINE, _NINE, _NINE),
)
_KIND_ARRIVALS = ("kind, shard, arrived", ("int2", "int4", _NINE))
_ACCESS_KEYS = (
    "id, role, customer, name, digest, made_at, used_at, ends_at",
    ("text", "text", "text", "text", "bytea", "int8", "int8", "int8"),
)
_LIMITED = "INSERT INTO fairturn.limited_customers (customer) SELECT unnest(%s::bigint[])"
SETTINGS = """
    UPDATE fairturn.queue SET settings_version = settings_version + 1, settings = %s, depths = %s,
        reset_interval = %s, periodic = %s, one_level = %s, waiting_max = %s,
        waiting_per_customer_max = %s, mode = %s, costs = %s, patience = %s, attempts_max = %s,
        bytes_per_customer_max = %s"""
_KEY = "UPDATE fairturn.queue SET id_secret = %s, id_key = %s, ids_from = %s"
_NUMBERS = """
    SELECT setval('fairturn.document_numbers', %s, false),
        setval('fairturn.customer_numbers', %s, false)"""
_TOTALS = """
    UPDATE fairturn.arrival_counters SET arrived = %s::bigint[], delayed = %s, changes = changes + 1
    WHERE shard = 0"""
_OUTCOME_COUNTERS = "UPDATE fairturn.outcome_counters SET " + ", ".join(
    f"{column} = %s" for column in OUTCOME_COLUMNS
)
_TURNS = """
    WITH old AS (DELETE FROM fairturn.scheduler_states RETURNING version)
    INSERT INTO fairturn.scheduler_states (version, claims, fence, tick, level_times,
        since_patience, clocks, weights, kind_times, last_claims, taken)
    SELECT max(version) + 1, %s, %s, %s, %s::bigint[], ARRAY[%s::bigint], %s::bigint[],
        %s::bigint[], %s::bigint[], %s::bigint[], array_fill(0::bigint, ARRAY[9])
    FROM old"""
_DELETE_DEFAULT_KIND = f"DELETE FROM fairturn.kinds WHERE number = {DEFAULT_KIND}"
_REQUIRE_SCHEMA = "SELECT fairturn.require_schema_in_use()"

LoadProgress = Callable[[int, int], None]  # called with the rows done, and all


def load(session: Session, name: str, exported: ExportedQueue, progress: LoadProgress) -> None:
    """Load all rows into a new queue, in one transaction."""
    session.ask(BEGIN)
    lock_new(session, name)
    loading = _Loading(session, exported, progress)
    session.ask(_DELETE_DEFAULT_KIND)
    loading.copy("kinds", _KINDS, map(_kind, exported.kinds))
    loading.copy("kind_services", _KIND_SERVICES, exported.kind_services)
    loading.copy("outages", _OUTAGES, map(_outage, exported.outages))
    default, *others = (_state(exported, kind) for kind in exported.kinds)
    loading.copy("kind_states", _KIND_STATES, others)
    waiting = [_of_kind(exported.waiting, number) for number, *_ in exported.kinds]
    arrived = ((number, 0, n) for number, n in enumerate(waiting) if number != DEFAULT_KIND)
    loading.copy("kind_arrivals", _KIND_ARRIVALS, arrived)
    of_all_kinds = [sum(numbers) for numbers in zip(*waiting, strict=True)]
    loading.copy("customers", _CUSTOMERS, map(_customer, exported.customers))
    loading.copy(
        "customer_states", _CUSTOMER_STATES, map(_customer_state, exported.customer_states)
    )
    loading.copy("flows", _FLOWS, map(_flow, exported.flows))
    loading.copy("event_log", _EVENTS, _events(exported))
    children: list[Row] = []
    loading.copy("documents", _DOCUMENTS, _documents(exported.documents, children))
    loading.copy("children", _CHILDREN, children)
    loading.copy("results", _RESULTS, exported.results)
    loading.copy("attempts", _ATTEMPTS, exported.attempts)
    loading.copy("checkpoints", _CHECKPOINTS, exported.checkpoints)
    loading.copy("unreported_cancels", ("document", ("int8",)), exported.unreported_cancels)
    loading.copy("idempotency_keys", _KEYS, exported.keys)
    loading.copy("workers", _WORKERS, exported.workers)
    loading.copy("access_keys", _ACCESS_KEYS, exported.access_keys)
    settings = settings_columns(Settings.from_json(exported.settings))
    with session.commit("copy"):
        session.ask(_EXPIRATIONS)
        session.ask(_LIMITED, (exported.limited,))
        session.ask(SETTINGS, settings)
        session.ask(_KEY, exported.key)
        session.ask(_NUMBERS, (exported.next_number, exported.next_customer))
        session.ask(_TOTALS, (of_all_kinds, exported.delayed))
        session.ask(_OUTCOME_COUNTERS, exported.outcome_counters.row)
        session.ask(
            _TURNS,
            (exported.claims, exported.fence, exported.tick, exported.level_times, *default[2:]),
        )
        session.ask(_REQUIRE_SCHEMA)


def lock_new(session: Session, name: str) -> None:
    """Lock a new queue in the present transaction. Raise `StoreRefused` for a used one."""
    with session.together():
        session.ask(LOCK_SETTINGS)
        session.ask("SELECT FROM fairturn.queue FOR NO KEY UPDATE")
        is_new = session.ask(_IS_NEW)
    if is_new.fetchall() != [(True,)]:
        raise StoreRefused(
            f"{name} has a queue that was used already; copy into a database or a schema without "
            "one, or drop its schema first"
        )


class _Loading:
    def __init__(self, session: Session, exported: ExportedQueue, progress: LoadProgress) -> None:
        self._session = session
        self._total = exported.rows
        self._progress = progress
        self._done = 0

    def copy(self, table: str, columns: tuple[str, tuple[str, ...]], rows: Iterable[Row]) -> None:
        names, types = columns
        statement = f"COPY fairturn.{table} ({names}) FROM STDIN (FORMAT BINARY)"
        self._session.copy(statement, types, self._counted(rows))

    def _counted(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            yield row
            self._done += 1
            if self._done % _PROGRESS_EVERY == 0:
                self._progress(self._done, max(self._total, self._done))


def _customer(row: Row) -> Row:
    *known, paused, documents = row[:-LEVELS]
    return (*known, bool(paused), documents, list(row[-LEVELS:]))


def _customer_state(row: Row) -> Row:
    customer, weight, running_max, paused, costs = row
    others = Jsonb({kind: recent for kind, recent in costs.items() if kind != DEFAULT_KIND})
    return customer, weight, running_max, bool(paused), costs.get(DEFAULT_KIND, []), others


def _kind(row: Row) -> Row:
    number, name, running_max, paused, attempts_max, expires_in, _ = row
    return number, name, running_max, bool(paused), attempts_max, expires_in


def _outage(row: Row) -> Row:
    service, *state = row
    known = ServiceState._make(state)
    return service, *known._replace(held=bool(known.held))


def _state(exported: ExportedQueue, kind: Row) -> Row:
    """Return the columns of `_KIND_STATES`."""
    number, since_patience = kind[0], kind[-1]
    values = (exported.clocks, exported.weights, exported.kind_times, exported.last_claims)
    return number, 0, since_patience, *(_of_kind(each, number) for each in values)


def _of_kind(values: Sequence[int], number: int) -> Sequence[int]:
    """Return the values of one kind; those of band 1 are the first."""
    return values[band_of(0, number) :][:LEVELS]


def _flow(row: Row) -> Row:
    *known, claimed_to, head_order, head_since, _, held = row
    return (*known, [0] * LEVELS, claimed_to, head_order, head_since, bool(held))


def _events(exported: ExportedQueue) -> Iterator[Row]:
    for at, events in exported.events:
        yield at, sorted({event.customer for event in events}), encode_events(events)


def _document(d: ExportedDocument) -> dict[str, Any]:
    """Return the columns of a document; some differ between the databases."""
    columns = d._asdict() | dict(zip(SUBMITTED, d.submitted, strict=True))
    for name in ("children", "progress_done", "progress_total", "body", "submitted"):
        del columns[name]
    has_progress = d.progress_done is not None
    return columns | {
        "returned": bool(d.returned),
        "failed": STATES[d.state] in FAILED,
        "cancel_requested": bool(d.cancel_requested),
        "delayed_until": d.due_at if d.state == DELAYED else None,
        "progress": json.dumps([d.progress_done, d.progress_total]) if has_progress else None,
        "body_text": d.body if isinstance(d.body, str) else None,
        "body_bytes": d.body if isinstance(d.body, bytes) else None,
    }


_EMPTY = ExportedDocument._make([None] * len(ExportedDocument._fields))
_NOT_SUBMITTED = _EMPTY._replace(state=DELAYED, submitted=(None,) * len(SUBMITTED))
_DOCUMENT_COLUMNS = tuple(_document(_NOT_SUBMITTED))
_DOCUMENTS = (
    ", ".join(_DOCUMENT_COLUMNS),
    tuple(
        "text" if name in {*_TEXTS, "progress", "body_text"} else _DOCUMENT_TYPES.get(name, "int8")
        for name in _DOCUMENT_COLUMNS
    ),
)


def _documents(documents: Iterable[ExportedDocument], children: list[Row]) -> Iterator[Row]:
    """Yield the rows of documents, and append those of the table `children` to the list."""
    for document in documents:
        if document.children:
            children.append((document.number, document.children))
        yield tuple(_document(document).values())
