"""Forgetting: what nobody needs any more, in small batches, and a customer who leaves."""

from collections.abc import Sequence

from fairturn.flows import Costs, Mode, Purged
from fairturn.model import ENDED, KEY_KEPT_US
from fairturn.situation import WORKERS_KEPT_US
from fairturn.stores.ends import Ends
from fairturn.stores.postgres.admitting import FORGET_KEYS
from fairturn.stores.postgres.rows import (
    FORGET_TURNS,
    LOCK_QUEUE,
    MOMENT,
    QUEUE,
    Moves,
    QueueRow,
    add_ends,
    count_change,
    record,
    to_queue,
)
from fairturn.stores.postgres.session import BEGIN, SHARE_SETTINGS, Session
from fairturn.stores.postgres.sharing import FORGET_WISHES
from fairturn.stores.values import (
    CODES,
    DELAYED,
    RUNNING,
    WAITING,
    SettingsCache,
)

# How many rows one batch looks at for each that it may delete.
_LOOKS = 10

# How far a clock may have stepped back between a submission and its end.
_STEP_US = 24 * 3_600 * 1_000_000

# Where a round stands when it has been through all documents, or all customers.
_DONE = -1
_NOW = f"SELECT {MOMENT}"
_ROUND = "SELECT documents, customers FROM fairturn.pruning FOR UPDATE"
_GO_ON_FROM = "UPDATE fairturn.pruning SET documents = %s, customers = %s"

# By the primary keys: from where the last batch ended, the oldest first.
_DOCUMENTS = """
    SELECT number, state, ended_at, submitted_at FROM fairturn.documents
    WHERE number > %s ORDER BY number LIMIT %s"""
_CUSTOMERS = """
    SELECT number FROM fairturn.customers WHERE number > %s ORDER BY number LIMIT %s"""
_CONTENTS = """
    SELECT content_name FROM fairturn.documents
    WHERE number = ANY (%(numbers)s) AND content_name IS NOT NULL
    UNION ALL
    SELECT content_name FROM fairturn.results
    WHERE document = ANY (%(numbers)s) AND content_name IS NOT NULL"""
_DELETE = (
    "DELETE FROM fairturn.results WHERE document = ANY (%s)",
    "DELETE FROM fairturn.children WHERE parent = ANY (%s)",
    "DELETE FROM fairturn.documents WHERE number = ANY (%s)",
)
# By keys_age.
_OLD_KEYS = """
    DELETE FROM fairturn.keys WHERE (customer, key) IN (
        SELECT customer, key FROM fairturn.keys WHERE submitted_at < %s LIMIT %s)"""
_OLD_WORKERS = "DELETE FROM fairturn.workers WHERE seen_at < %s"
# Customers that somebody submits for are not idle; nobody waits for them.
_LOCK_CUSTOMERS = """
    SELECT number FROM fairturn.customers WHERE number = ANY (%s)
    ORDER BY name FOR UPDATE SKIP LOCKED"""
_BUSY = f"""
    SELECT d.customer FROM fairturn.leases l
        JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE d.state = {RUNNING} AND d.fence = l.fence
    UNION
    SELECT unnest(customers) FROM fairturn.recorded
    UNION
    SELECT customer FROM fairturn.moved"""
# What was taken in a flow goes with it, and so what had arrived there.
_IDLE_FLOWS = """
    WITH idle AS (
        DELETE FROM fairturn.flows f WHERE customer = ANY (%s) AND folded = 0
            AND (%s OR place <= (
                SELECT clocks[f.level] FROM fairturn.turns ORDER BY version DESC LIMIT 1))
        RETURNING customer, level, taken),
    less AS (
        SELECT customer, ARRAY(
            SELECT coalesce((SELECT sum(taken) FROM idle i
                WHERE i.customer = o.customer AND i.level = p), 0)
            FROM generate_series(1, 9) p ORDER BY p)::bigint[] AS taken
        FROM (SELECT DISTINCT customer FROM idle) o)
    UPDATE fairturn.customers c SET arrived = {arrived} FROM less WHERE c.number = less.customer
    RETURNING c.number"""
