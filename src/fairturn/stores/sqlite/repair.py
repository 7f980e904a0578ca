"""Repairs of damages in a file: what is derived from documents is rebuilt from them.

No document changes its state. A running document without a lease gets one that has expired, so
that the next claim looks at it.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import apsw

from fairturn.model import Settings
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import WEIGHT_ONE, Mode
from fairturn.stores.inspection import Damages
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.rows import COUNT_COUNTED, FORGET_TURNS, fetch
from fairturn.stores.values import DELAYED, RUNNING, WAITING, Row

BATCH = 100  # customers or leases in one transaction

_QUEUE = "SELECT settings, next_number, tick FROM queue"
_RECORDED = "SELECT number, events FROM recorded"
_KEEP_EVENTS = "UPDATE recorded SET events = ? WHERE number = ?"
_DROP_EVENTS = "DELETE FROM recorded WHERE number = ?"
# By documents_flow.
_SET_FLAGS = f"""
    UPDATE documents SET returned = (returned AND state = {WAITING}),
        level = CASE WHEN state NOT IN ({WAITING}, {DELAYED}, {RUNNING}) THEN level
            WHEN ?2 THEN 1 ELSE priority END
    WHERE customer = ?1 AND ((returned AND state <> {WAITING})
        OR (state IN ({WAITING}, {DELAYED}, {RUNNING}) AND level <> iif(?2, 1, priority)))"""
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
        SELECT count(*) FROM documents WHERE customer = ?1 AND state = {DELAYED})
    WHERE number = ?1"""
_SET_STANDING = """
    INSERT INTO standings (customer, weight, running_max, paused, recent_costs)
    VALUES (?, ?, ?, ?, '[]')
    ON CONFLICT DO UPDATE SET weight = excluded.weight, running_max = excluded.running_max,
        paused = excluded.paused"""
_DROP_PLAIN_STANDING = f"""
    DELETE FROM standings WHERE customer = ? AND weight = {WEIGHT_ONE} AND running_max IS NULL
        AND paused = 0 AND recent_costs = '[]'"""
_FLOWS = """
    SELECT level, claimed_to, place, tick, folded > 0 AND held = 0, head_since
    FROM flows WHERE customer = ?"""
_SET_FLOW = """
    INSERT OR REPLACE INTO flows (customer, level, waiting, claimed_to, folded, running, place,
        tick, head_order, head_since, head_bound, held)
    VALUES (?1, ?2, ?3, ?4, ?3, ?5, ?6, ?7, ?8, ?9, ?9, ?10)"""
_FORGET = (
    "DELETE FROM flows WHERE customer = ?",
    "DELETE FROM standings WHERE customer = ?",
    "DELETE FROM keys WHERE customer = ?",
)
_CLOCKS = "SELECT level, clock FROM levels"
_SET_WEIGHTS = f"""
    UPDATE levels SET weight = (
        SELECT coalesce(sum(coalesce(s.weight, {WEIGHT_ONE})), 0)
        FROM flows f INDEXED BY flows_turn LEFT JOIN standings s ON s.customer = f.customer
        WHERE f.folded > 0 AND f.held = 0 AND f.level = levels.level)"""
_SET_TICK = "UPDATE queue SET tick = ?"
_WAITING_BY_PRIORITY = f"""
    SELECT priority, count(*) FROM documents WHERE state = {WAITING} GROUP BY priority"""
# Outside mode equal the level of a waiting document is its priority.
_WAITING_BY_LEVEL = "SELECT level, sum(waiting) FROM flows GROUP BY level"
_SET_COUNTS = f"""
    UPDATE queue SET delayed = (SELECT coalesce(sum(delayed), 0) FROM customers),
        {", ".join(f"waiting_{n} = ?" for n in range(1, LEVELS + 1))}"""
_FENCES = f"SELECT DISTINCT fence FROM documents WHERE number = ? AND state = {RUNNING}"
_LEASED = f"""
    SELECT d.number FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value AND d.fence = l.fence
    WHERE l.fence = ? AND d.state = {RUNNING}"""
_UNLEASED = f"SELECT number FROM documents WHERE number = ? AND fence = ? AND state = {RUNNING}"
_SET_LEASE = """
    INSERT OR REPLACE INTO leases (fence, until, running, documents) VALUES (?, 0, ?, ?)"""
_DROP_LEASE = "DELETE FROM leases WHERE fence = ?"
_DROP_ORPHANS = (
    """DELETE FROM bodies WHERE document = ?1
        AND NOT EXISTS (SELECT 1 FROM documents WHERE number = ?1)""",
    """DELETE FROM results WHERE document = ?1
        AND NOT EXISTS (SELECT 1 FROM documents WHERE number = ?1)""",
)


