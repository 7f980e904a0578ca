"""The claim, from its transaction to the claimed documents.

`Claimer.claim` runs one transaction: it records outcomes, folds expired leases, events and due
documents into the scheduler state, picks documents in the order of `scheduling/turns.py`, and
writes the picked documents, their lease and the changed flows. It also returns the cancels that no
claim has reported. `flows.py` reads and writes flows and clocks.

A claim that came up short compares, once a minute, the counters of all flows with what it has
folded. If the flows of a customer do not agree with its documents, the transaction is rolled back,
`repair.repair_customers` rebuilds the customer, and the claim is repeated. If more documents have
expired than one transaction records, the claim is repeated after they have been recorded.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import apsw

from fairturn.clock import NO_BOOT, SECOND_US, Clock, Uptime
from fairturn.errors import StoreError
from fairturn.model import (
    CANCELS_REPORTED_MAX,
    EXPIRE_MAX,
    LEASE_US_MAX,
    Claim,
    Claimed,
    Document,
    Outcome,
    State,
)
from fairturn.scheduling.flows import (
    ArrivalEvent,
    CancelEvent,
    Event,
    EventBatch,
    FlowMismatch,
    Pick,
    PurgeEvent,
    SettingsEvent,
    kind_of,
)
from fairturn.scheduling.turns import ClaimAllowance, Turns
from fairturn.stores.sqlite.attempts import AttemptWriter, with_steps
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.expire import ExpiryBacklog, expire, expire_due
from fairturn.stores.sqlite.finish import finish
from fairturn.stores.sqlite.flows import (
    PAGE_MIN,
    SqliteFlows,
    StoredFlow,
    delete_flows,
    load_kinds,
    load_turns,
    reset_clocks,
    save_bands,
    save_customer_states,
    save_flows,
    save_patience,
)
from fairturn.stores.sqlite.outages import StoredServices
from fairturn.stores.sqlite.query import numbered
from fairturn.stores.sqlite.repair import repair_customers
from fairturn.stores.sqlite.rows import (
    ATTEMPTS_MAX_OF_KIND,
    COUNT_COUNTED,
    MOVE_COUNTS,
    CounterChanges,
    KindNames,
    KindRow,
    QueueRow,
    add_outcome_counters,
    fetch,
    fetch_each,
    read_kinds,
    row_to_write,
    take_events,
)
from fairturn.stores.transitions import Attempt, OutcomeCounters, end_of_lease, has_ended
from fairturn.stores.values import (
    BODY,
    CODES,
    DELAYED,
    NUMBER,
    PRIORITY,
    RUNNING,
    WAITING,
    Row,
    SettingsCache,
    to_claims,
    with_counts,
)

_LOG = logging.getLogger(__name__)

# How often a claim that came up short scans all flows for documents without an event.
_HIDDEN_SCAN_EVERY_US = 60 * SECOND_US
_HIDDEN = "SELECT customer FROM flows WHERE waiting <> folded LIMIT 1"

_BODY = "SELECT body FROM bodies WHERE document = ?"
_START = f"""
    UPDATE documents SET state = {RUNNING}, returned = 0, attempts = attempts + 1, fence = ?,
        claimed_at = ?, lease_until = ?, worker = ?,
        charged_cost = ?, charged_weight = ?, charge = ?
    WHERE number = ? AND state = {WAITING}"""
_FENCE = "SELECT fence FROM documents WHERE number = ?"
_ADD_LEASE = """
    INSERT INTO leases (fence, until, running, documents, supports_kinds) VALUES (?, ?, ?, ?, 1)"""
_RUNNING_KINDS = f"""
    SELECT d.kind FROM leases CROSS JOIN json_each(leases.documents) j CROSS JOIN documents d
    WHERE d.number = j.value AND d.state = {RUNNING} AND d.fence = leases.fence"""
_COUNT_REPAIR = "UPDATE queue SET repairs = repairs + 1"
_OLDEST_CANCELS = "SELECT number, document FROM unreported_cancels ORDER BY number LIMIT ?"
_REMOVE_CANCELS = "DELETE FROM unreported_cancels WHERE number <= ?"

# Customers in the scheduler state of one process. More would cost memory and gain no speed.
_CUSTOMERS_CACHED_MAX = 2_000

# More claims than a power cut can undo: their fences must not be reused.
_CLAIMS_UNDONE_MAX = 1 << 20

_SAVE_QUEUE = f"""
    UPDATE queue SET next_number = ?, claims = ?, fence = ?, tick = ?, scheduler_version = ?,
        boot = ?, {MOVE_COUNTS}"""
_RUNNING_OF = f"""
    SELECT d.level, count(*) FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE d.state = {RUNNING} AND d.fence = l.fence AND d.customer = ? GROUP BY d.level"""
_COUNTED = "UPDATE customers SET counted = running_max IS NOT NULL WHERE number = ?"
# By leases_until. The second part: leases that end more than `LEASE_US_MAX` ahead.
_EXPIRED_LEASES = """
    SELECT fence, documents FROM leases WHERE until <= ?1
    UNION ALL SELECT fence, documents FROM leases WHERE until > ?1 + ?2"""
_LEASES = "SELECT fence, documents FROM leases"
_IN_LEASE = f"""
    SELECT d.lease_until, d.number, d.priority, d.worker, d.claimed_at, {ATTEMPTS_MAX_OF_KIND},
        d.step, d.customer, d.level, d.order_number, d.attempts, d.cancel_requested
    FROM documents d WHERE d.number = ? AND d.state = {RUNNING} AND d.fence = ?"""
_SHRINK_LEASE = "UPDATE leases SET until = ?, running = ?, documents = ? WHERE fence = ?"
_DROP_LEASE = "DELETE FROM leases WHERE fence = ?"
_LOSE = f"UPDATE documents SET state = {WAITING}, returned = 1, error = ? WHERE number = ?"
_LOSE_LAST = "UPDATE documents SET state = ?, ended_at = ?, error = ? WHERE number = ?"

# By documents_delayed, and by documents_retried.
DUE = f"""
    SELECT due_at, number, customer, level, priority, order_number
    FROM documents INDEXED BY documents_delayed
    WHERE state = {DELAYED} AND due_at <= ?1 AND retry_at IS NULL
    UNION ALL
    SELECT due_at, number, customer, level, priority, order_number
    FROM documents INDEXED BY documents_retried
    WHERE state = {DELAYED} AND retry_at <= ?2"""
_PROMOTE = f"""
    UPDATE documents SET state = {WAITING}, returned = ?, order_number = ?, due_at = ?
    WHERE number = ?"""
# By documents_retried.
_FOLLOW_WALL_CLOCK = f"""
    UPDATE documents SET retry_at = NULL WHERE state = {DELAYED} AND retry_at IS NOT NULL"""


class ClaimRequest(NamedTuple):
    """What a claim may take, and for which lease."""

    n: int
    kinds: Sequence[str] | None  # None: every kind
    at_most: Mapping[str, int]  # documents, by kind
    worker: str
    lease_us: int


class Claimer:
    """The claims of one process."""

    def __init__(self, database: Database, cache: SettingsCache, clock: Clock) -> None:
        self._database = database
        self._cache = cache
        self._clock = clock
        self._state = SchedulerState()
        self._hidden_scan_at: int | None = None  # on the boot clock

    def claim(
        self, wanted: ClaimRequest, outcomes: Sequence[Outcome], *, synced: bool
    ) -> tuple[Claimed, bool]:
        """Record outcomes and claim documents; return also whether the file changed.

        All documents that have expired are recorded before, in several transactions if need be.
        If flows do not agree with the documents, they are rebuilt, once per customer, and the claim
        is retried: one damaged customer must not stop the queue.
        """
        repaired: set[int] = set()
        while True:
            try:
                return self._claim(wanted, outcomes, synced=synced)
            except ExpiryBacklog:
                while expire(self._database, self._cache, self._clock, EXPIRE_MAX):
                    pass
            except FlowMismatch as mismatch:
                if mismatch.customer in repaired:
                    path = self._database.path
                    raise StoreError(f"{path}: {mismatch}, even after a repair") from mismatch
                repaired.add(mismatch.customer)
                self._repair(mismatch)

    def _claim(
        self, wanted: ClaimRequest, outcomes: Sequence[Outcome], *, synced: bool
    ) -> tuple[Claimed, bool]:
        # Without a boot id no claim can detect that a power cut has undone others.
        synced = synced or bool(outcomes) or self._clock.uptime().boot == NO_BOOT
        try:
            with self._database.writing("claim", synced=synced) as connection:
                before = connection.total_changes()
                queue = row_to_write(connection, self._cache)
                now, uptime = self._clock.now(), self._clock.uptime()
                # The first claim of a boot or an epoch must be durable: after a power cut, the
                # next claim would otherwise start at the same fence.
                is_first = bool(queue.is_copy) or queue.boot != uptime.boot
                lost = finish(connection, queue, outcomes, now, uptime) if outcomes else []
                claims = self._take(connection, queue, wanted, now, uptime)
                cancelled = _report_cancels(connection, queue)
                changed = connection.total_changes() != before
        except BaseException:
            self._state.evict()
            raise
        if is_first:
            self._database.sync(always=True)
        return Claimed(claims, lost, cancelled), changed

    def _take(
        self,
        connection: apsw.Connection,
        queue: QueueRow,
        wanted: ClaimRequest,
        now: int,
        uptime: Uptime,
    ) -> list[Claim]:
        """Claim up to `n` documents, inside the transaction."""
        if queue.next_expiry is not None and queue.next_expiry <= now:
            expired = expire_due(connection, queue, now, EXPIRE_MAX)
            if expired.rows == EXPIRE_MAX:
                raise ExpiryBacklog
        services = StoredServices(connection) if queue.has_outages else None
        changes = CounterChanges()
        rebooted = queue.boot != uptime.boot
        served = read_kinds(connection, wanted.kinds)
        page = max(PAGE_MIN, wanted.n) // max(1, len(served)) + 1
        turns = self._state.apply_events(
            connection, queue, changes, now=now, uptime=uptime, page=page
        )
        allowance = _allowance(connection, served, services, wanted, now)
        picks = self._state.pick(served, allowance, wanted.n, now)
        rows, names = self._state.take_rows(picks)
        if picks:
            queue.fence += 1
            lease = (queue.fence, now, uptime.at + wanted.lease_us, wanted.worker)
            _start(connection, picks, rows, lease, changes)
        if picks or turns.touched or turns.adjusted or rebooted:
            self._state.save(connection, queue, changes)  # otherwise the claim writes nothing
        if len(picks) < wanted.n and any(queue.waiting):
            self._find_hidden(connection, uptime.at)
        if not picks:
            return []
        if services is not None:
            services.probe(allowance.probed, now, wanted.lease_us)
            services.save()
        claims = to_claims(
            _with_bodies(connection, rows),
            names,
            queue.key,
            fence=queue.fence,
            worker=wanted.worker,
            at=now,
            lease_ends_at=now + wanted.lease_us,
        )
        if queue.has_checkpoints or any(claim.document.step for claim in claims):
            return with_steps(connection, claims, rows, checkpoints=queue.has_checkpoints)
        return claims

    def _find_hidden(self, connection: apsw.Connection, at: int) -> None:
        """Once a minute, raise `FlowMismatch` for a flow with waiting documents that the scheduler
        state lacks after all events are folded."""
        last = self._hidden_scan_at
        if last is not None and 0 <= at - last < _HIDDEN_SCAN_EVERY_US:
            return
        customer = connection.execute(_HIDDEN).get
        if customer is not None:
            raise FlowMismatch(customer)
        self._hidden_scan_at = at

    def _repair(self, mismatch: FlowMismatch) -> None:
        _LOG.warning("%s: %s; rebuilding them", self._database.path, mismatch)
        with self._database.writing("claim") as connection:
            repair_customers(connection, [mismatch.customer], self._clock.now())
            connection.execute(_COUNT_REPAIR)


def _allowance(
    connection: apsw.Connection,
    served: list[KindRow],
    services: StoredServices | None,
    wanted: ClaimRequest,
    now: int,
) -> ClaimAllowance:
    """Return how many documents of each of these kinds the claim may take, without kinds of which
    it may take none. After expired leases are folded, the documents under a lease are exactly those
    that run: a limit is compared with them, and no counter can be wrong."""
    running: Counter[int] | None = None
    free: dict[int, int] = {}
    held: dict[int, list[str]] = {}
    for kind in served:
        limit = kind.limit
        if services is not None:
            held[kind.number] = services.held(kind.name)
            if held[kind.number] and not services.may_probe(kind.name, now):
                continue
            resuming = services.running_max(kind.name, now)
            limit = min((each for each in (limit, resuming) if each is not None), default=None)
        most = wanted.at_most.get(kind.name, wanted.n)
        if limit is not None and not kind.is_paused:
            if running is None:
                running = Counter(number for (number,) in connection.execute(_RUNNING_KINDS))
            most = min(most, limit - running[kind.number])
        if most > 0 and not kind.is_paused:
            free[kind.number] = most
    return ClaimAllowance(wanted.n, free, held)


def _start(
    connection: apsw.Connection,
    picks: list[Pick],
    rows: list[Row],
    lease: tuple[int, int, int, str],
    changes: CounterChanges,
) -> None:
    """Start the picked documents under one lease: fence, claimed_at, lease_until, worker."""
    numbers = [row[NUMBER] for row in rows]
    fence, _, until, _ = lease
    started = [(*lease, p.cost, p.weight, p.charge, n) for p, n in zip(picks, numbers, strict=True)]
    before = connection.total_changes()
    connection.executemany(_START, started)
    if connection.total_changes() - before != len(numbers):
        raise FlowMismatch(_not_waiting(connection, picks, numbers, fence))
    connection.execute(_ADD_LEASE, (fence, until, len(numbers), json.dumps(numbers)))
    for pick, row in zip(picks, rows, strict=True):
        changes.wait(pick.customer, pick.band, row[PRIORITY], -1)


def _not_waiting(
    connection: apsw.Connection, picks: list[Pick], numbers: list[int], fence: int
) -> int:
    """Return the customer of a picked document that was not waiting."""
    started: set[int] = set()
    for pick, number in zip(picks, numbers, strict=True):
        if number in started or connection.execute(_FENCE, (number,)).get != fence:
            return pick.customer
        started.add(number)
    raise AssertionError("every picked document has been started")


def _with_bodies(connection: apsw.Connection, rows: list[Row]) -> list[Row]:
    """Return the rows with bodies from the table `bodies` filled in."""
    if all(row[BODY] is not None for row in rows):
        return rows
    return [
        row
        if row[BODY] is not None
        else (*row[:BODY], connection.execute(_BODY, (row[NUMBER],)).get, *row[BODY + 1 :])
        for row in rows
    ]


def _report_cancels(connection: apsw.Connection, queue: QueueRow) -> list[Document]:
    """Return the oldest cancels that no claim has reported, and remove them from the reports."""
    cancels = fetch(connection, _OLDEST_CANCELS, (CANCELS_REPORTED_MAX,))
    if not cancels:
        return []
    connection.execute(_REMOVE_CANCELS, (cancels[-1][0],))
    return numbered(connection, queue.key, (document for _, document in cancels))


class SchedulerState:
    """The cached scheduler state of one process: clocks, and the flows that recent claims loaded.

    It is loaded again after a failed transaction, and when `queue.scheduler_version` shows that
    another process has changed the flows.
    """

    def __init__(self) -> None:
        self._turns: Turns | None = None
        self._source: SqliteFlows | None = None
        self._version = -1
        self._served: list[KindRow] = []  # by the present claim
        self._purged: list[int] = []  # customers whose flows the next save deletes

    def apply_events(
        self,
        connection: apsw.Connection,
        queue: QueueRow,
        changes: CounterChanges,
        *,
        now: int,
        uptime: Uptime,
        page: int = PAGE_MIN,
    ) -> Turns:
        """Fold expired leases, then events, then due documents, and return the scheduler state."""
        turns, source = self._load(connection, queue)
        source.page = page
        expired = end_expired(connection, queue, now, uptime, changes)
        batches = take_events(connection)
        known_to = source.known_to  # later arrivals come after all prefetched documents
        source.given = queue.next_number - 1  # due documents get higher orders
        due = promote_due(connection, queue, now, uptime, changes)
        source.known_to = queue.next_number
        if queue.boot and queue.boot != uptime.boot:
            queue.fence += _CLAIMS_UNDONE_MAX
        queue.boot = uptime.boot
        for event in (event for _, events in batches for event in events):
            if type(event) is CancelEvent:
                source.cancelled(turns.customers.get(event.customer), event)
            elif type(event) is ArrivalEvent and event.order < known_to:
                source.came_back(turns.customers.get(event.customer), event)
            elif type(event) is PurgeEvent:
                self._purged.append(event.customer)
        turns.fold(now, expired=expired, events=with_running_counts(connection, batches), due=due)
        return turns

    def _load(self, connection: apsw.Connection, queue: QueueRow) -> tuple[Turns, SqliteFlows]:
        if self._turns is None or self._source is None or self._version != queue.scheduler_version:
            self.evict()
            self._source, self._turns = load_turns(connection, queue)
        self._source.connection = connection
        return self._turns, self._source

    def pick(
        self, served: list[KindRow], allowance: ClaimAllowance, n: int, now: int
    ) -> list[Pick]:
        """Pick up to `n` documents of these kinds that the claim may take."""
        turns, source = self._turns, self._source
        assert turns is not None
        assert source is not None
        self._served = served
        load_kinds(source, turns, served)
        picks: list[Pick] = []
        while len(picks) < n and (pick := turns.pick(now, allowance.kinds)) is not None:
            picks.append(pick)
            if allowance.is_limited:
                allowance.take(kind_of(pick.band))
        return picks

    def take_rows(self, picks: list[Pick]) -> tuple[list[Row], list[str]]:
        """Return the rows of documents picked since the last call, and their customers' names."""
        source = self._source
        assert source is not None
        rows, source.picked = source.picked, []
        for pick in picks:
            if pick.customer not in source.names:
                raise FlowMismatch(pick.customer)
        return rows, [source.names[pick.customer] for pick in picks]

    def save(self, connection: apsw.Connection, queue: QueueRow, changes: CounterChanges) -> None:
        """Write changed flows, customer states and clocks."""
        turns, source = self._turns, self._source
        assert turns is not None
        assert source is not None
        touched = {flow.band for flow in turns.touched}  # a band changes with one of its flows
        save_customer_states(connection, turns)
        save_flows(connection, turns, changes.flows)
        delete_flows(connection, self._purged)
        self._purged.clear()
        has_high_clock = save_bands(connection, turns, source, touched)
        save_patience(connection, turns, self._served)
        changes.write_kinds(connection)
        changes.write_delayed(connection)
        self._version = queue.scheduler_version = queue.scheduler_version + 1
        row = (queue.next_number, turns.number, queue.fence, turns.tick, queue.scheduler_version)
        connection.execute(_SAVE_QUEUE, (*row, queue.boot, *changes.counts()))
        if has_high_clock:
            reset_clocks(connection)
            self.evict()
        elif len(turns.customers) > _CUSTOMERS_CACHED_MAX:
            self.evict()

    def expect_after(self, customer: int, order: int) -> None:
        """Set `claimed_to` for all of a customer's flows. Any document still waiting at or below it
        has been returned."""
        assert self._turns is not None
        for flow in self._turns.customers[customer].flows.values():
            assert isinstance(flow, StoredFlow)
            flow.claimed_to = order

    def evict(self) -> None:
        """Load everything again at the next claim."""
        self._turns = None
        self._purged.clear()


