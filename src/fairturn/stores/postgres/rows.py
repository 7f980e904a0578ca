"""How values look in the database: documents, events, and the rows of the queue."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fairturn.clock import SERVER_NOW
from fairturn.model import Kind, Settings
from fairturn.priority import Reset
from fairturn.scheduling.flows import Arrived, Mode, Recorded
from fairturn.stores.events import decode_events
from fairturn.stores.values import Row, SettingsCache

# What `to_document` takes, in its order.
DOCUMENT_COLUMNS = """
    d.number, c.name, d.state, d.priority, d.count, d.submitted_at, d.due_at, d.order_number,
    d.attempts, d.claimed_at, d.ended_at, d.worker, d.error, d.cancel_requested, d.cost,
    CASE WHEN d.is_payload THEN 'payload' ELSE 'content' END,
    d.size_bytes, d.sha256, d.content_name, d.name, d.metadata, d.parent, d.real_cost"""
# What `to_claims` takes, in its order; the body is put together from two columns.
CLAIM_COLUMNS = """
    d.order_number, d.number, d.priority, d.cost, d.body_text, d.attempts, d.count,
    d.submitted_at, d.due_at, d.error, CASE WHEN d.is_payload THEN 'payload' ELSE 'content' END,
    d.size_bytes, d.sha256, d.content_name, d.name, d.metadata, d.parent"""

# The moment that was handed in, or that of the server.
MOMENT = f"coalesce(%s::bigint, {SERVER_NOW})"
NO_ORDER = (1 << 63) - 1


def is_payload(kind: Kind) -> bool:
    """How the kind of a document is kept."""
    return kind is Kind.PAYLOAD


# ── Events ───────────────────────────────────────────────────────────────────────────────────────

# What a claim reads of `recorded`, in the order of `to_recorded`.
RECORDED_COLUMNS = "number, at, customers, levels, heads, sizes, events"


def to_recorded(rows: Iterable[Row]) -> list[Recorded]:
    """Rows of `recorded`, in their order."""
    recorded = []
    for _, at, customers, levels, heads, sizes, events in sorted(rows):
        if events is not None:
            recorded.append(Recorded(at, decode_events(events)))
        else:
            arrived = zip(customers, levels, heads, sizes, strict=True)
            recorded.append(Recorded(at, tuple(Arrived(*each) for each in arrived)))
    return recorded


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """Rows as the arrays that a statement unnests."""
    return [list(column) for column in zip(*rows, strict=True)]


# ── The queue's own row ──────────────────────────────────────────────────────────────────────────

_SETTINGS = """
    settings, depths, reset_interval, periodic, one_level, waiting_max, waiting_per_customer_max,
    mode, costs, patience, attempts_max"""
ADD_QUEUE = f"""
    INSERT INTO fairturn.queue (incarnation, id_key, {_SETTINGS})
    VALUES (fairturn.incarnation(), {", ".join(["%s"] * 12)}) ON CONFLICT DO NOTHING"""


def settings_columns(settings: Settings) -> Row:
    """Settings as the columns of the queue's row."""
    rule = settings.rule
    return (
        settings.to_json(),
        [-bound for bound in rule.bounds],
        rule.reset_interval_us,
        rule.reset is Reset.PERIODIC,
        settings.mode is Mode.EQUAL,
        settings.waiting_max,
        settings.waiting_per_customer_max,
        settings.mode.value,
        settings.costs.value,
        settings.patience_us,
        settings.attempts_max,
    )


QUEUE = "SELECT settings, settings_version, id_key FROM fairturn.queue"


class QueueRow(NamedTuple):
    """The one row of `queue`."""

    settings: Settings
    settings_version: int
    key: int


def to_queue(row: Row, cache: SettingsCache) -> QueueRow:
    return QueueRow(cache.parse(row[0]), row[1], row[2])


# ── Where the order of service stands ────────────────────────────────────────────────────────────

TURNS_COLUMNS = "version, claims, fence, tick, clocks, weights, taken, promoted, boot"
TURNS = f"SELECT {TURNS_COLUMNS} FROM fairturn.turns ORDER BY version DESC LIMIT 1"
# That of the flows from which claims take documents.
GENERATION = "(SELECT generation FROM fairturn.turns ORDER BY version DESC LIMIT 1)"


class TurnsRow(NamedTuple):
    """The newest row of `turns`. Level and priority `n` stand at `n - 1`."""

    version: int
    claims: int
    fence: int
    tick: int
    clocks: list[int]
    weights: list[int]
    taken: list[int]
    promoted: int
    boot: str