def repair(path: Path, damages: Damages, advance: Callable[[int, int], None], now: int) -> None:
    """Repair what a recount has found, a transaction for each batch."""
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
                connection.execute(FORGET_TURNS)
    finally:
        database.close()


def _batches(numbers: Iterable[int]) -> Iterator[list[int]]:
    left = iter(sorted(numbers))
    while batch := list(islice(left, BATCH)):
        yield batch


# ── Customers ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Turns:
    """Where the order of service stands."""

    mode: Mode
    clocks: dict[int, int]
    next_number: int
    tick: int
    now: int


def repair_customers(connection: apsw.Connection, owners: Iterable[int], now: int) -> None:
    """Rebuild what is derived from the documents of some customers, inside a transaction. Events
    of theirs that are not applied yet are dropped: the documents have their effect already."""
    ((settings, next_number, tick),) = fetch(connection, _QUEUE)
    clocks: dict[int, int] = dict(fetch(connection, _CLOCKS))
    turns = _Turns(Settings.from_json(settings).mode, clocks, next_number, tick, now)
    wanted = set(owners)
    _drop_events(connection, wanted)
    for owner in sorted(wanted):
        connection.execute(_SET_FLAGS, (owner, turns.mode is Mode.EQUAL))
        found = fetch(connection, _CUSTOMER, (owner,))
        if found:
            _repair_customer(connection, owner, found[0], turns)
        else:
            for statement in _FORGET:
                connection.execute(statement, (owner,))
    connection.execute(_SET_TICK, (turns.tick,))
    connection.execute(COUNT_COUNTED)
    connection.execute(_SET_WEIGHTS)
    connection.execute(FORGET_TURNS)


def _drop_events(connection: apsw.Connection, owners: set[int]) -> None:
    for number, text in fetch(connection, _RECORDED):
        events = json.loads(text)
        kept = [event for event in events if event[1] not in owners]
        if not kept:
            connection.execute(_DROP_EVENTS, (number,))
        elif len(kept) < len(events):
            connection.execute(_KEEP_EVENTS, (json.dumps(kept, separators=(",", ":")), number))


def _repair_customer(connection: apsw.Connection, owner: int, settings: Row, turns: _Turns) -> None:
    """Rebuild the flows of one customer. Flows that stay active keep their place in the order of
    service."""
    _, limit, paused = settings
    connection.execute(_SET_CUSTOMER, (owner,))
    connection.execute(_SET_STANDING, (owner, *settings))
    connection.execute(_DROP_PLAIN_STANDING, (owner,))
    stored = {level: row for level, *row in fetch(connection, _FLOWS, (owner,))}
    counted = {level: row for level, *row in fetch(connection, _COUNTED, (owner,))}
    held = bool(paused) or (limit is not None and sum(r[1] for r in counted.values()) >= limit)
    head = min((row[2] for row in counted.values() if row[2] is not None), default=None)
    since = max((row[4] for row in stored.values() if row[4] is not None), default=turns.now)
    for level in sorted(stored.keys() | counted.keys()):
        waiting, running, first, first_new, last_old = counted.get(level, (0, 0, None, None, None))
        claimed_to, place, its_tick, was_active, _ = stored.get(level, (-1, 0, 0, 0, None))
        if level not in stored and not waiting and not running:
            continue
        if (last_old is not None and claimed_to < last_old) or (
            first_new is not None and claimed_to >= first_new
        ):
            connection.execute(_RETURN_ALL, (owner, level))
            claimed_to = turns.next_number - 1
        if turns.mode is Mode.LEVELS:
            place = first or 0
        elif waiting and not held and not was_active:
            turns.tick += 1
            place, its_tick = max(place, turns.clocks[level]), turns.tick
        head_since = since if first is not None and first == head else None
        values = (waiting, claimed_to, running, place, its_tick, first, head_since, held)
        connection.execute(_SET_FLOW, (owner, level, *values))


# ── The queue, leases, rows ──────────────────────────────────────────────────────────────────────


def _repair_queue(connection: apsw.Connection) -> None:
    ((settings, *_),) = fetch(connection, _QUEUE)
    is_equal = Settings.from_json(settings).mode is Mode.EQUAL
    statement = _WAITING_BY_PRIORITY if is_equal else _WAITING_BY_LEVEL
    waiting: dict[int, int] = dict(fetch(connection, statement))
    connection.execute(_SET_COUNTS, [waiting.get(n, 0) for n in range(1, LEVELS + 1)])
    connection.execute(COUNT_COUNTED)
    connection.execute(_SET_WEIGHTS)


def _repair_leases(
    connection: apsw.Connection, fences: Iterable[int], unleased: Iterable[int]
) -> None:
    """Rebuild leases from the running documents with these fences, and those of `unleased`."""
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
