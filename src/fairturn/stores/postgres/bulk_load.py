"""Everything of a queue from another database, into a schema where nothing is: all or nothing."""

import json
from collections.abc import Callable, Iterable, Iterator

from fairturn.errors import StoreRefused
from fairturn.model import FAILED, Kind, Settings
from fairturn.priority import LEVELS
from fairturn.stores.events import encode_events
from fairturn.stores.postgres.rows import settings_columns
from fairturn.stores.postgres.session import BEGIN, LOCK_SETTINGS, Session
from fairturn.stores.transfer import Whole, WholeDocument
from fairturn.stores.values import DELAYED, KINDS, STATES, Row

_ROWS_AT_ONCE = 1_000  # between two words about the progress

# A queue that was made and never used; the documents of one that was used can all be pruned.
_IS_NEW = """
    SELECT NOT EXISTS (SELECT 1 FROM fairturn.customers)
        AND NOT EXISTS (SELECT 1 FROM fairturn.access_keys)
        AND NOT (SELECT is_called FROM fairturn.document_numbers)"""
_CUSTOMERS = (
    "number, name, count, count_updated_at, weight, running_max, paused, submitted, arrived",
    ("int8", "text", "int8", "int8", "int4", "int4", "bool", "int8", "int8[]"),
)
_STANDINGS = (
    "customer, weight, running_max, paused, recent_costs",
    ("int8", "int4", "int4", "bool", "int8[]"),
)
_FLOWS = (
    "customer, level, place, tick, folded, running, taken, claimed_to, head_order, head_since, "
    "held",
    ("int8", "int2", *["int8"] * 4, "int8[]", *["int8"] * 3, "bool"),
)
_RECORDED = ("at, customers, events", ("int8", "int8[]", "text"))
_DOCUMENTS = (
    "number, customer, order_number, count, submitted_at, size_bytes, fence, attempts, level, "
    "priority, state, returned, failed, cancel_requested, is_payload, claimed_at, charged_cost, "
    "charged_weight, charge, ended_at, due_at, delayed_until, cost, parent, real_cost, "
    "progress_fence, worker, error, name, metadata, content_name, progress, sha256, body_text, "
    "body_bytes",
    (
        *("int8", "int8", "int8", "int8", "int8", "int8", "int8", "int4", "int2", "int2", "int2"),
        *("bool", "bool", "bool", "bool"),
        *["int8"] * 11,
        *("text", "text", "text", "text", "text", "text", "bytea", "text", "bytea"),
    ),
)
_CHILDREN = ("parent, made", ("int8", "int4"))
_RESULTS = (
    "document, result, content_name, size_bytes, sha256",
    ("int8", "text", "text", "int8", "bytea"),
)
_KEYS = (
    "customer, key, digest, document, count, priority, submitted_at",
    ("int8", "text", "bytea", "int8", "int8", "int2", "int8"),
)
_WORKERS = ("name, seen_at, slots", ("text", "int8", "int8"))
_ACCESS_KEYS = (
    "id, role, customer, name, digest, made_at, used_at, ends_at",
    ("text", "text", "text", "text", "bytea", "int8", "int8", "int8"),
)
_LIMITED = "INSERT INTO fairturn.limited (customer) SELECT unnest(%s::bigint[])"
SETTINGS = """
    UPDATE fairturn.queue SET settings_version = settings_version + 1, settings = %s, depths = %s,
        reset_interval = %s, periodic = %s, one_level = %s, waiting_max = %s,
        waiting_per_customer_max = %s, mode = %s, costs = %s, patience = %s, attempts_max = %s"""
_KEY = "UPDATE fairturn.queue SET id_key = %s"
_NUMBERS = """
    SELECT setval('fairturn.document_numbers', %s, false),
        setval('fairturn.customer_numbers', %s, false)"""
_TOTALS = """
    UPDATE fairturn.totals SET arrived = %s::bigint[], delayed = %s, changes = changes + 1
    WHERE shard = 0"""
_ENDS = """
    UPDATE fairturn.ends SET attempts = %s, retried = %s, dead = %s, cancelled = %s"""