def with_running_counts(connection: apsw.Connection, batches: list[EventBatch]) -> list[EventBatch]:
    """Insert the number of running documents of a customer before each new limit. The flows of
    customers without a limit do not have it (decision 0007)."""
    adjusted = [e for _, events in batches for e in events if type(e) is SettingsEvent]
    if not adjusted:
        return batches
    connection.executemany(_COUNTED, {(event.customer,) for event in adjusted})
    connection.execute(COUNT_COUNTED)
    limited = {event.customer for event in adjusted if event.limit is not None}
    running = {c: dict(connection.execute(_RUNNING_OF, (c,))) for c in limited}
    return with_counts(batches, running)


def end_expired(
    connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime, changes: CounterChanges
) -> list[Event]:
    """End the attempts whose leases have expired, oldest first; after a reboot, all attempts."""
    expired = _take_expired(connection, uptime.at if queue.boot == uptime.boot else None)
    if not expired:
        return []
    events: list[Event] = []
    outcome_counters = OutcomeCounters()
    attempts = AttemptWriter(connection, KindNames(connection), now)
    for _, number, priority, worker, claimed_at, attempts_max, step, *rest in expired:
        attempt = Attempt(*rest)._replace(
            claimed_at=claimed_at, attempts_max=attempts_max, step=step
        )
        ending = end_of_lease(attempt, queue.settings)
        attempts.store(number, worker, attempt, ending)
        outcome_counters.attempt(ending)
        if ending.state is State.WAITING:
            connection.execute(_LOSE, (ending.error, number))
            changes.wait(attempt.customer, attempt.band, priority)
        else:
            connection.execute(_LOSE_LAST, (CODES[ending.state], now, ending.error, number))
        events.append(ending.event)
    add_outcome_counters(connection, outcome_counters)
    return events