_IDLE_LEVELS = _IDLE_FLOWS.format(
    arrived="ARRAY(SELECT a - t FROM unnest(c.arrived, less.taken) AS b(a, t))"
)
# In mode `equal` the one flow has all priorities; nothing waits in it.
_IDLE_ONLY = _IDLE_FLOWS.format(arrived="array_fill(0::bigint, ARRAY[9])")
# By documents_flow, and the primary keys.
_IDLE_CUSTOMERS = """
    DELETE FROM fairturn.customers c WHERE number = ANY (%s)
        AND weight = 1000 AND running_max IS NULL AND NOT paused
        AND (count_updated_at IS NULL OR count_updated_at < %s)
        AND NOT EXISTS (SELECT 1 FROM fairturn.documents d WHERE d.customer = c.number)
        AND NOT EXISTS (SELECT 1 FROM fairturn.flows f WHERE f.customer = c.number)
        AND NOT EXISTS (SELECT 1 FROM fairturn.standings s WHERE s.customer = c.number)
        AND NOT EXISTS (SELECT 1 FROM fairturn.keys k WHERE k.customer = c.number)
    RETURNING number"""
_UNLIMITED = "DELETE FROM fairturn.limited WHERE customer = ANY (%s)"

_CUSTOMER_NUMBER = "SELECT number FROM fairturn.customers WHERE name = %s FOR UPDATE"
# By documents_flow. Whoever holds the queue waits for no document, but tries again.
_ITS_DOCUMENTS = """
    SELECT number, state, level, priority, fence FROM fairturn.documents
    WHERE customer = %s ORDER BY number FOR UPDATE NOWAIT"""
_LEAVE_LEASES = """
    UPDATE fairturn.leases SET running = running - 1 WHERE fence = %s"""
_END_LEASES = "DELETE FROM fairturn.leases WHERE running <= 0"
_FORGET_CUSTOMER = (
    "DELETE FROM fairturn.keys WHERE customer = %s",
    "DELETE FROM fairturn.flows WHERE customer = %s AND folded = 0",
    "DELETE FROM fairturn.customers WHERE number = %s",
)
_REFERENCED = """
    SELECT n FROM unnest(%s::text[]) AS n
    WHERE EXISTS (SELECT 1 FROM fairturn.documents WHERE content_name = n)
        OR EXISTS (SELECT 1 FROM fairturn.results WHERE content_name = n)"""


def prune(
    session: Session, cache: SettingsCache, moment: int | None, documents_max: int
) -> list[str] | None:
    """One batch of a round over all documents, then all customers; None at the end of a round
    whose last batch found nothing to forget."""
    with session.together():
        session.ask(BEGIN)
        round_ = session.ask(_ROUND)
        told = session.ask(QUEUE)
        told_now = session.ask(_NOW, (moment,))
    ((documents_from, customers_from),) = round_.fetchall()
    queue = to_queue(told.fetchall()[0], cache)
    ((now,),) = told_now.fetchall()
    batch = _Batch(session, queue, now, documents_max)
    contents: list[str] = []
    if documents_from != _DONE:
        contents, documents_from = batch.prune_documents(documents_from)
    if documents_from == _DONE:
        batch.changed += session.ask(_OLD_KEYS, (now - KEY_KEPT_US, documents_max)).rowcount
        batch.changed += session.ask(_OLD_WORKERS, (now - WORKERS_KEPT_US,)).rowcount
        session.ask(FORGET_WISHES)
        customers_from = batch.prune_customers(customers_from)
    at_the_end = documents_from == customers_from == _DONE
    place = (0, 0) if at_the_end else (documents_from, customers_from)
    with session.commit("prune"):
        session.ask(_GO_ON_FROM, place)
        if batch.changed:
            count_change(session)
    return None if at_the_end and not batch.changed else contents


