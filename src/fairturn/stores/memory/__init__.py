"""The reference implementation of the store contract, in memory: for tests, simulations and queues
that need not survive their process. Tests compare the other stores with it."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from fairturn.access.keys import ACCESS_KEYS_MAX, AccessKey
from fairturn.clock import Clock, SystemClock
from fairturn.explain.snapshot import (
    WORKERS_KEPT_US,
    WORKERS_MAX,
    DocumentSnapshot,
    WaitingLine,
    WorkerHeartbeat,
)
from fairturn.model import (
    CANCELS_KEPT_MAX,
    CANCELS_REPORTED_MAX,
    DEFAULT_KIND_NAME,
    ENDED,
    EXPIRE_MAX,
    KEY_KEPT_US,
    NO_CAPS,
    NO_CHECKPOINTS,
    NO_NEEDS,
    NO_PROGRESS,
    RUNNING_MAX,
    Advanced,
    AttemptOutcome,
    AttemptRecord,
    Claim,
    Claimed,
    Completed,
    Customer,
    CustomerPage,
    CustomerSettings,
    Document,
    Fence,
    Filter,
    Kind,
    KindSettings,
    Lanes,
    NewDocument,
    OutageReport,
    Outcome,
    Page,
    Progress,
    Receipt,
    Renewed,
    ServiceOutage,
    Settings,
    State,
    Stored,
    Summary,
    by_priority,
    check_checkpoints,
    check_claim,
    check_expire,
    check_lease,
    check_needs,
    check_outcomes,
    level_of,
    weight_in_thousandths,
)
from fairturn.scheduling.flows import (
    DEFAULT_KIND,
    ArrivalEvent,
    Backlog,
    CancelEvent,
    EndEvent,
    Event,
    EventBatch,
    PurgeEvent,
    RunningEvent,
    SettingsEvent,
    band_of,
    level_in,
)
from fairturn.scheduling.turns import ClaimAllowance, Turns
from fairturn.stores import ids
from fairturn.stores.admission import (
    AdmissionCustomer,
    AdmissionParent,
    KnownKey,
    admit,
    refuse_kind_beyond_max,
    refuse_passed,
    refuse_unknown_kind,
)
from fairturn.stores.contract import UNREFERENCED_S
from fairturn.stores.estimates import Kept, foresee, make_snapshot
from fairturn.stores.ids import IdKey
from fairturn.stores.memory.rows import CustomerRow, DocumentRow, KindRow
from fairturn.stores.services import ServiceTable
from fairturn.stores.snapshot import (
    Next,
    by_lane,
    levels_of,
    lines_in_turn,
    take_turns,
    take_turns_of_kinds,
)
from fairturn.stores.transitions import (
    Attempt,
    Ending,
    OutcomeCounters,
    attempt_record,
    end_of,
    end_of_lease,
    finished_steps,
    has_ended,
    storable_step,
    to_summary,
    without_oldest,
)
from fairturn.stores.values import jump


class _MemoryState:
    """The `AdmissionState` of one call."""

    def __init__(self, store: "MemoryStore", now: int) -> None:
        self._store = store
        self._now = now
        self._customers: dict[str, AdmissionCustomer] = {}
        self._parents: dict[str, AdmissionParent | None] = {}
        self.pending = sum(row.state in _PENDING for row in store._documents.values())
        self.next_number = store._next_number

    @property
    def kinds(self) -> dict[str, int]:
        return {name: kind.number for name, kind in self._store._kinds.items()}

    def create_kind(self, name: str) -> None:
        self._store._kind(name)

    @property
    def expires_in_us(self) -> dict[str, int]:
        kinds = self._store._kinds.values()
        rules = {kind.name: kind.settings.expires_in_us for kind in kinds}
        return {name: expires_in_us for name, expires_in_us in rules.items() if expires_in_us}

    def customer(self, name: str) -> AdmissionCustomer:
        if name not in self._customers:
            known = self._store._customers.get(name)
            if known is None:
                self._customers[name] = AdmissionCustomer(self._store._next_customer, None, 0)
                self._store._next_customer += 1
            else:
                pending = sum(
                    row.customer is known and row.state in _PENDING
                    for row in self._store._documents.values()
                )
                self._customers[name] = AdmissionCustomer(
                    known.number,
                    known.count,
                    pending,
                    self._store._stored_bytes(known),
                    known.settings.bytes_max,
                )
        return self._customers[name]

    def key(self, customer: int, key: str) -> KnownKey | None:
        known = self._store._keys.get((customer, key))
        if known is None or self._now - known.receipt.submitted_at_us > KEY_KEPT_US:
            return None
        return known

    def parent(self, id: str) -> AdmissionParent | None:
        if id not in self._parents:
            row = self._store._row(id)
            self._parents[id] = None
            if row is not None:
                self._parents[id] = AdmissionParent(
                    row.number, row.customer.number, row.count, row.priority, row.children
                )
        return self._parents[id]


_PENDING = (State.WAITING, State.DELAYED)


class MemoryStore:
    """A store in memory. It has more than 15 attributes and 20 methods because it is the executable
    specification of the whole contract."""

    single_writer = True

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        key: int | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._clock = clock or SystemClock()
        self._key = IdKey.new(key)
        self._changed = threading.Condition()
        self._version = 0
        self._documents: dict[int, DocumentRow] = {}
        self._customers: dict[str, CustomerRow] = {}
        default = KindRow(DEFAULT_KIND, DEFAULT_KIND_NAME, KindSettings())
        self._kinds = {default.name: default}
        self._kind_names = {default.number: default.name}
        self._keys: dict[tuple[int, str], KnownKey] = {}
        self._orders: dict[int, DocumentRow] = {}  # waiting documents by order
        self._next_number = 1
        self._next_customer = 1
        self._boot = self._clock.uptime().boot
        self._fence = 0  # of the last claim
        self._outcome_counters = OutcomeCounters()
        self._events: list[EventBatch] = []
        self._delayed: list[tuple[int, int]] = []  # (due_at, number), a heap
        self._retried: set[int] = set()  # documents that become due at their retry_at
        self._unreported_cancels: deque[int] = deque(maxlen=CANCELS_KEPT_MAX)
        self._backlog = Backlog()
        self._turns = self._new_turns()
        self._workers: dict[str, WorkerHeartbeat] = {}
        self._services = ServiceTable()
        self._access_keys: dict[str, AccessKey] = {}

    # ── Settings ─────────────────────────────────────────────────────────────────────────────────

    def settings(self) -> Settings:
        return self._settings

    def configure(self, settings: Settings, *, expected: Settings | None = None) -> bool:
        with self._changed:
            if expected is not None and expected != self._settings:
                return False
            mode_changes = settings.mode is not self._settings.mode
            if mode_changes:
                self._fold(self._clock.now())
            self._settings = settings
            self._turns.costs = settings.costs
            self._turns.patience_us = settings.patience_us
            if mode_changes:
                self._rebuild()
            self._notify()
            return True

    def _new_turns(self, number: int = 0, since_patience: Mapping[int, int] | None = None) -> Turns:
        return Turns(
            self._backlog,
            mode=self._settings.mode,
            costs=self._settings.costs,
            patience_us=self._settings.patience_us,
            number=number,
            since_patience=since_patience,
            kind_names=self._kind_names,
        )

    def _band(self, row: DocumentRow) -> int:
        return band_of(level_of(row.priority, self._settings.mode), row.kind)

    def _kind(self, name: str) -> KindRow:
        """Return a kind, created if it is new."""
        if name not in self._kinds:
            refuse_kind_beyond_max(name, len(self._kinds))
            kind = self._kinds[name] = KindRow(len(self._kinds), name, KindSettings())
            self._kind_names[kind.number] = name
        return self._kinds[name]

    def _rebuild(self) -> None:
        """Move the waiting documents to new flows in their order, with all clocks at 0."""
        now = self._clock.now()
        old = self._turns
        self._backlog.clear()
        self._turns = self._new_turns(old.number, old.since_patience)
        for customer in self._customers.values():
            self._turns.apply(_changed(customer), now)
            before = old.customers.get(customer.number)
            if before is not None:
                for kind, head in before.heads.items():
                    new = self._turns.customers[customer.number].head(kind)
                    new.recent_costs = head.recent_costs
        for row in self._documents.values():
            row.band = self._band(row)
            row.pick = None
            if row.state is State.RUNNING:
                self._turns.apply(RunningEvent(row.customer.number, row.band, 1), now)
        for order, row in sorted(self._orders.items()):
            since = old.customers[row.customer.number].head(row.kind).since
            self._backlog.add(row.customer.number, row.band, order, row.new.cost)
            self._turns.apply(ArrivalEvent(row.customer.number, row.band, order, 1), since)

    def adjust(
        self,
        customer: str,
        settings: CustomerSettings,
        *,
        expected: CustomerSettings | None = None,
    ) -> bool:
        with self._changed:
            known = self._customer(customer)
            if expected is not None and expected != known.settings:
                return False
            known.settings = settings
            self._record(self._clock.now(), _changed(known))
            self._notify()
            return True

    def configure_kind(
        self, kind: str, settings: KindSettings, *, expected: KindSettings | None = None
    ) -> bool:
        with self._changed:
            known = self._kinds.get(kind)
            if expected is not None and expected != (known.settings if known else KindSettings()):
                return False
            self._kind(kind).settings = settings
            self._notify()
            return True

    def kinds(self) -> list[Kind]:
        with self._changed:
            rows = self._documents.values()
            states = Counter((row.kind, row.state) for row in rows)
            return [
                Kind(
                    name=name,
                    settings=kind.settings,
                    waiting=states[kind.number, State.WAITING],
                    running=states[kind.number, State.RUNNING],
                )
                for name, kind in sorted(self._kinds.items())
            ]

    # ── Submitting ───────────────────────────────────────────────────────────────────────────────

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        if connection is not None:
            raise ValueError("a queue in memory cannot join a transaction; omit connection")
        with self._changed:
            now = self._clock.now()
            state = _MemoryState(self, now)
            admission = admit(documents, state, self._settings, now)
            self._next_number = state.next_number
            for name, admitted in state._customers.items():
                self._customer(name, admitted.number).count = admitted.count
            for parent in state._parents.values():
                if parent is not None:
                    self._documents[parent.number].children = parent.children
            for position, new in enumerate(admission.documents):
                number = admission.first_number + position
                due_at = admission.due.get(position)
                row = DocumentRow(
                    number=number,
                    new=new,
                    customer=self._customers[new.customer],
                    count=admission.counts[position],
                    priority=admission.priorities[position],
                    band=admission.bands[position],
                    submitted_at=now,
                    state=State.WAITING if due_at is None else State.DELAYED,
                    due_at=new.due_at,
                    order=number if due_at is None else None,
                    expires_at=admission.expiries.get(position),
                )
                self._documents[row.number] = row
                if due_at is None:
                    self._record(now, self._wait(row))
                else:
                    heappush(self._delayed, (due_at, row.number))
                if new.key is not None:
                    receipt = Receipt(self._id(number), new.customer, row.count, row.priority, now)
                    self._keys[row.customer.number, new.key] = KnownKey(new.digest, receipt)
            self._notify()
            return admission.receipts(ids.encode_all(admission.numbers, self._key))

    def _customer(self, name: str, number: int | None = None) -> CustomerRow:
        if name not in self._customers:
            if number is None:
                number = self._next_customer
                self._next_customer += 1
            self._customers[name] = CustomerRow(number, name, CustomerSettings())
        return self._customers[name]

    def _wait(self, row: DocumentRow) -> ArrivalEvent:
        """Make a document wait, and return the event."""
        assert row.order is not None
        row.state = State.WAITING
        self._orders[row.order] = row
        self._backlog.add(row.customer.number, row.band, row.order, row.new.cost)
        return ArrivalEvent(row.customer.number, row.band, row.order, 1)

    # ── Claiming ─────────────────────────────────────────────────────────────────────────────────

    def claim(
        self,
        n: int,
        *,
        worker: str,
        lease_us: int,
        kinds: Sequence[str] | None = None,
        at_most: Mapping[str, int] = NO_CAPS,
        outcomes: Sequence[Outcome] = (),
        synced: bool = True,
    ) -> Claimed:
        check_claim(n, worker, lease_us)
        check_outcomes(outcomes)
        with self._changed:
            now = self._clock.now()
            lost = self._finish(outcomes, now)
            while self._expire(now, EXPIRE_MAX):
                pass
            self._fold(now)
            claims: list[Claim] = []
            fence = self._fence + 1
            allowance = self._allowance(n, kinds, at_most, now)
            while len(claims) < n and (pick := self._turns.pick(now, allowance.kinds)) is not None:
                row = self._orders.pop(pick.order)
                allowance.take(row.kind)
                row.state = State.RUNNING
                row.pick = pick
                row.attempts += 1
                row.fence = self._fence = fence
                row.worker = worker
                row.claimed_at = now
                row.progress = None
                row.lease_until = self._clock.uptime().at + lease_us
                claims.append(self._claim_of(row, now + lease_us))
            self._services.probe(allowance.probed, now, lease_us)
            cancelled = self._report_cancels()
            if claims or outcomes or cancelled:
                self._notify()
            return Claimed(claims, lost, cancelled)

    def _claim_of(self, row: DocumentRow, lease_ends_at: int) -> Claim:
        steps = [r for r in row.records if r.outcome is AttemptOutcome.ADVANCED]
        return Claim(
            Fence(self._id(row.number), row.fence),
            self._document(row),
            row.new.body,
            lease_ends_at,
            previous=steps[-1].value if steps else None,
            previous_content=steps[-1].content if steps else None,
            steps=finished_steps(row.records),
            checkpoint=row.checkpoint,
        )

    def _allowance(
        self, n: int, served: Sequence[str] | None, at_most: Mapping[str, int], now: int
    ) -> ClaimAllowance:
        """Return how many documents of each of these kinds a claim of up to `n` may take now,
        without kinds of which it may take none."""
        running = Counter(r.kind for r in self._documents.values() if r.state is State.RUNNING)
        free, held = {}, {}
        for name, kind in self._kinds.items():
            if kind.settings.paused or (served is not None and name not in served):
                continue
            held[kind.number] = self._services.held(name)
            if held[kind.number] and not self._services.may_probe(name, now):
                continue
            limits = (kind.settings.limit, self._services.running_max(name, now))
            limit = min((each for each in limits if each is not None), default=RUNNING_MAX)
            left = min(limit - running[kind.number], at_most.get(name, RUNNING_MAX))
            if left > 0:
                free[kind.number] = left
        return ClaimAllowance(n, free, held)

    def _report_cancels(self) -> list[Document]:
        unreported = self._unreported_cancels
        n = min(len(unreported), CANCELS_REPORTED_MAX)
        rows = [self._documents.get(unreported.popleft()) for _ in range(n)]
        return [self._document(row) for row in rows if row is not None]

    def sync(self) -> None:
        """Do nothing: this store is never durable."""

    def probe(self) -> None:
        """Do nothing: memory has no disk."""

    def begin_epoch(self) -> None:
        with self._changed:
            by = jump()
            self._next_number += by
            self._fence += by
            self._notify()

    def _fold(self, now: int) -> None:
        if self._clock.uptime().boot != self._boot:
            self._follow_wall_clock()
        expired, due = self._expired(), self._due(now)
        self._turns.fold(now, expired=expired, events=self._events, due=due)
        self._events.clear()
        if expired or due:
            self._notify()

    def _expired(self) -> list[Event]:
        boot, uptime = self._clock.uptime()
        at = uptime if boot == self._boot else None
        self._boot = boot
        expired = sorted(
            (row.lease_until, row.number)
            for row in self._documents.values()
            if row.state is State.RUNNING and has_ended(row.lease_until, at)
        )
        events: list[Event] = []
        now = self._clock.now()
        for _, number in expired:
            row = self._documents[number]
            ending = end_of_lease(self._attempt(row), self._settings)
            self._store_attempt(row, ending, None, now)
            row.error = ending.error
            self._become(row, ending, now)
            events.append(ending.event)
        return events

    def _due(self, now: int) -> list[tuple[int, ArrivalEvent]]:
        found = set()  # a retried document may be in the heap twice
        while self._delayed and self._delayed[0][0] <= now:
            due_at, number = heappop(self._delayed)
            row = self._documents.get(number)
            if row is not None and row.state is State.DELAYED and row.due_at == due_at:
                found.add((due_at, number))
        for number in list(self._retried):
            row = self._documents.get(number)
            if row is None or row.state is not State.DELAYED:
                self._retried.discard(number)
            elif self._is_retry_due(row):
                self._retried.discard(number)
                found.add((row.due_at or 0, number))
        due = []
        for due_at, number in sorted(found):
            row = self._documents[number]
            row.due_at = min(due_at, now)  # due_at is later if the wall clock has stepped back
            if row.order is None:
                row.order = self._next_number
                self._next_number += 1
            due.append((row.due_at, self._wait(row)))
        return due

    def _is_retry_due(self, row: DocumentRow) -> bool:
        return row.retry_at is not None and row.retry_at <= self._clock.uptime().at

    def _follow_wall_clock(self) -> None:
        """After a reboot, make retries due at their due_at."""
        for number in self._retried:
            row = self._documents.get(number)
            if row is not None and row.state is State.DELAYED:
                row.retry_at = None
                heappush(self._delayed, (row.due_at or 0, number))
        self._retried.clear()

    def renew(
        self,
        fences: Sequence[Fence],
        *,
        lease_us: int,
        progress: Mapping[Fence, Progress] = NO_PROGRESS,
        checkpoints: Mapping[Fence, str] = NO_CHECKPOINTS,
    ) -> Renewed:
        check_lease(lease_us)
        check_checkpoints(checkpoints.values())
        with self._changed:
            renewed = Renewed([], [])
            for fence in fences:
                row = self._held_by(fence)
                if row is None:
                    renewed.lost.append(fence)
                    continue
                row.lease_until = self._clock.uptime().at + lease_us
                row.progress = progress.get(fence, row.progress)
                row.checkpoint = checkpoints.get(fence, row.checkpoint)
                if row.cancel_requested:
                    renewed.cancelled.append(fence)
            return renewed

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        check_outcomes(outcomes)
        with self._changed:
            lost = self._finish(outcomes, self._clock.now())
            self._notify()
            return lost

    def _finish(self, outcomes: Sequence[Outcome], now: int) -> list[Fence]:
        lost = []
        waiting = {row.kind for row in self._orders.values()}
        for outcome in map(storable_step, outcomes):
            row = self._held_by(outcome.fence)
            if row is None:
                lost.append(outcome.fence)
            else:
                self._apply(outcome, row, now, others_wait=row.kind in waiting)
        return lost

    def _held_by(self, fence: Fence) -> DocumentRow | None:
        row = self._row(fence.document)
        if row is None or row.state is not State.RUNNING or row.fence != fence.number:
            return None
        return row

    def _apply(self, outcome: Outcome, row: DocumentRow, now: int, *, others_wait: bool) -> None:
        kind, report = self._kind_names[row.kind], None
        if isinstance(outcome, OutageReport):
            report = self._services.report(
                row.number, kind, outcome, others_wait=others_wait, last_fence=self._fence, now=now
            )
        ending = end_of(
            self._attempt(row),
            outcome,
            self._settings,
            now,
            kind_number=self._known_kind,
            report=report,
        )
        self._services.end(kind, outcome, ending, last_fence=self._fence, now=now)
        self._store_attempt(row, ending, outcome, now)
        if isinstance(outcome, Completed):
            row.result, row.result_content = outcome.result, outcome.content
            row.real_cost = ending.real_cost
            row.checkpoint = None
        if not ending.counts:
            row.attempts -= 1
            row.snoozes += ending.state is State.DELAYED
        if ending.counts or ending.state is not State.WAITING:  # a released one keeps its error
            row.error = ending.error
        if ending.arrival is None:
            self._record(now, ending.event)
        else:
            assert isinstance(outcome, Advanced)
            self._advance(row, outcome, ending.arrival.band)
            self._record(now, ending.event, ending.arrival)
        self._become(row, ending, now)

    def _advance(self, row: DocumentRow, outcome: Advanced, band: int) -> None:
        """Begin the next step of a document."""
        cost = row.new.cost if outcome.cost is None else outcome.cost
        row.new = row.new._replace(kind=outcome.kind, cost=cost)
        row.band = band
        row.step += 1
        row.attempts = 0
        row.checkpoint = None

    def _known_kind(self, name: str) -> int:
        """Return the number of a kind; raise `KindRefused` if it is unknown and not created."""
        if name not in self._kinds:
            refuse_unknown_kind(name, self._settings)
        return self._kind(name).number

    def _attempt(self, row: DocumentRow) -> Attempt:
        kind = self._kinds[self._kind_names[row.kind]]
        return row.attempt(kind.settings.attempts_max)

    def _store_attempt(
        self, row: DocumentRow, ending: Ending, outcome: Outcome | None, now: int
    ) -> None:
        assert row.claimed_at is not None
        record = attempt_record(
            ending,
            outcome,
            step=row.step,
            kind=self._kind_names[row.kind],
            attempt=row.attempts,
            worker=row.worker or "",
            claimed_at=row.claimed_at,
            ended_at=now,
        )
        if record is not None:
            row.records = without_oldest([*row.records, record])

    def _become(self, row: DocumentRow, ending: Ending, now: int) -> None:
        self._outcome_counters.attempt(ending)
        if ending.state is State.WAITING:
            self._wait(row)
        elif ending.state is State.DELAYED:
            row.state = State.DELAYED
            row.due_at = ending.due_at
            row.retry_at = self._clock.uptime().at + ending.due_at - now
            self._retried.add(row.number)
        else:
            self._end(row, ending.state, now)

    def _end(self, row: DocumentRow, state: State, now: int) -> None:
        row.state = state
        row.ended_at = now

    # ── Cancelling and retrying ──────────────────────────────────────────────────────────────────

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        with self._changed:
            now = self._clock.now()
            states: list[State | None] = []
            for id in ids:
                row = self._row(id)
                if row is not None and row.state is State.RUNNING:
                    row.cancel_requested = True
                elif row is not None and row.state in _PENDING:
                    if row.state is State.WAITING:
                        self._record(now, self._leave(row))
                    self._end(row, State.CANCELLED, now)
                    self._outcome_counters.end(State.CANCELLED)
                    self._unreported_cancels.append(row.number)
                states.append(None if row is None else row.state)
            self._notify()
            return states

    def _leave(self, row: DocumentRow) -> CancelEvent:
        assert row.order is not None
        del self._orders[row.order]
        following = self._backlog.discard(row.customer.number, row.band, row.order)
        return CancelEvent(row.customer.number, row.band, row.order, following)

    def retry(self, ids: Sequence[str], *, expires_at: int | None = None) -> list[State | None]:
        with self._changed:
            now = self._clock.now()
            if expires_at is not None:
                refuse_passed(expires_at, now)
            retried = (State.DEAD,) if expires_at is None else (State.DEAD, State.EXPIRED)
            states: list[State | None] = []
            for id in ids:
                row = self._row(id)
                states.append(None if row is None else row.state)
                if states[-1] in retried:
                    assert row is not None
                    self._retry(row, expires_at, now)
            self._notify()
            return states

    def _retry(self, row: DocumentRow, expires_at: int | None, now: int) -> None:
        row.attempts = row.snoozes = 0
        row.ended_at = None
        row.expires_at = expires_at
        row.band = self._band(row)
        if row.order is not None:
            self._record(now, self._wait(row))
        else:  # it expired before it was due for the first time
            assert row.due_at is not None
            row.state = State.DELAYED
            heappush(self._delayed, (row.due_at, row.number))

    # ── Expiry ───────────────────────────────────────────────────────────────────────────────────

    def expire(self, limit: int = EXPIRE_MAX) -> int:
        check_expire(limit)
        with self._changed:
            return self._expire(self._clock.now(), limit)

    def _expire(self, now: int, limit: int) -> int:
        expiries = ((row.expiry, row.number) for row in self._documents.values())
        past = sorted((at, number) for at, number in expiries if at is not None and at <= now)
        for _, number in past[:limit]:
            row = self._documents[number]
            if row.state is State.WAITING:
                self._record(now, self._leave(row))
            self._end(row, State.EXPIRED, now)
            self._outcome_counters.end(State.EXPIRED)
        if past:
            self._notify()
        return len(past[:limit])

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────

    def find(
        self,
        filter: Filter,
        *,
        after: str | None = None,
        size: int = 100,
        reach: int | None = None,
    ) -> Page:
        with self._changed:
            below = self._next_number if after is None else ids.decode(after, self._key) or 0
            lowest = 1
            if reach is not None:  # count from an existing document: an epoch leaves a gap
                highest = max((n for n in self._documents if n < below), default=0)
                lowest = max(1, highest + 1 - reach)
            documents = (
                self._document(row)
                for number, row in sorted(self._documents.items(), reverse=True)
                if lowest <= number < below
            )
            matching = list(islice((d for d in documents if filter.matches(d)), size + 1))
            page = matching[:size]
            if len(matching) > size:
                return Page(page, page[-1].id)
            return Page(page, self._id(lowest) if lowest > 1 else None)

    def read(self, id: str) -> Stored | None:
        with self._changed:
            row = self._row(id)
            if row is None:
                return None
            return Stored(self._document(row), row.new.body, row.result, row.result_content)

    def customers(
        self, *, names: Sequence[str] | None = None, after: str | None = None, size: int = 100
    ) -> CustomerPage:
        with self._changed:
            known = sorted(self._customers if names is None else set(names) & set(self._customers))
            rest = [name for name in known if after is None or name > after]
            page = [self._shown(self._customers[name]) for name in rest[:size]]
            return CustomerPage(page, page[-1].name if len(rest) > size else None)

    def _shown(self, customer: CustomerRow) -> Customer:
        rows = [row for row in self._documents.values() if row.customer is customer]
        states = Counter(row.state for row in rows)
        waiting = Counter(row.priority for row in rows if row.state is State.WAITING)
        return Customer(
            name=customer.name,
            settings=customer.settings,
            count=self._settings.rule.shown(customer.count, self._clock.now()),
            count_updated_at_us=customer.count.updated_at if customer.count else None,
            waiting=states[State.WAITING],
            waiting_by_priority=by_priority(waiting),
            running=states[State.RUNNING],
            delayed=states[State.DELAYED],
            stored_bytes=self._stored_bytes(customer),
        )

    def _stored_bytes(self, customer: CustomerRow) -> int:
        rows = self._documents.values()
        return sum(row.new.stored_bytes for row in rows if row.customer is customer)

    def summary(self) -> Summary:
        with self._changed:
            states = Counter(row.state for row in self._documents.values())
            waiting = Counter(row.priority for row in self._orders.values())
            return to_summary(
                by_priority(waiting),
                delayed=states[State.DELAYED],
                running=states[State.RUNNING],
                started=self._turns.number,
                outcome_counters=self._outcome_counters,
            )

    def lanes(self, *, size: int = 24, kind: str | None = None) -> Lanes:
        with self._changed:
            documents = [self._kept(each) for each in self._documents.values()]
            now, settings = self._clock.now(), self._settings
            foreseen = foresee(self._turns, documents, self._events, now, self._next_number)
            rows: dict[tuple[int, int], list[Next]] = defaultdict(list)
            for order, row in sorted(self._orders.items()):
                if row.expiry is None or row.expiry > now:
                    place = (row.customer.number, row.band)
                    rows[place].append(Next(order, row.number, row.new.cost))
            names = [each.number for each in self._kinds.values() if kind in (None, each.name)]

            def next_of(number: int, level: int, most: int) -> list[Next]:
                lines = lines_in_turn(foreseen.customers.values(), settings, number)

                def waiting(line: WaitingLine, most: int) -> list[Next]:
                    return rows[line.customer, band_of(level, number)][:most]

                here = [line for line in lines if line.level == level]
                return take_turns(here, most, settings, waiting)

            ids = [
                self._id(found.number)
                for level, most in levels_of(settings, size)
                for found in take_turns_of_kinds(
                    {n: next_of(n, level, most) for n in names},
                    {n: foreseen.bands[band_of(level, n)] for n in names},
                    self._kind_names,
                    most,
                    settings,
                )
            ]
            found = [self._document(row) for row in self._orders.values()]
            return Lanes(self._turns.number, by_lane(found, ids, size))

    def snapshot(self, id: str) -> DocumentSnapshot | None:
        with self._changed:
            row = self._row(id)
            if row is None:
                return None
            now = self._clock.now()
            parent = None if row.new.parent is None else self._row(row.new.parent)
            documents = [self._kept(each) for each in self._documents.values()]
            return make_snapshot(
                document=self._document(row)._replace(due_at_us=self._due_at_now(row)),
                parent_count=None if parent is None else parent.count,
                number=row.number,
                now=now,
                settings=self._settings,
                documents=documents,
                customer_settings=row.customer.settings,
                count=row.customer.count,
                names={known.number: known.name for known in self._customers.values()},
                foreseen=foresee(self._turns, documents, self._events, now, self._next_number),
                workers=sorted(self._workers.values(), key=lambda seen: seen.worker),
                kind_settings=self._kinds[row.new.kind].settings,
                outages=[o for o in self._outages(now) if row.new.kind in o.kinds],
            )

    def workers(self) -> list[WorkerHeartbeat]:
        with self._changed:
            return sorted(self._workers.values(), key=lambda seen: seen.worker)[:WORKERS_MAX]

    def sign_on(
        self,
        worker: str,
        slots: int,
        kinds: Sequence[str] | None = None,
        *,
        needs: Mapping[str, Sequence[str]] = NO_NEEDS,
    ) -> None:
        with self._changed:
            check_needs(needs)
            for name in (*(kinds or ()), *needs):
                self._kind(name)
            for kind, services in needs.items():
                self._services.register(kind, services)
            served = None if kinds is None else tuple(sorted(set(kinds)))
            self._workers[worker] = WorkerHeartbeat(worker, self._clock.now(), slots, served)

    def attempts(self, id: str, *, values: bool = False) -> list[AttemptRecord] | None:
        with self._changed:
            row = self._row(id)
            if row is None:
                return None
            return [r if values else r._replace(value=None) for r in row.records]

    def outages(self) -> list[ServiceOutage]:
        with self._changed:
            return self._outages(self._clock.now())

    def _outages(self, now: int) -> list[ServiceOutage]:
        return self._services.outages(list(self._kinds), now)

    def resume(self, service: str) -> bool:
        with self._changed:
            was_held = self._services.resume(service, self._fence, self._clock.now())
            if was_held:
                self._notify()
            return was_held

    def sign_off(self, worker: str) -> None:
        with self._changed:
            self._workers.pop(worker, None)

    def oldest_waiting(self) -> Mapping[int, int]:
        with self._changed:
            heads: dict[tuple[int, int], DocumentRow] = {}
            for _, row in sorted(self._orders.items()):
                heads.setdefault((row.customer.number, row.band), row)
            oldest: dict[int, int] = {}
            for row in heads.values():
                since, level = max(row.submitted_at, row.due_at or 0), level_in(row.band)
                oldest[level] = min(since, oldest.get(level, since))
            return oldest

    def _due_at_now(self, row: DocumentRow) -> int | None:
        """Return when a document is due by the present wall clock."""
        boot, at = self._clock.uptime()
        if row.state is not State.DELAYED or row.retry_at is None or boot != self._boot:
            return row.due_at
        return self._clock.now() + row.retry_at - at

    def _arrives_at(self, row: DocumentRow) -> int | None:
        """Return the time from which a document waits in the next claim, or a later one than now
        if it is not due."""
        now, due_at = self._clock.now(), self._due_at_now(row)
        if row.due_at is None or due_at is None or due_at > now:
            return due_at
        return min(row.due_at, now)

    def _kept(self, row: DocumentRow) -> Kept:
        boot, at = self._clock.uptime()
        leased = not has_ended(row.lease_until, at if boot == self._boot else None)
        lost = None
        if row.state is State.RUNNING and not leased:
            lost = end_of_lease(self._attempt(row), self._settings)
        return Kept(
            number=row.number,
            customer=row.customer.number,
            priority=row.priority,
            band=row.band,
            order=row.order,
            state=row.state,
            submitted_at=row.submitted_at,
            due_at=self._arrives_at(row),
            claimed_at=row.claimed_at,
            attempts=row.attempts,
            ended_at=row.ended_at,
            lease_until=row.lease_until,
            leased=leased,
            lost=lost,
            worker=row.worker,
            step=row.step,
            steps=finished_steps(row.records),
            has_expired=row.expiry is not None and row.expiry <= self._clock.now(),
        )

    # ── Access keys ──────────────────────────────────────────────────────────────────────────────

    def add_key(self, key: AccessKey) -> None:
        with self._changed:
            if len(self._access_keys) >= ACCESS_KEYS_MAX:
                raise ValueError(f"there are {ACCESS_KEYS_MAX:,} keys already; no more are allowed")
            if key.id in self._access_keys:
                raise ValueError(f"there is a key {key.id} already")
            self._access_keys[key.id] = key
            self._notify()

    def access_key(self, id: str) -> AccessKey | None:
        return self._access_keys.get(id)

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        with self._changed:
            wanted = [
                key
                for id, key in sorted(self._access_keys.items())
                if (customer is None or key.customer == customer) and (after is None or id > after)
            ]
            return wanted[:size]

    def end_key(self, id: str, at: int) -> AccessKey | None:
        with self._changed:
            key = self._access_keys.get(id)
            if key is not None:
                ends_at = at if key.ends_at_us is None else min(at, key.ends_at_us)
                key = self._access_keys[id] = key._replace(ends_at_us=ends_at)
                self._notify()
            return key

    def note_use(self, id: str, at: int) -> None:
        with self._changed:
            key = self._access_keys.get(id)
            if key is not None:
                used_at = at if key.used_at_us is None else max(at, key.used_at_us)
                self._access_keys[id] = key._replace(used_at_us=used_at)

    # ── Retention ────────────────────────────────────────────────────────────────────────────────

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        with self._changed:
            now = self._clock.now()
            old = [
                row
                for row in self._documents.values()
                if row.state in ENDED
                and row.ended_at is not None
                and row.ended_at < now - self._settings.kept_us(row.state)
            ][:documents_max]
            contents = self._delete(old)
            keys = [
                key
                for key, known in self._keys.items()
                if now - known.receipt.submitted_at_us > KEY_KEPT_US
            ]
            for key in keys:
                del self._keys[key]
            self._fold_ends(now)
            self._turns.forget()
            idle = self._idle_customers(now)
            for name in idle:
                del self._customers[name]
            for seen in list(self._workers.values()):
                if seen.seen_at < now - WORKERS_KEPT_US:
                    del self._workers[seen.worker]
            over = self._services.prune(now)
            self._notify()
            return contents if old or keys or idle or over else None

    def _fold_ends(self, now: int) -> None:
        """Fold the ends of attempts of customers without a limit. The number of their running
        documents decides nothing, so these events may be folded in any order."""
        counted = {
            e.customer for _, events in self._events for e in events if type(e) is SettingsEvent
        }
        left: list[EventBatch] = []
        for at, events in self._events:
            kept = []
            for event in events:
                if (
                    type(event) is EndEvent
                    and event.customer not in counted
                    and self._turns.customers[event.customer].limit is None
                ):
                    self._turns.apply(event, now)
                else:
                    kept.append(event)
            left.append(EventBatch(at, tuple(kept)))
        self._events = [batch for batch in left if batch.events]

    def _idle_customers(self, now: int) -> list[str]:
        busy = {row.customer.name for row in self._documents.values()}
        in_events = {event.customer for _, events in self._events for event in events}
        with_keys = {number for number, _ in self._keys}
        return [
            customer.name
            for customer in self._customers.values()
            if customer.name not in busy
            and customer.settings == CustomerSettings()
            and customer.number not in self._turns.customers
            and customer.number not in in_events
            and customer.number not in with_keys
            and self._settings.rule.shown(customer.count, now) == 0
            and (customer.count is None or now > self._settings.rule.resets_at(customer.count))
        ]

    def purge(self, customer: str) -> list[str]:
        with self._changed:
            keys = self._access_keys.items()
            self._access_keys = {id: key for id, key in keys if key.customer != customer}
            known = self._customers.pop(customer, None)
            if known is None:
                return []
            rows = [row for row in self._documents.values() if row.customer is known]
            for row in rows:
                if row.state is State.WAITING:
                    self._leave(row)
                elif row.state is State.RUNNING:
                    self._outcome_counters.purge()
            contents = self._delete(rows)
            self._keys = {key: k for key, k in self._keys.items() if key[0] != known.number}
            self._record(self._clock.now(), PurgeEvent(known.number))
            self._notify()
            return contents

    def _delete(self, rows: Sequence[DocumentRow]) -> list[str]:
        for row in rows:
            del self._documents[row.number]
        return [name for row in rows for name in row.contents]

    def unreferenced(
        self, content_names: Sequence[str], *, timeout_s: float = UNREFERENCED_S
    ) -> list[str]:
        with self._changed:
            used = {name for row in self._documents.values() for name in row.contents}
            return [name for name in content_names if name not in used]

    # ── Changes ──────────────────────────────────────────────────────────────────────────────────

    def version(self) -> int:
        return self._version

    def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout_s)
            return self._version

    def close(self) -> None:
        """Do nothing: there are no files or connections."""

    def _notify(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _record(self, at: int, *events: Event) -> None:
        self._events.append(EventBatch(at, events))

    def _row(self, id: str) -> DocumentRow | None:
        number = ids.decode(id, self._key)
        return None if number is None else self._documents.get(number)

    def _id(self, number: int) -> str:
        return ids.encode(number, self._key)

    def _document(self, row: DocumentRow) -> Document:
        return row.document(self._id(row.number))


def _changed(customer: CustomerRow) -> SettingsEvent:
    settings = customer.settings
    weight = weight_in_thousandths(settings.weight)
    return SettingsEvent(customer.number, weight, settings.limit, settings.paused)