def _take_expired(connection: apsw.Connection, at: int | None) -> list[Row]:
    """Return the documents whose leases have expired, or all running documents if `at` is None, by
    the end of the lease. Their leases are removed."""
    expired: list[Row] = []
    if at is None:
        leases = fetch(connection, _LEASES)
    else:
        leases = fetch(connection, _EXPIRED_LEASES, (at, LEASE_US_MAX))
    for fence, documents in leases:
        inside = [(number, fence) for number in json.loads(documents)]
        running = fetch_each(connection, _IN_LEASE, inside)
        left = [row for row in running if not has_ended(row[0], at)]
        expired += [row for row in running if row not in left]
        if left:
            until = min(row[0] for row in left)
            numbers = json.dumps([row[1] for row in left])
            connection.execute(_SHRINK_LEASE, (until, len(left), numbers, fence))
        else:
            connection.execute(_DROP_LEASE, (fence,))
    return sorted(expired)


def promote_due(
    connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime, changes: CounterChanges
) -> list[tuple[int, ArrivalEvent]]:
    """Make due documents wait. A document gets its order when it is first due. After a reboot,
    retries are due by the wall clock."""
    if queue.boot != uptime.boot:
        connection.execute(_FOLLOW_WALL_CLOCK)
    due: list[tuple[int, ArrivalEvent]] = []
    promoted = []
    rows = sorted(fetch(connection, DUE, (now, uptime.at)))
    for timestamp, number, customer, band, priority, given in rows:
        due_at = min(timestamp, now)  # the time is later if the wall clock has stepped back
        order = queue.next_number if given is None else given
        queue.next_number += given is None
        promoted.append((given is not None, order, due_at, number))
        changes.wait(customer, band, priority)
        changes.delay(customer, -1)
        due.append((due_at, ArrivalEvent(customer, band, order, 1)))
    connection.executemany(_PROMOTE, promoted)
    return due