class _Batch:
    def __init__(self, session: Session, queue: QueueRow, now: int, documents_max: int) -> None:
        self._session = session
        self._queue = queue
        self._now = now
        self._documents_max = documents_max
        self.changed = 0  # rows

    def prune_documents(self, begin: int) -> tuple[list[str], int]:
        """Delete what is past its age, and say where the next batch begins."""
        settings = self._queue.settings
        oldest = {CODES[state]: self._now - settings.kept_us(state) for state in ENDED}
        newest = max(oldest.values()) + _STEP_US
        old: list[int] = []
        looks = _LOOKS * self._documents_max
        rows = self._session.fetch(_DOCUMENTS, (begin, looks))
        for number, state, ended_at, submitted_at in rows:
            looks -= 1
            if submitted_at >= newest:
                break  # what comes now is too young to be past any age
            begin = number
            if state in oldest and ended_at < oldest[state]:
                old.append(number)
                if len(old) == self._documents_max:
                    return self._delete(old), begin
        else:
            if looks == 0:
                return self._delete(old), begin
        return self._delete(old), _DONE

    def _delete(self, numbers: list[int]) -> list[str]:
        self.changed += len(numbers)
        return _delete(self._session, numbers)

    def prune_customers(self, begin: int) -> int:
        """Forget the idle ones among the next customers, and say where the next batch begins.

        A customer is not idle while documents of it run, or while something is to be folded in."""
        session, queue = self._session, self._queue
        customers = [n for (n,) in session.fetch(_CUSTOMERS, (begin, self._documents_max))]
        with session.together():
            locked = session.ask(_LOCK_CUSTOMERS, (customers,))
            session.ask(LOCK_QUEUE, (self._now,))
            told_busy = session.ask(_BUSY)
        busy = {n for (n,) in told_busy.fetchall()}
        idle = [n for (n,) in locked.fetchall() if n not in busy]
        if queue.settings.costs is not Costs.LEARNED:  # as `Turns.forgettable` says
            statement = _IDLE_ONLY if queue.settings.mode is Mode.EQUAL else _IDLE_LEVELS
            by_order = queue.settings.mode is Mode.LEVELS
            changed = len(session.fetch(statement, (idle, by_order)))
            if changed:
                session.ask(FORGET_TURNS)
            self.changed += changed
        oldest = self._now - queue.settings.rule.reset_interval_us
        gone = [n for (n,) in session.fetch(_IDLE_CUSTOMERS, (idle, oldest))]
        session.ask(_UNLIMITED, (gone,))
        self.changed += len(gone)
        return customers[-1] if len(customers) == self._documents_max else _DONE


def purge(session: Session, name: str, moment: int | None) -> list[str]:
    """Delete a customer with everything; the contents that can now be deleted."""
    with session.together():
        session.ask(BEGIN)
        session.ask(SHARE_SETTINGS)
        asked = session.ask(_CUSTOMER_NUMBER, (name,))
        locked = session.ask(LOCK_QUEUE, (moment,))
    found = asked.fetchall()
    now = locked.fetchall()[0][3]
    contents: list[str] = []
    if not found:
        with session.commit("prune"):
            session.ask(FORGET_KEYS, (name,))
        return contents
    ((customer,),) = found
    rows = session.fetch(_ITS_DOCUMENTS, (customer,))
    moves = Moves()
    contents = _delete(session, [row[0] for row in rows])
    with session.commit("prune"):
        for _, state, level, priority, fence in rows:
            if state == WAITING:
                moves.wait(customer, level, priority, -1)
            elif state == DELAYED:
                moves.delay(customer, level, priority, -1)
            elif state == RUNNING:
                session.ask(_LEAVE_LEASES, (fence,))
        session.ask(_END_LEASES)
        add_ends(session, Ends(attempts=sum(row[1] == RUNNING for row in rows)))
        moves.write(session)
        for statement in _FORGET_CUSTOMER:
            session.ask(statement, (customer,))
        session.ask(FORGET_KEYS, (name,))
        record(session, now, [Purged(customer)])
        session.ask(FORGET_TURNS)
        count_change(session)
    return contents


def _delete(session: Session, numbers: list[int]) -> list[str]:
    if not numbers:
        return []
    with session.together():
        asked = session.ask(_CONTENTS, {"numbers": numbers})
        for statement in _DELETE:
            session.ask(statement, (numbers,))
    return [name for (name,) in asked.fetchall()]


def unreferenced(session: Session, content_names: Sequence[str]) -> list[str]:
    """Which of these contents belong to no document."""
    used = {name for (name,) in session.fetch(_REFERENCED, (list(content_names),))}
    return [name for name in content_names if name not in used]
