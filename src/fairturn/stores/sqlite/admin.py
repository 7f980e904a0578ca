"""Administration: settings, access keys, workers, retention."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import apsw

from fairturn.access.keys import ACCESS_KEYS_MAX, AccessKey, Role
from fairturn.clock import Uptime
from fairturn.explain.snapshot import WORKERS_KEPT_US, WORKERS_MAX, WorkerHeartbeat
from fairturn.model import (
    ENDED,
    KEY_KEPT_US,
    CustomerSettings,
    KindSettings,
    Settings,
    weight_in_thousandths,
)
from fairturn.scheduling.flows import (
    BANDS_PER_KIND,
    ArrivalEvent,
    Costs,
    Mode,
    PurgeEvent,
    RunningEvent,
    SettingsEvent,
    kind_of,
)
from fairturn.stores.admission import refuse_kind_beyond_max
from fairturn.stores.sqlite import outages
from fairturn.stores.sqlite.claim import SchedulerState
from fairturn.stores.sqlite.finish import leave_leases
from fairturn.stores.sqlite.outages import StoredServices
from fairturn.stores.sqlite.rows import (
    COUNT_COUNTED,
    INVALIDATE_SCHEDULER,
    CounterChanges,
    QueueRow,
    add_outcome_counters,
    create_kind,
    customers_in_events,
    fetch,
    kind_numbers,
    read_kinds,
    record,
)
from fairturn.stores.transitions import OutcomeCounters
from fairturn.stores.values import CODES, DELAYED, RUNNING, STORED_BYTES, WAITING
from fairturn.validation.text import compact_json

_CONFIGURE = "UPDATE queue SET settings = ?"
_ADJUST = """
    INSERT INTO customers (number, name, weight, running_max, paused, bytes_max, counted)
    VALUES ((SELECT next_customer FROM queue), ?1, ?2, ?3, ?4, ?5, ?3 IS NOT NULL)
    ON CONFLICT (name) DO UPDATE SET
        weight = excluded.weight, running_max = excluded.running_max, paused = excluded.paused,
        bytes_max = excluded.bytes_max, counted = max(counted, excluded.counted)
    RETURNING number"""
_CUSTOMER_SETTINGS = "SELECT weight, running_max, paused, bytes_max FROM customers WHERE name = ?"
_USE_CUSTOMER = "UPDATE queue SET next_customer = max(next_customer, ? + 1)"
_HEADS = "SELECT customer, level, head_since FROM flows WHERE head_since IS NOT NULL"
_RELEVEL = f"""
    UPDATE documents SET
        level = {BANDS_PER_KIND} * kind + CASE ? WHEN 'equal' THEN 1 ELSE priority END,
        charged_cost = NULL, charged_weight = NULL, charge = NULL,
        returned = (state = {WAITING})
    WHERE state IN ({DELAYED}, {WAITING}, {RUNNING})"""
_CLEAR_FLOWS = """
    DELETE FROM flows;
    UPDATE levels SET clock = 0, weight = 0, kind_time = 0, last_claim = 0, level_time = 0"""
_RUNNING_BY_FLOW = f"""
    SELECT d.customer, d.level, count(*) FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence GROUP BY d.customer, d.level"""
_WAITING_BY_FLOW = """
    SELECT customer, level, min(order_number), count(*)
    FROM documents INDEXED BY documents_returned
    WHERE returned = 1 GROUP BY customer, level ORDER BY 3"""


def configure(
    connection: apsw.Connection,
    queue: QueueRow,
    settings: Settings,
    expected: Settings | None,
    *,
    now: int,
    uptime: Uptime,
) -> bool:
    """Replace the settings; return False if the stored ones are not `expected`."""
    if expected is not None and expected != queue.settings:
        return False
    if settings.mode is not queue.settings.mode:
        _change_mode(connection, queue, settings, now, uptime)
    connection.execute(_CONFIGURE, (settings.to_json(),))
    connection.execute(INVALIDATE_SCHEDULER)
    return True


def adjust(
    connection: apsw.Connection,
    customer: str,
    settings: CustomerSettings,
    expected: CustomerSettings | None,
    now: int,
) -> bool:
    """Replace the settings of a customer; return False if the stored ones are not `expected`."""
    values = _customer_columns(settings)
    if expected is not None:
        stored = connection.execute(_CUSTOMER_SETTINGS, (customer,)).fetchone()
        if (stored or _customer_columns(CustomerSettings())) != _customer_columns(expected):
            return False
    number = connection.execute(_ADJUST, (customer, *values)).get
    connection.execute(_USE_CUSTOMER, (number,))
    connection.execute(COUNT_COUNTED)
    record(connection, now, [SettingsEvent(number, *values[:3])])
    return True


def _customer_columns(settings: CustomerSettings) -> tuple[int, int | None, bool, int | None]:
    weight = weight_in_thousandths(settings.weight)
    return weight, settings.limit, settings.paused, settings.bytes_max


def _change_mode(
    connection: apsw.Connection, queue: QueueRow, settings: Settings, now: int, uptime: Uptime
) -> None:
    """Fold all events in the old mode, then build the flows of the new one.

    All waiting documents are marked as returned, so that the new flows find them without scanning
    ended documents. Later documents have higher orders.
    """
    state = SchedulerState()
    changes = CounterChanges()
    state.apply_events(connection, queue, changes, now=now, uptime=uptime)
    state.save(connection, queue, changes)
    heads = {(c, kind_of(band)): since for c, band, since in connection.execute(_HEADS)}
    connection.execute(_RELEVEL, (settings.mode,))
    connection.execute(_CLEAR_FLOWS)

    queue.settings = settings
    state = SchedulerState()
    changes = CounterChanges()
    turns = state.apply_events(connection, queue, changes, now=now, uptime=uptime)
    for customer, band, n in fetch(connection, _RUNNING_BY_FLOW):
        turns.apply(RunningEvent(customer, band, n), now)
    for customer, band, order, n in fetch(connection, _WAITING_BY_FLOW):
        changes.flows[customer, band] = n
        since = heads.get((customer, kind_of(band)), now)
        turns.apply(ArrivalEvent(customer, band, order, n), since)
    for customer in turns.customers:
        state.expect_after(customer, queue.next_number - 1)
    state.save(connection, queue, changes)


_SET_KIND = """
    UPDATE kinds SET running_max = ?, paused = ?, attempts_max = ?, expires_in_us = ?
    WHERE number = ?"""


def configure_kind(
    connection: apsw.Connection, name: str, settings: KindSettings, expected: KindSettings | None
) -> bool:
    """Replace the settings of a kind; return False if the stored ones are not `expected`."""
    found = read_kinds(connection, [name])
    stored = found[0].settings if found else KindSettings()
    if expected is not None and expected != stored:
        return False
    number = found[0].number if found else create_kinds(connection, [name])[name]
    values = (settings.limit, settings.paused, settings.attempts_max, settings.expires_in_us)
    connection.execute(_SET_KIND, (*values, number))
    return True


def create_kinds(connection: apsw.Connection, names: Iterable[str]) -> dict[str, int]:
    """Create those of these kinds that do not exist; return the numbers of all kinds."""
    known = kind_numbers(connection)
    for name in sorted(set(names) - known.keys()):
        refuse_kind_beyond_max(name, len(known))
        known[name] = create_kind(connection, name)
    return known


_KEY_COLUMNS = "id, role, customer, name, digest, made_at, used_at, ends_at"
_ADD_KEY = f"INSERT INTO access_keys ({_KEY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_COUNT_KEYS = "SELECT count(*) FROM access_keys"
_KEY = f"SELECT {_KEY_COLUMNS} FROM access_keys WHERE id = ?"
_KEYS = f"SELECT {_KEY_COLUMNS} FROM access_keys WHERE id > ? ORDER BY id LIMIT ?"
# By access_keys_customer.
_KEYS_OF_CUSTOMER = (
    f"SELECT {_KEY_COLUMNS} FROM access_keys WHERE customer = ? AND id > ? ORDER BY id LIMIT ?"
)
_REVOKE_KEY = "UPDATE access_keys SET ends_at = min(coalesce(ends_at, ?1), ?1) WHERE id = ?2"
_USE_KEY = "UPDATE access_keys SET used_at = max(coalesce(used_at, ?1), ?1) WHERE id = ?2"
_DELETE_KEYS = "DELETE FROM access_keys WHERE customer = ?"
_SIGN_ON = "INSERT OR REPLACE INTO workers (name, seen_at, slots, kinds) VALUES (?, ?, ?, ?)"
_SIGN_OFF = "DELETE FROM workers WHERE name = ?"
_WORKERS = "SELECT name, seen_at, slots, kinds FROM workers ORDER BY name LIMIT ?"


def add_key(connection: apsw.Connection, key: AccessKey) -> None:
    if connection.execute(_COUNT_KEYS).get >= ACCESS_KEYS_MAX:
        raise ValueError(f"there are {ACCESS_KEYS_MAX:,} keys already; no more are allowed")
    if connection.execute(_KEY, (key.id,)).fetchone() is not None:
        raise ValueError(f"there is a key {key.id} already")
    connection.execute(_ADD_KEY, tuple(key))


def find_key(connection: apsw.Connection, id: str) -> AccessKey | None:
    row = connection.execute(_KEY, (id,)).fetchone()
    return None if row is None else _key(row)


def list_keys(
    connection: apsw.Connection, customer: str | None, after: str | None, size: int
) -> list[AccessKey]:
    if customer is None:
        rows = connection.execute(_KEYS, (after or "", size))
    else:
        rows = connection.execute(_KEYS_OF_CUSTOMER, (customer, after or "", size))
    return [_key(row) for row in rows]


def revoke_key(connection: apsw.Connection, id: str, at: int) -> AccessKey | None:
    """Revoke a key at a time, unless it ends earlier."""
    connection.execute(_REVOKE_KEY, (at, id))
    return find_key(connection, id)


def record_key_use(connection: apsw.Connection, id: str, at: int) -> None:
    connection.execute(_USE_KEY, (at, id))


def workers(connection: apsw.Connection) -> list[WorkerHeartbeat]:
    return [
        WorkerHeartbeat(name, seen_at, slots, None if kinds is None else tuple(json.loads(kinds)))
        for name, seen_at, slots, kinds in connection.execute(_WORKERS, (WORKERS_MAX,))
    ]


def sign_on(
    connection: apsw.Connection, seen: WorkerHeartbeat, needs: Mapping[str, Sequence[str]]
) -> None:
    """Record a heartbeat and the services that kinds need, and create the kinds that it names."""
    if seen.kinds is not None or needs:
        numbers = create_kinds(connection, (*(seen.kinds or ()), *needs))
        for kind, services in needs.items():
            outages.register(connection, numbers[kind], services)
    kinds = None if seen.kinds is None else compact_json(seen.kinds)
    connection.execute(_SIGN_ON, (*seen[:-1], kinds))


def sign_off(connection: apsw.Connection, worker: str) -> None:
    connection.execute(_SIGN_OFF, (worker,))


def _key(row: tuple[str, ...]) -> AccessKey:
    key = AccessKey._make(row)
    return key._replace(role=Role(key.role))


# Rows that a batch examines, for each that it may delete.
_LOOKS = 10

# How far a clock may have stepped back between a submission and its end.
_STEP_US = 24 * 3_600 * 1_000_000

# The position of a round that has examined all documents, or all customers.
_DONE = -1
_POSITION = "SELECT documents_pruned_to, customers_pruned_to FROM queue"
# `prunes` shows the triggers of the schema that this release knows all tables.
_SET_POSITION = """
    UPDATE queue SET documents_pruned_to = ?, customers_pruned_to = ?, prunes = prunes + 1"""

# By the primary keys: the oldest after the last batch.
_OLDEST_DOCUMENTS = """
    SELECT number, state, ended_at, submitted_at FROM documents
    WHERE number > ? ORDER BY number LIMIT ?"""
_OLDEST_CUSTOMERS = "SELECT number FROM customers WHERE number > ? ORDER BY number LIMIT ?"
_CONTENTS = """
    SELECT content_name FROM documents WHERE number = ?1 AND content_name IS NOT NULL
    UNION ALL
    SELECT content_name FROM results WHERE document = ?1 AND content_name IS NOT NULL
    UNION ALL
    SELECT content_name FROM attempts WHERE document = ?1 AND content_name IS NOT NULL"""
_BYTES_OF_DOCUMENT = f"SELECT customer, {STORED_BYTES} FROM documents WHERE number = ?"
_RELEASE_BYTES = "UPDATE customers SET stored_bytes = stored_bytes - ? WHERE number = ?"
# A trigger deletes attempts, checkpoints and expirations.
_DELETE = (
    "DELETE FROM bodies WHERE document = ?",
    "DELETE FROM results WHERE document = ?",
    "DELETE FROM documents WHERE number = ?",
)
# By idempotency_keys_age.
_OLD_KEYS = """
    DELETE FROM idempotency_keys WHERE (customer, key) IN (
        SELECT customer, key FROM idempotency_keys WHERE submitted_at < ? LIMIT ?)"""
_OLD_WORKERS = "DELETE FROM workers WHERE seen_at < ?"
_BUSY = f"""
    SELECT DISTINCT d.customer FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence"""
_IDLE_FLOWS = """
    DELETE FROM flows WHERE customer = ? AND waiting = 0 AND folded = 0
        AND (? OR place <= coalesce(
            (SELECT clock FROM levels WHERE levels.level = flows.level), 0))"""
# By documents_flow, and the primary keys.
_IDLE_CUSTOMER = """
    DELETE FROM customers WHERE number = ?1
        AND weight = 1000 AND running_max IS NULL AND paused = 0 AND bytes_max IS NULL
        AND (count_updated_at IS NULL OR count_updated_at < ?2)
        AND NOT EXISTS (SELECT 1 FROM documents WHERE customer = ?1)
        AND NOT EXISTS (SELECT 1 FROM flows WHERE customer = ?1)
        AND NOT EXISTS (SELECT 1 FROM customer_states WHERE customer = ?1)
        AND NOT EXISTS (SELECT 1 FROM idempotency_keys WHERE customer = ?1)"""

_CUSTOMER_NUMBER = "SELECT number FROM customers WHERE name = ?"
_CUSTOMER_DOCUMENTS = """
    SELECT number, state, level, priority, fence FROM documents INDEXED BY documents_flow
    WHERE customer = ?"""
_DELETE_CUSTOMER = (
    "DELETE FROM idempotency_keys WHERE customer = ?",
    "DELETE FROM flows WHERE customer = ? AND folded = 0",
    "DELETE FROM customers WHERE number = ?",
)
# False from a purge until the write-ahead log is truncated.
_MARK_NOT_ERASED = "UPDATE queue SET is_erased = 0"
_IS_ERASED = "SELECT is_erased FROM queue"
_NOTE_ERASED = "UPDATE queue SET is_erased = 1"
_REFERENCED = """
    SELECT EXISTS (SELECT 1 FROM documents WHERE content_name = ?1)
        OR EXISTS (SELECT 1 FROM results WHERE content_name = ?1)
        OR EXISTS (SELECT 1 FROM attempts WHERE content_name = ?1)"""


def prune(
    connection: apsw.Connection, queue: QueueRow, now: int, documents_max: int
) -> list[str] | None:
    """Delete one batch of a round over all documents, then all customers. Return None at the end of
    a round whose last batch deleted nothing."""
    before = connection.total_changes()
    contents: list[str] = []
    ((documents_from, customers_from),) = fetch(connection, _POSITION)
    if documents_from != _DONE:
        contents, documents_from = _prune_documents(
            connection, queue, now, documents_from, documents_max
        )
    if documents_from == _DONE:
        connection.execute(_OLD_KEYS, (now - KEY_KEPT_US, documents_max))
        connection.execute(_OLD_WORKERS, (now - WORKERS_KEPT_US,))
        if queue.has_outages:
            _prune_outages(connection, now)
        customers_from = _prune_customers(connection, queue, now, customers_from, documents_max)
    is_complete = documents_from == customers_from == _DONE
    changed = connection.total_changes() != before
    position = (0, 0) if is_complete else (documents_from, customers_from)
    connection.execute(_SET_POSITION, position)
    return None if is_complete and not changed else contents


def _prune_documents(
    connection: apsw.Connection, queue: QueueRow, now: int, begin: int, documents_max: int
) -> tuple[list[str], int]:
    """Delete documents past their retention, and return where the next batch begins."""
    oldest = {CODES[state]: now - queue.settings.kept_us(state) for state in ENDED}
    newest = max(oldest.values()) + _STEP_US
    old: list[tuple[int]] = []
    looks = _LOOKS * documents_max
    for number, state, ended_at, submitted_at in fetch(
        connection, _OLDEST_DOCUMENTS, (begin, looks)
    ):
        looks -= 1
        if submitted_at >= newest:
            break  # all later documents are too young
        begin = number
        if state in oldest and ended_at < oldest[state]:
            old.append((number,))
            if len(old) == documents_max:
                return _delete(connection, old), begin
    else:
        if looks == 0:
            return _delete(connection, old), begin
    return _delete(connection, old), _DONE


def _prune_outages(connection: apsw.Connection, now: int) -> None:
    services = StoredServices(connection)
    services.prune(now)
    services.save()


def _prune_customers(
    connection: apsw.Connection, queue: QueueRow, now: int, begin: int, customers_max: int
) -> int:
    """Delete idle customers, and return where the next batch begins.

    A customer with running documents or unfolded events is not idle.
    """
    customers = [n for (n,) in fetch(connection, _OLDEST_CUSTOMERS, (begin, customers_max))]
    busy = {n for (n,) in fetch(connection, _BUSY)} | customers_in_events(connection)
    by_order = queue.settings.mode is Mode.LEVELS
    oldest = now - queue.settings.rule.reset_interval_us
    before = connection.total_changes()
    idle = [(number, by_order) for number in customers if number not in busy]
    if queue.settings.costs is not Costs.LEARNED:  # as in `Turns.forgettable`
        connection.executemany(_IDLE_FLOWS, idle)
    if connection.total_changes() != before:
        connection.execute(INVALIDATE_SCHEDULER)
    connection.executemany(_IDLE_CUSTOMER, [(number, oldest) for number, _ in idle])
    return customers[-1] if len(customers) == customers_max else _DONE


def purge(connection: apsw.Connection, queue: QueueRow, name: str, now: int) -> list[str]:
    """Delete a customer, and return the names of contents that can now be deleted."""
    connection.execute(_DELETE_KEYS, (name,))
    connection.execute(_MARK_NOT_ERASED)
    customer = connection.execute(_CUSTOMER_NUMBER, (name,)).get
    if customer is None:
        return []
    changes = CounterChanges()
    fences = []
    rows = fetch(connection, _CUSTOMER_DOCUMENTS, (customer,))
    for _, state, band, priority, fence in rows:
        if state == WAITING:
            changes.wait(customer, band, priority, -1)
        elif state == DELAYED:
            changes.delay(customer, -1)
        elif state == RUNNING:
            fences.append(fence)
    contents = _delete(connection, [(row[0],) for row in rows])
    leave_leases(connection, fences)
    add_outcome_counters(connection, OutcomeCounters(attempts=len(fences)))
    changes.write(connection, queue.next_number)
    for statement in _DELETE_CUSTOMER:
        connection.execute(statement, (customer,))
    record(connection, now, [PurgeEvent(customer)])
    connection.execute(COUNT_COUNTED)
    connection.execute(INVALIDATE_SCHEDULER)
    return contents


def is_erased(connection: apsw.Connection) -> bool:
    """Return whether the write-ahead log was truncated since the last purge."""
    return bool(connection.execute(_IS_ERASED).get)


def note_erased(connection: apsw.Connection) -> None:
    connection.execute(_NOTE_ERASED)


def _delete(connection: apsw.Connection, numbers: Sequence[tuple[int]]) -> list[str]:
    if not numbers:
        return []
    contents = [name for (name,) in connection.executemany(_CONTENTS, numbers)]
    released: Counter[int] = Counter()
    for customer, size_bytes in connection.executemany(_BYTES_OF_DOCUMENT, numbers):
        released[customer] += size_bytes
    connection.executemany(_RELEASE_BYTES, [(n, customer) for customer, n in released.items()])
    for statement in _DELETE:
        connection.executemany(statement, numbers)
    return contents


def unreferenced(connection: apsw.Connection, content_names: Sequence[str]) -> list[str]:
    """Return the contents that no document, result or step refers to."""
    return [n for n in content_names if not connection.execute(_REFERENCED, (n,)).get]


_PROBE = "UPDATE queue SET probed_at = ?"
_PROBED_AT = "SELECT probed_at FROM queue"


def probe(connection: apsw.Connection, now: int) -> None:
    """Write a row and read it."""
    connection.execute(_PROBE, (now,))
    assert connection.execute(_PROBED_AT).get == now
