"""Column formats: documents, events, the row of `queue` and the scheduler state."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fairturn.clock import SERVER_NOW, Clock, Uptime
from fairturn.model import KindSettings, Settings
from fairturn.priority import Reset
from fairturn.scheduling.flows import ArrivalEvent, Band, EventBatch, Mode, band_of
from fairturn.stores import values
from fairturn.stores.ids import IdKey
from fairturn.stores.values import DELAYED, WAITING, Row, SettingsCache, decode_events

# Of documents, with the schema of the table of kinds.
DOCUMENT_COLUMNS, CLAIM_COLUMNS = (
    columns.replace("FROM kinds", "FROM fairturn.kinds")
    for columns in (
        values.DOCUMENT_COLUMNS,
        # A body is text or bytes: `claim.py` reads the bytes from another column.
        values.CLAIM_COLUMNS.replace("d.body,", "d.body_text,", 1),
    )
)

# The timestamp of the parameter, or that of the server if it is NULL.
TIMESTAMP = f"coalesce(%s::bigint, {SERVER_NOW})"
NO_ORDER = (1 << 63) - 1
# Whether a document d may expire: it has not started.
MAY_EXPIRE = f"d.state IN ({WAITING}, {DELAYED}) AND d.step = 0 AND d.attempts = 0"
SERVER_BOOT = "server"  # the boot id if leases follow the clock of the server


def now_of(clock: Clock | None) -> int | None:
    """Return the time, or None without a clock: then the server's clock is used."""
    return None if clock is None else clock.now()


def uptime_of(clock: Clock | None) -> Uptime | None:
    """Return the uptime, or None without a clock: then leases follow the server's clock."""
    return None if clock is None else clock.uptime()


# ── Events ───────────────────────────────────────────────────────────────────────────────────────

# The columns of `event_log` that `to_events` takes.
EVENT_COLUMNS = "number, at, customers, levels, heads, sizes, events"


def to_events(rows: Iterable[Row]) -> list[EventBatch]:
    """Return the events of these rows, in their order."""
    batches = []
    for _, at, customers, levels, heads, sizes, events in sorted(rows):
        if events is not None:
            batches.append(EventBatch(at, decode_events(events)))
        else:
            arrived = zip(customers, levels, heads, sizes, strict=True)
            batches.append(EventBatch(at, tuple(ArrivalEvent(*each) for each in arrived)))
    return batches


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """Transpose rows into the arrays that a statement unnests."""
    return [list(column) for column in zip(*rows, strict=True)]


# ── The queue's own row ──────────────────────────────────────────────────────────────────────────

_SETTINGS = """
    settings, depths, reset_interval, periodic, one_level, waiting_max, waiting_per_customer_max,
    mode, costs, patience, attempts_max, bytes_per_customer_max"""
ADD_QUEUE = f"""
    INSERT INTO fairturn.queue (incarnation, id_secret, id_key, ids_from, {_SETTINGS})
    VALUES (fairturn.incarnation(), {", ".join(["%s"] * 15)}) ON CONFLICT DO NOTHING"""


def settings_columns(settings: Settings) -> Row:
    """Return settings as the columns of the row of `queue`."""
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
        settings.bytes_per_customer_max,
    )


QUEUE = "SELECT settings, settings_version, id_secret, id_key, ids_from FROM fairturn.queue"


class PostgresQueueRow(NamedTuple):
    """The one row of `queue`."""

    settings: Settings
    settings_version: int
    key: IdKey


KIND_SETTINGS = "running_max, paused, attempts_max, expires_in_us"


def to_kind_settings(row: Row) -> KindSettings:
    """Convert the columns `KIND_SETTINGS`."""
    limit, paused, attempts_max, expires_in = row
    return KindSettings(
        limit=limit,
        paused=paused,
        attempts_max=attempts_max,
        expires_in_s=None if expires_in is None else expires_in / 1_000_000,
    )


def to_queue(row: Row, cache: SettingsCache) -> PostgresQueueRow:
    return PostgresQueueRow(cache.parse(row[0]), row[1], IdKey(*row[2:]))


# ── Scheduler state ──────────────────────────────────────────────────────────────────────────────

TURNS_COLUMNS = "claims, tick, level_times, boot"
TURNS = f"SELECT {TURNS_COLUMNS} FROM fairturn.scheduler_states ORDER BY version DESC LIMIT 1"
# Claims take documents only from flows of this generation.
GENERATION = "(SELECT generation FROM fairturn.scheduler_states ORDER BY version DESC LIMIT 1)"


class TurnsRow(NamedTuple):
    """The newest row of `scheduler_states`. Level `n` is at the index `n - 1`."""

    claims: int
    tick: int
    level_times: list[int]
    boot: str


STATES_OF_KINDS = """
    SELECT s.kind, k.name, s.clocks, s.weights, s.kind_times, s.last_claims, s.since_patience
    FROM fairturn.states_of_kinds() s JOIN fairturn.kinds k ON k.number = s.kind"""


class KindRow(NamedTuple):
    """The scheduler state of one kind. Level `n` is at the index `n - 1`."""

    kind: int
    name: str
    clocks: list[int]
    weights: list[int]
    kind_times: list[int]
    last_claims: list[int]
    since_patience: int

    def bands(self) -> Iterator[tuple[int, Band]]:
        """Yield the bands of the kind, by number."""
        values = zip(self.clocks, self.weights, self.kind_times, self.last_claims, strict=True)
        for level, band in enumerate(values, start=1):
            yield band_of(level, self.kind), Band(*band)
