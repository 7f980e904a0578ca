"""How values look in the database: documents, events, and the rows of the queue."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fairturn.clock import SERVER_NOW, SERVER_WAITED
from fairturn.flows import Arrived, Event, Mode, Recorded
from fairturn.model import Kind, Settings
from fairturn.priority import Reset
from fairturn.stores.ends import Ends
from fairturn.stores.events import decode_events, encode_events
from fairturn.stores.postgres.session import PLAN_BY_INDEXES, Session
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

_RECORD = "INSERT INTO fairturn.recorded (at, customers, events) VALUES (%s, %s, %s)"
RECORD_ARRIVED = """
    INSERT INTO fairturn.recorded (at, customers, levels, heads, sizes)
    VALUES (%s, %s, %s::smallint[], %s, %s::integer[])"""
# What no claim has seen yet: of the transactions that began after the last claim, and of those that
# were under way then. By the primary key, and past what is dead: some old transaction may keep the
# server from removing it.
UNSEEN = "xid >= %(since)s::text::xid8"
UNSEEN_LATE = "xid = ANY (%(late)s::xid8[])"
# What a claim reads of `recorded`, in the order of `to_recorded`.
RECORDED_COLUMNS = "number, at, customers, levels, heads, sizes, events"


def record(session: Session, at: int, events: Iterable[Event]) -> None:
    """Leave word for the next claim."""
    told = list(events)
    if told:
        customers = list({event.customer for event in told})
        session.ask(_RECORD, (at, customers, encode_events(told)))


class Horizon(NamedTuple):
    """What a claim has seen: every transaction before one, but for some that were under way."""

    since: str
    late: list[int]


class Told(NamedTuple):
    """What was recorded, in its order; and of that, what arrived at the end of a line."""

    recorded: list[Recorded]
    arrivals: list[Arrived]


def to_recorded(rows: Iterable[Row]) -> Told:
    """Rows of `recorded`. Where nothing but arrivals was recorded, what came later for a flow
    counts with what came first for it: after that it is only a longer line."""
    told = Told([], [])
    in_order = sorted(rows)
    sizes_of: Counter[tuple[int, int]] = Counter()
    only_arrivals = all(row[-1] is None for row in in_order)
    if only_arrivals:
        for _, _, customers, levels, _, sizes, _ in in_order:
            for flow, n in zip(zip(customers, levels, strict=True), sizes, strict=True):
                sizes_of[flow] += n
    for _, at, customers, levels, heads, sizes, events in in_order:
        if events is not None:
            told.recorded.append(Recorded(at, decode_events(events)))
            continue
        came = zip(customers, levels, heads, sizes, strict=True)
        if only_arrivals:
            arrivals = tuple(
                Arrived(customer, level, head, n)
                for customer, level, head, _ in came
                if (n := sizes_of.pop((customer, level), 0))
            )
        else:
            arrivals = tuple(Arrived(*each) for each in came)
        told.arrivals.extend(arrivals)
        told.recorded.append(Recorded(at, arrivals))
    return told


_COUNT_CHANGE = """
    SELECT fairturn.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0)"""


def count_change(session: Session) -> None:
    """Let the version be another one: for what neither claims nor submits."""
    session.ask(_COUNT_CHANGE)


# By the primary key.
_ADD_ENDS = """
    WITH given(attempts, retried, dead, cancelled) AS (
        VALUES (%s::bigint, %s::bigint, %s::bigint, %s::bigint)),
    free AS (SELECT number FROM fairturn.ends ORDER BY number LIMIT 1 FOR UPDATE SKIP LOCKED),
    added AS (
        UPDATE fairturn.ends e SET attempts = e.attempts + g.attempts,
            retried = e.retried + g.retried, dead = e.dead + g.dead,
            cancelled = e.cancelled + g.cancelled
        FROM given g, free WHERE e.number = free.number
        RETURNING e.number)
    INSERT INTO fairturn.ends (attempts, retried, dead, cancelled)
    SELECT * FROM given WHERE NOT EXISTS (SELECT 1 FROM added)"""


def add_ends(session: Session, ends: Ends) -> None:
    """Count what ended now, in a row that nobody holds."""
    if any(ends.row):
        session.ask(_ADD_ENDS, ends.row)


_MOVE = """
    INSERT INTO fairturn.moved (customer, level, priority, waiting, delayed)
    SELECT * FROM unnest(%s::bigint[], %s::smallint[], %s::smallint[], %s::integer[],
        %s::integer[])"""


class Moves:
    """How many documents began, or ceased, to wait or to be delayed."""

    def __init__(self) -> None:
        self._moves: dict[tuple[int, int, int], list[int]] = {}

    def wait(self, customer: int, level: int, priority: int, n: int = 1) -> None:
        self._moves.setdefault((customer, level, priority), [0, 0])[0] += n

    def delay(self, customer: int, level: int, priority: int, n: int = 1) -> None:
        self._moves.setdefault((customer, level, priority), [0, 0])[1] += n

    def write(self, session: Session) -> None:
        if self._moves:
            rows = [(*place, *moved) for place, moved in self._moves.items()]
            session.ask(_MOVE, columns(rows))


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """Rows as the arrays that a statement unnests."""
    return [list(column) for column in zip(*rows, strict=True)]


# ── The queue's own row ──────────────────────────────────────────────────────────────────────────

ADD_QUEUE = """
    INSERT INTO fairturn.queue (id_key, settings, depths, reset_interval, periodic, one_level,
        waiting_max, waiting_per_customer_max)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"""
CONFIGURE = """
    UPDATE fairturn.queue SET settings_version = settings_version + 1, settings = %s, depths = %s,
        reset_interval = %s, periodic = %s, one_level = %s, waiting_max = %s,
        waiting_per_customer_max = %s"""


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
    )


QUEUE = "SELECT settings, settings_version, id_key FROM fairturn.queue"
# The moment is read when the lock is there; with it comes how long that took.
LOCK_QUEUE = f"""
    WITH locked AS MATERIALIZED (
        SELECT settings, settings_version, id_key FROM fairturn.queue FOR NO KEY UPDATE)
    SELECT settings, settings_version, id_key, {MOMENT}, {SERVER_WAITED}, {PLAN_BY_INDEXES}
    FROM locked"""


class QueueRow(NamedTuple):
    """The one row of `queue`."""

    settings: Settings
    settings_version: int
    key: int


def to_queue(row: Row, cache: SettingsCache) -> QueueRow:
    return QueueRow(cache.parse(row[0]), row[1], row[2])


# ── Flows ────────────────────────────────────────────────────────────────────────────────────────


def newest_flow(columns: str, of: str) -> str:
    """A query for the flow of a customer and a level that `of` has, in a statement: its newest
    version, which alone is not dead. By the primary key, from its end."""
    return f"""
        SELECT {columns} FROM fairturn.flows
        WHERE customer = {of}.customer AND level = {of}.level
        ORDER BY customer DESC, level DESC, version DESC LIMIT 1"""


# ── Where the order of service stands ────────────────────────────────────────────────────────────

TURNS_COLUMNS = "version, claims, fence, tick, clocks, weights, taken, promoted, boot"
TURNS = f"SELECT {TURNS_COLUMNS} FROM fairturn.turns ORDER BY version DESC LIMIT 1"
# So many rows are kept, for processes that have not seen the last of them.
TURNS_KEPT = 64
# Virtual times end at 2^63; one claim adds less than 2^57.
CLOCK_MAX = 1 << 60
_ADD_TURNS = """
    WITH gone AS (DELETE FROM fairturn.turns WHERE version = %s)
    INSERT INTO fairturn.turns (version, claims, fence, tick, clocks, weights, taken,
        promoted, boot, customers, levels, disturbed)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s::smallint[], %s::boolean[])"""
# Engines that processes keep from claim to claim are to be read anew. Under the queue's lock.
FORGET_TURNS = """
    WITH old AS (DELETE FROM fairturn.turns RETURNING *)
    INSERT INTO fairturn.turns
    SELECT version + 1, claims, fence, tick, clocks, weights, taken, promoted, boot
    FROM old ORDER BY version DESC LIMIT 1"""


class TurnsRow:
    """The last row of `turns`, to be moved on and written as the next one. Level and priority `n`
    stand at `n - 1`."""

    __slots__ = (
        "boot",
        "claims",
        "clocks",
        "fence",
        "promoted",
        "taken",
        "tick",
        "version",
        "weights",
    )

    def __init__(self, row: Row) -> None:
        self.version, self.claims, self.fence, self.tick = row[:4]
        self.clocks, self.weights, self.taken, self.promoted, self.boot = row[4:]

    def write(self, session: Session, changed: Sequence[Row] | None) -> None:
        """As the next version. `changed`: customer, level and whether it was disturbed, of each
        flow; None if others cannot follow by that."""
        self.version += 1
        flows: list[Any] = [None, None, None]
        if changed is not None:
            flows = columns(changed) or [[], [], []]
        session.ask(
            _ADD_TURNS,
            (
                self.version - TURNS_KEPT,
                self.version,
                self.claims,
                self.fence,
                self.tick,
                self.clocks,
                self.weights,
                self.taken,
                self.promoted,
                self.boot,
                *flows,
            ),
        )
