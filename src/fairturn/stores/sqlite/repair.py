"""Repairs of what the recount of `audit.py` finds; claims repair flows with them too."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import apsw

from fairturn.model import Settings
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    BANDS_PER_KIND,
    DEFAULT_KIND,
    WEIGHT_ONE,
    Mode,
    band_of,
    kind_of,
    level_in,
)
from fairturn.stores.inspection import Damages
from fairturn.stores.sqlite.audit import LACKS_EXPIRATION
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.rows import (
    COUNT_COUNTED,
    INVALIDATE_SCHEDULER,
    fetch,
    kind_numbers,
)
from fairturn.stores.values import ADVANCED, DELAYED, RUNNING, STORED_BYTES, WAITING, Row

BATCH = 100  # customers or leases in one transaction

_QUEUE_STATE = "SELECT settings, next_number, tick FROM queue"
_EVENT_LOG = "SELECT number, events FROM event_log"
_KEEP_EVENTS = "UPDATE event_log SET events = ? WHERE number = ?"
_DROP_EVENTS = "DELETE FROM event_log WHERE number = ?"
_BAND = f"{BANDS_PER_KIND} * kind + iif(?2, 1, priority)"
# By documents_flow.
_SET_FLAGS = f"""
    UPDATE documents SET returned = (returned AND state = {WAITING}),
        level = iif(state IN ({WAITING}, {DELAYED}, {RUNNING}), {_BAND}, level)
    WHERE customer = ?1 AND ((returned AND state <> {WAITING})
        OR (state IN ({WAITING}, {DELAYED}, {RUNNING}) AND level <> {_BAND}))"""
_SET_STEPS = f"""
    UPDATE documents AS d SET step = s.n FROM (
        SELECT o.number, (
            SELECT count(*) FROM attempts a
            WHERE a.document = o.number AND a.outcome = {ADVANCED}) AS n
        FROM documents o INDEXED BY documents_flow WHERE o.customer = ?) s
    WHERE d.number = s.number AND d.step <> s.n"""
_ADD_EXPIRATIONS = f"""
    INSERT INTO expirations (expires_at, document)
    SELECT d.expires_at, d.number FROM documents d INDEXED BY documents_flow
    WHERE d.customer = ? AND {LACKS_EXPIRATION}"""
_COUNTED = f"""
    SELECT level, sum(state = {WAITING}), sum(state = {RUNNING}),
        min(iif(state = {WAITING}, order_number, NULL)),
        min(iif(state = {WAITING} AND returned = 0, order_number, NULL)),
        max(iif(state = {WAITING} AND returned = 0, NULL, order_number))
    FROM documents INDEXED BY documents_flow WHERE customer = ? AND level > 0 GROUP BY level"""
_RETURN_ALL = f"""
    UPDATE documents SET returned = 1 WHERE customer = ? AND level = ? AND state = {WAITING}"""
_CUSTOMER = "SELECT weight, running_max, paused FROM customers WHERE number = ?"
_SET_CUSTOMER = f"""
    UPDATE customers SET counted = running_max IS NOT NULL, delayed = (
        SELECT count(*) FROM documents WHERE customer = ?1 AND state = {DELAYED}),
        stored_bytes = (
        SELECT coalesce(sum({STORED_BYTES}), 0) FROM documents WHERE customer = ?1)
    WHERE number = ?1"""
_SET_CUSTOMER_STATE = """
    INSERT INTO customer_states (customer, weight, running_max, paused, recent_costs)
    VALUES (?, ?, ?, ?, '[]')
    ON CONFLICT DO UPDATE SET weight = excluded.weight, running_max = excluded.running_max,
        paused = excluded.paused"""
_DROP_PLAIN_CUSTOMER_STATE = f"""
    DELETE FROM customer_states WHERE customer = ? AND weight = {WEIGHT_ONE} AND running_max IS NULL
        AND paused = 0 AND recent_costs = '[]' AND costs_by_kind = '{{}}'"""
_FLOWS = """
    SELECT level, claimed_to, place, tick, folded > 0 AND held = 0, head_since
    FROM flows WHERE customer = ?"""
_SET_FLOW = """
    INSERT OR REPLACE INTO flows (customer, level, waiting, claimed_to, folded, running, place,
        tick, head_order, head_since, head_bound, held)
    VALUES (?1, ?2, ?3, ?4, ?3, ?5, ?6, ?7, ?8, ?9, ?9, ?10)"""
_DELETE_CUSTOMER = (
    "DELETE FROM flows WHERE customer = ?",
    "DELETE FROM customer_states WHERE customer = ?",
    "DELETE FROM idempotency_keys WHERE customer = ?",
)
_CLOCKS = "SELECT level, clock FROM levels"
_SET_WEIGHTS = f"""
    INSERT OR IGNORE INTO levels (level)
        SELECT DISTINCT level FROM flows INDEXED BY flows_turn WHERE folded > 0 AND held = 0;
    UPDATE levels SET weight = (
        SELECT coalesce(sum(coalesce(s.weight, {WEIGHT_ONE})), 0)
        FROM flows f INDEXED BY flows_turn LEFT JOIN customer_states s ON s.customer = f.customer
        WHERE f.folded > 0 AND f.held = 0 AND f.level = levels.level)"""
_SET_TICK = "UPDATE queue SET tick = ?"
# By kind and priority, numbered as bands are. Outside mode equal the level of a waiting document is
# its priority.
_WAITING_BY_PRIORITY = f"""
    SELECT {BANDS_PER_KIND} * kind + priority, count(*) FROM documents WHERE state = {WAITING}
    GROUP BY 1"""
_WAITING_BY_LEVEL = "SELECT level, sum(waiting) FROM flows GROUP BY level"
_SET_WAITING = ", ".join(f"waiting_{n} = ?" for n in range(1, LEVELS + 1))
_SET_COUNTS = f"""
    UPDATE queue SET {_SET_WAITING}, delayed = (SELECT coalesce(sum(delayed), 0) FROM customers)"""
_SET_COUNTS_OF_KIND = f"UPDATE kinds SET {_SET_WAITING} WHERE number = ?"
_FENCES = f"SELECT DISTINCT fence FROM documents WHERE number = ? AND state = {RUNNING}"
_LEASED = f"""
    SELECT d.number FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value AND d.fence = l.fence
    WHERE l.fence = ? AND d.state = {RUNNING}"""
_UNLEASED = f"SELECT number FROM documents WHERE number = ? AND fence = ? AND state = {RUNNING}"
_SET_LEASE = """
    INSERT OR REPLACE INTO leases (fence, until, running, documents, supports_kinds)
    VALUES (?, 0, ?, ?, 1)"""
_DROP_LEASE = "DELETE FROM leases WHERE fence = ?"
_DROP_ORPHANS = tuple(
    f"""DELETE FROM {table} WHERE document = ?1
        AND NOT EXISTS (SELECT 1 FROM documents WHERE number = ?1)"""
    for table in ("bodies", "results", "attempts", "checkpoints")
)


def repair(path: Path, damages: Damages, advance: Callable[[int, int], None], now: int) -> None:
    """Repair the damages of a recount, in a transaction for each batch."""
    work: list[Callable[[apsw.Connection], None]] = [
        *(partial(repair_customers, owners=b, now=now) for b in _batches(damages.customers)),
        *(partial(_repair_leases, fences=b, unleased=()) for b in _batches(damages.fences)),
        *(partial(_repair_leases, fences=(), unleased=b) for b in _batches(damages.unleased)),
        *(partial(_drop_orphans, numbers=b) for b in _batches(damages.orphans)),
    ]
    if damages.queue or damages.customers:
        work.append(_repair_queue)
    database = Database(path, synchronous="FULL", allow_network=True)
    try:
        for done, each in enumerate(work):
            advance(done, len(work))
            with database.writing("configure") as connection:
                each(connection)
                connection.execute(INVALIDATE_SCHEDULER)
    finally:
        database.close()


def _batches(numbers: Iterable[int]) -> Iterator[list[int]]:
    left = iter(sorted(numbers))
    while batch := list(islice(left, BATCH)):
        yield batch


# ── Customers ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _RepairState:
    """The scheduler state that a repair reads and writes."""

    mode: Mode
    clocks: dict[int, int]
    next_number: int
    tick: int
    now: int


def repair_customers(connection: apsw.Connection, owners: Iterable[int], now: int) -> None:
    """Rebuild the derived values of some customers, inside a transaction. Their unfolded events are
    deleted, because the documents already reflect them."""
    ((settings, next_number, tick),) = fetch(connection, _QUEUE_STATE)
    clocks: dict[int, int] = dict(fetch(connection, _CLOCKS))
    turns = _RepairState(Settings.from_json(settings).mode, clocks, next_number, tick, now)
    wanted = set(owners)
    _drop_events(connection, wanted)
    for owner in sorted(wanted):
        connection.execute(_SET_FLAGS, (owner, turns.mode is Mode.EQUAL))
        connection.execute(_SET_STEPS, (owner,))
        connection.execute(_ADD_EXPIRATIONS, (owner,))
        found = fetch(connection, _CUSTOMER, (owner,))
        if found:
            _repair_customer(connection, owner, found[0], turns)
        else:
            for statement in _DELETE_CUSTOMER:
                connection.execute(statement, (owner,))
    connection.execute(_SET_TICK, (turns.tick,))
    connection.execute(COUNT_COUNTED)
    connection.execute(_SET_WEIGHTS)
    connection.execute(INVALIDATE_SCHEDULER)


def _drop_events(connection: apsw.Connection, owners: set[int]) -> None:
    for number, text in fetch(connection, _EVENT_LOG):
        events = json.loads(text)
        kept = [event for event in events if event[1] not in owners]
        if not kept:
            connection.execute(_DROP_EVENTS, (number,))
        elif len(kept) < len(events):
            connection.execute(_KEEP_EVENTS, (json.dumps(kept, separators=(",", ":")), number))


def _repair_customer(
    connection: apsw.Connection, owner: int, settings: Row, turns: _RepairState
) -> None:
    """Rebuild the flows of a customer. Flows that stay active keep their turn."""
    _, limit, paused = settings
    connection.execute(_SET_CUSTOMER, (owner,))
    connection.execute(_SET_CUSTOMER_STATE, (owner, *settings))
    connection.execute(_DROP_PLAIN_CUSTOMER_STATE, (owner,))
    stored = {band: row for band, *row in fetch(connection, _FLOWS, (owner,))}
    counted = {band: row for band, *row in fetch(connection, _COUNTED, (owner,))}
    held = bool(paused) or (limit is not None and sum(r[1] for r in counted.values()) >= limit)
    heads = _by_kind(((band, row[2]) for band, row in counted.items()), min)
    since = _by_kind(((band, row[4]) for band, row in stored.items()), max)
    for band in sorted(stored.keys() | counted.keys()):
        waiting, running, first, first_new, last_old = counted.get(band, (0, 0, None, None, None))
        claimed_to, place, its_tick, was_active, _ = stored.get(band, (-1, 0, 0, 0, None))
        if band not in stored and not waiting and not running:
            continue
        if (last_old is not None and claimed_to < last_old) or (
            first_new is not None and claimed_to >= first_new
        ):
            connection.execute(_RETURN_ALL, (owner, band))
            claimed_to = turns.next_number - 1
        if turns.mode is Mode.LEVELS:
            place = first or 0
        elif waiting and not held and not was_active:
            turns.tick += 1
            place, its_tick = max(place, turns.clocks.get(band, 0)), turns.tick
        is_head = first is not None and first == heads[kind_of(band)]
        head_since = since.get(kind_of(band), turns.now) if is_head else None
        values = (waiting, claimed_to, running, place, its_tick, first, head_since, held)
        connection.execute(_SET_FLOW, (owner, band, *values))


def _by_kind(
    values: Iterable[tuple[int, int | None]], choose: Callable[[int, int], int]
) -> dict[int, int]:
    """Return the chosen of the values of each kind, from values by band."""
    chosen: dict[int, int] = {}
    for band, value in values:
        if value is not None:
            chosen[kind_of(band)] = choose(value, chosen.get(kind_of(band), value))
    return chosen


# ── The queue, leases, rows ──────────────────────────────────────────────────────────────────────


def _repair_queue(connection: apsw.Connection) -> None:
    ((settings, *_),) = fetch(connection, _QUEUE_STATE)
    is_equal = Settings.from_json(settings).mode is Mode.EQUAL
    statement = _WAITING_BY_PRIORITY if is_equal else _WAITING_BY_LEVEL
    waiting: dict[int, int] = dict(fetch(connection, statement))
    total: Counter[int] = Counter()
    for band, n in waiting.items():
        total[level_in(band)] += n
    connection.execute(_SET_COUNTS, [total[level] for level in range(1, LEVELS + 1)])
    others = set(kind_numbers(connection).values()) - {DEFAULT_KIND}
    for kind in others:
        counts = [waiting.get(band_of(level, kind), 0) for level in range(1, LEVELS + 1)]
        connection.execute(_SET_COUNTS_OF_KIND, (*counts, kind))
    connection.execute(COUNT_COUNTED)
    connection.execute(_SET_WEIGHTS)


def _repair_leases(
    connection: apsw.Connection, fences: Iterable[int], unleased: Iterable[int]
) -> None:
    """Rebuild the leases of these fences and of the documents in `unleased`."""
    numbers = list(unleased)
    found = [fence for n in numbers for (fence,) in fetch(connection, _FENCES, (n,))]
    for fence in {*fences, *found}:
        leased = {n for (n,) in fetch(connection, _LEASED, (fence,))}
        leased.update(n for n in numbers if fetch(connection, _UNLEASED, (n, fence)))
        if leased:
            connection.execute(_SET_LEASE, (fence, len(leased), json.dumps(sorted(leased))))
        else:
            connection.execute(_DROP_LEASE, (fence,))


def _drop_orphans(connection: apsw.Connection, numbers: Iterable[int]) -> None:
    for number in numbers:
        for statement in _DROP_ORPHANS:
            connection.execute(statement, (number,))
