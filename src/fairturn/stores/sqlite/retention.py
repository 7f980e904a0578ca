"""Forgetting: what nobody needs any more, in small batches, and a customer who leaves."""

from collections.abc import Sequence

import apsw

from fairturn.explain.snapshot import WORKERS_KEPT_US
from fairturn.model import ENDED, KEY_KEPT_US
from fairturn.scheduling.flows import Costs, Mode, Purged
from fairturn.stores.outcome_counters import Ends
from fairturn.stores.sqlite.counters import Tally
from fairturn.stores.sqlite.finish import leave_leases
from fairturn.stores.sqlite.rows import (
    COUNT_COUNTED,
    FORGET_TURNS,
    QueueRow,
    add_ends,
    customers_in_recorded,
    fetch,
    record,
)
from fairturn.stores.values import CODES, DELAYED, RUNNING, WAITING

# How many rows one batch looks at for each that it may delete.
_LOOKS = 10

# How far a clock may have stepped back between a submission and its end.
_STEP_US = 24 * 3_600 * 1_000_000

# Where a round stands when it has been through all documents, or all customers.
_DONE = -1
_ROUND = "SELECT documents_pruned_to, customers_pruned_to FROM queue"
_GO_ON_FROM = "UPDATE queue SET documents_pruned_to = ?, customers_pruned_to = ?"

# By the primary keys: from where the last batch ended, the oldest first.
_DOCUMENTS = """
    SELECT number, state, ended_at, submitted_at FROM documents
    WHERE number > ? ORDER BY number LIMIT ?"""
_CUSTOMERS = "SELECT number FROM customers WHERE number > ? ORDER BY number LIMIT ?"
_CONTENTS = """
    SELECT content_name FROM documents WHERE number = ?1 AND content_name IS NOT NULL
    UNION ALL
    SELECT content_name FROM results WHERE document = ?1 AND content_name IS NOT NULL"""
_DELETE = (
    "DELETE FROM bodies WHERE document = ?",
    "DELETE FROM results WHERE document = ?",
    "DELETE FROM documents WHERE number = ?",
)
# By keys_age.
_OLD_KEYS = """
    DELETE FROM keys WHERE (customer, key) IN (
        SELECT customer, key FROM keys WHERE submitted_at < ? LIMIT ?)"""
_OLD_WORKERS = "DELETE FROM workers WHERE seen_at < ?"
_BUSY = f"""
    SELECT DISTINCT d.customer FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence"""
_IDLE_FLOWS = """
    DELETE FROM flows WHERE customer = ? AND waiting = 0 AND folded = 0
        AND (? OR place <= (SELECT clock FROM levels WHERE levels.level = flows.level))"""
# By documents_flow, and the primary keys of flows, standings and keys.
_IDLE_CUSTOMER = """
    DELETE FROM customers WHERE number = ?1
        AND weight = 1000 AND running_max IS NULL AND paused = 0
        AND (count_updated_at IS NULL OR count_updated_at < ?2)
        AND NOT EXISTS (SELECT 1 FROM documents WHERE customer = ?1)
        AND NOT EXISTS (SELECT 1 FROM flows WHERE customer = ?1)
        AND NOT EXISTS (SELECT 1 FROM standings WHERE customer = ?1)
        AND NOT EXISTS (SELECT 1 FROM keys WHERE customer = ?1)"""

_CUSTOMER_NUMBER = "SELECT number FROM customers WHERE name = ?"
_ITS_DOCUMENTS = """
    SELECT number, state, level, priority, fence FROM documents INDEXED BY documents_flow
    WHERE customer = ?"""
_FORGET_CUSTOMER = (
    "DELETE FROM keys WHERE customer = ?",
    "DELETE FROM flows WHERE customer = ? AND folded = 0",
    "DELETE FROM customers WHERE number = ?",
)
_REFERENCED = """
    SELECT EXISTS (SELECT 1 FROM documents WHERE content_name = ?1)
        OR EXISTS (SELECT 1 FROM results WHERE content_name = ?1)"""