_TURNS = """
    WITH old AS (DELETE FROM fairturn.turns RETURNING version)
    INSERT INTO fairturn.turns (version, claims, fence, tick, clocks, weights, taken)
    SELECT max(version) + 1, %s, %s, %s, %s::bigint[], %s::bigint[],
        array_fill(0::bigint, ARRAY[9])
    FROM old"""

Progress = Callable[[int, int], None]  # hears of rows done, and of all


def load(session: Session, name: str, whole: Whole, progress: Progress) -> None:
    """Fill a new queue, in one transaction."""
    with session.together():
        session.ask(BEGIN)
        session.ask(LOCK_SETTINGS)
        session.ask("SELECT FROM fairturn.queue FOR NO KEY UPDATE")
        asked = session.ask(_IS_NEW)
    if asked.fetchall() != [(True,)]:
        raise StoreRefused(
            f"{name} has a queue that was used already; copy into a database without one, or "
            "drop its schema first"
        )
    loading = _Loading(session, whole, progress)
    loading.copy("customers", _CUSTOMERS, map(_customer, whole.customers))
    loading.copy("standings", _STANDINGS, map(_standing, whole.standings))
    loading.copy("flows", _FLOWS, map(_flow, whole.flows))
    loading.copy("recorded", _RECORDED, _recorded(whole))
    children: list[Row] = []
    loading.copy("documents", _DOCUMENTS, _documents(whole.documents, children))
    loading.copy("children", _CHILDREN, children)
    loading.copy("results", _RESULTS, whole.results)
    loading.copy("keys", _KEYS, whole.keys)
    loading.copy("workers", _WORKERS, whole.workers)
    loading.copy("access_keys", _ACCESS_KEYS, whole.access_keys)
    settings = settings_columns(Settings.from_json(whole.settings))
    with session.commit("copy"):
        session.ask(_LIMITED, (whole.limited,))
        session.ask(SETTINGS, settings)
        session.ask(_KEY, (whole.key,))
        session.ask(_NUMBERS, (whole.next_number, whole.next_customer))
        session.ask(_TOTALS, (whole.waiting, whole.delayed))
        session.ask(_ENDS, whole.ends.row)
        session.ask(_TURNS, (whole.claims, whole.fence, whole.tick, whole.clocks, whole.weights))


class _Loading:
    def __init__(self, session: Session, whole: Whole, progress: Progress) -> None:
        self._session = session
        self._total = whole.rows
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
            if self._done % _ROWS_AT_ONCE == 0:
                self._progress(self._done, max(self._total, self._done))


def _customer(row: Row) -> Row:
    *known, paused, documents = row[:-LEVELS]
    return (*known, bool(paused), documents, list(row[-LEVELS:]))


def _standing(row: Row) -> Row:
    customer, weight, running_max, paused, costs = row
    return customer, weight, running_max, bool(paused), costs


def _flow(row: Row) -> Row:
    *known, claimed_to, head_order, head_since, _, held = row
    return (*known, [0] * LEVELS, claimed_to, head_order, head_since, bool(held))


def _recorded(whole: Whole) -> Iterator[Row]:
    for at, events in whole.recorded:
        yield at, sorted({event.customer for event in events}), encode_events(events)


def _documents(documents: Iterable[WholeDocument], children: list[Row]) -> Iterator[Row]:
    """Rows of documents; what was made by one goes elsewhere."""
    for d in documents:
        if d.children:
            children.append((d.number, d.children))
        progress = None
        if d.progress_done is not None:
            progress = json.dumps([d.progress_done, d.progress_total])
        yield (
            *d[: WholeDocument._fields.index("returned")],
            bool(d.returned),
            STATES[d.state] in FAILED,
            bool(d.cancel_requested),
            KINDS[d.kind] is Kind.PAYLOAD,
            d.claimed_at,
            d.charged_cost,
            d.charged_weight,
            d.charge,
            d.ended_at,
            d.due_at,
            d.due_at if d.state == DELAYED else None,
            d.cost,
            d.parent,
            d.real_cost,
            d.progress_fence,
            d.worker,
            d.error,
            d.name,
            d.metadata,
            d.content_name,
            progress,
            d.sha256,
            d.body if isinstance(d.body, str) else None,
            d.body if isinstance(d.body, bytes) else None,
        )