def prune(
    connection: apsw.Connection, queue: QueueRow, now: int, documents_max: int
) -> list[str] | None:
    """One batch of a round over all documents, then all customers; None at the end of a round
    whose last batch found nothing to forget."""
    before = connection.total_changes()
    contents: list[str] = []
    ((documents_from, customers_from),) = fetch(connection, _ROUND)
    if documents_from != _DONE:
        contents, documents_from = _prune_documents(
            connection, queue, now, documents_from, documents_max
        )
    if documents_from == _DONE:
        connection.execute(_OLD_KEYS, (now - KEY_KEPT_US, documents_max))
        connection.execute(_OLD_WORKERS, (now - WORKERS_KEPT_US,))
        customers_from = _prune_customers(connection, queue, now, customers_from, documents_max)
    at_the_end = documents_from == customers_from == _DONE
    changed = connection.total_changes() != before
    place = (0, 0) if at_the_end else (documents_from, customers_from)
    connection.execute(_GO_ON_FROM, place)
    return None if at_the_end and not changed else contents


def _prune_documents(
    connection: apsw.Connection, queue: QueueRow, now: int, begin: int, documents_max: int
) -> tuple[list[str], int]:
    """Delete what is past its age, and say where the next batch begins."""
    oldest = {CODES[state]: now - queue.settings.kept_us(state) for state in ENDED}
    newest = max(oldest.values()) + _STEP_US
    old: list[tuple[int]] = []
    looks = _LOOKS * documents_max
    for number, state, ended_at, submitted_at in fetch(connection, _DOCUMENTS, (begin, looks)):
        looks -= 1
        if submitted_at >= newest:
            break  # what comes now is too young to be past any age
        begin = number
        if state in oldest and ended_at < oldest[state]:
            old.append((number,))
            if len(old) == documents_max:
                return _delete(connection, old), begin
    else:
        if looks == 0:
            return _delete(connection, old), begin
    return _delete(connection, old), _DONE


def _prune_customers(
    connection: apsw.Connection, queue: QueueRow, now: int, begin: int, customers_max: int
) -> int:
    """Forget the idle ones among the next customers, and say where the next batch begins.

    A customer is not idle while documents of it run, or while something is to be folded in."""
    customers = [n for (n,) in fetch(connection, _CUSTOMERS, (begin, customers_max))]
    busy = {n for (n,) in fetch(connection, _BUSY)} | customers_in_recorded(connection)
    by_order = queue.settings.mode is Mode.LEVELS
    oldest = now - queue.settings.rule.reset_interval_us
    before = connection.total_changes()
    idle = [(number, by_order) for number in customers if number not in busy]
    if queue.settings.costs is not Costs.LEARNED:  # as `Turns.forgettable` says
        connection.executemany(_IDLE_FLOWS, idle)
    if connection.total_changes() != before:
        connection.execute(FORGET_TURNS)
    connection.executemany(_IDLE_CUSTOMER, [(number, oldest) for number, _ in idle])
    return customers[-1] if len(customers) == customers_max else _DONE


def purge(connection: apsw.Connection, queue: QueueRow, name: str, now: int) -> list[str]:
    """Delete a customer with everything; the contents that can now be deleted."""
    customer = connection.execute(_CUSTOMER_NUMBER, (name,)).get
    if customer is None:
        return []
    tally = Tally()
    fences = []
    rows = fetch(connection, _ITS_DOCUMENTS, (customer,))
    for _, state, level, priority, fence in rows:
        if state == WAITING:
            tally.wait(customer, level, priority, -1)
        elif state == DELAYED:
            tally.delay(customer, -1)
        elif state == RUNNING:
            fences.append(fence)
    contents = _delete(connection, [(row[0],) for row in rows])
    leave_leases(connection, fences)
    add_ends(connection, Ends(attempts=len(fences)))
    tally.write(connection, queue.next_number)
    for statement in _FORGET_CUSTOMER:
        connection.execute(statement, (customer,))
    record(connection, now, [Purged(customer)])
    connection.execute(COUNT_COUNTED)
    connection.execute(FORGET_TURNS)
    return contents


def _delete(connection: apsw.Connection, numbers: Sequence[tuple[int]]) -> list[str]:
    if not numbers:
        return []
    contents = [name for (name,) in connection.executemany(_CONTENTS, numbers)]
    for statement in _DELETE:
        connection.executemany(statement, numbers)
    return contents


def unreferenced(connection: apsw.Connection, content_names: Sequence[str]) -> list[str]:
    """Which of these contents belong to no document."""
    return [n for n in content_names if not connection.execute(_REFERENCED, (n,)).get]
