"""The priority rule and the order of service again: slow, obvious and independent.

It deliberately imports nothing from fairturn. Where the engine has heaps, incremental sums and
flows that it drops, this has lists and loops over all documents: it caches nothing that can be
counted and drops nothing. Where the two disagree, one of them is wrong.

Moments are integer microseconds. A document of cost 1 is 1,000,000; a weight of 1 is 1000.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

KIND = "default"
COST_ONE = 1_000_000
LEASE_US = 60_000_000


@dataclass(eq=False)
class Document:
    """`state` is the true state; `seen` is the state that claims have folded so far."""

    number: int
    customer: "Customer"
    count: int
    priority: int
    level: int
    cost: int | None
    due_at: int | None
    kind: str = KIND
    expires_at: int | None = None
    order: int | None = None
    state: str = "delayed"  # delayed, waiting, running, ended
    seen: str = "nowhere"  # nowhere, waiting, running
    attempts: int = 0
    step: int = 0
    lease_ends_at: int = 0
    charged_cost: int | None = None  # None: not charged
    charged_weight: int | None = None
    charge: int = 0


@dataclass(eq=False)
class Customer:
    name: Hashable
    count: int = 0
    updated_at: int | None = None
    weight: int = 1000
    limit: int | None = None
    paused: bool = False
    # By kind: the lowest waiting order, since when it has been the lowest, and finished costs.
    heads: dict[str, int] = field(default_factory=dict)
    head_since: dict[str, int] = field(default_factory=dict)
    finished_costs: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass(eq=False)
class Flow:
    customer: Customer
    level: int
    kind: str
    virtual_time: int = 0
    tick: int = 0
    active: bool = False


@dataclass(eq=False)
class Recorded:
    """An event that the next claim folds."""

    at: int
    what: str  # arrived, cancelled, finished, advanced, failed, released, settings
    document: Document | None = None
    real_cost: int = 0
    kind: str = KIND  # of the next step
    customer: Customer | None = None
    settings: tuple[int, int | None, bool] = (1000, None, False)


class Reference:
    """A queue. Its operations take the moment at which they happen."""

    def __init__(
        self,
        *,
        mode: str = "fair",
        costs: str = "equal",
        patience_us: int = 120_000_000,
        bounds: Sequence[int] = (-2, -4, -6, -8, -10, -12, -14, -20),
        reset: str = "idle",
        reset_interval_us: int = 1_500_000_000,
        attempts_max: int = 5,
    ) -> None:
        self.mode = mode
        self.costs = costs
        self.patience_us = patience_us
        self.bounds = bounds
        self.reset = reset
        self.reset_interval_us = reset_interval_us
        self.attempts_max = attempts_max
        self.customers: list[Customer] = []
        self.documents: list[Document] = []  # documents that have not ended
        self.flows: list[Flow] = []
        self.number = 0  # of the last claim that took a document
        self.since_patience: defaultdict[str, int] = defaultdict(int)  # claims, by kind
        # By level and kind, and by level.
        self.clocks: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.kind_times: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.last_claims: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.level_times: defaultdict[int, int] = defaultdict(int)
        self.tick = 0
        self.recorded: list[Recorded] = []
        self.submitted = 0
        self.last_order = 0

    # ── The priority rule ────────────────────────────────────────────────────────────────────────

    def check(self, name: Hashable, now: int) -> tuple[int, int]:
        """Return the count and the priority of one more document."""
        customer = self.customer(name)
        if customer.updated_at is None or now - customer.updated_at > self.reset_interval_us:
            customer.count = 0
            customer.updated_at = now
        else:
            customer.count -= 1
            if self.reset == "idle" and now > customer.updated_at:
                customer.updated_at = now
        priority = 1
        for bound in self.bounds:
            if customer.count < bound:
                priority += 1
        return customer.count, priority

    # ── What happens is recorded ─────────────────────────────────────────────────────────────────

    def customer(self, name: Hashable) -> Customer:
        for customer in self.customers:
            if customer.name == name:
                return customer
        self.customers.append(Customer(name))
        return self.customers[-1]

    def submit(
        self,
        name: Hashable,
        now: int,
        *,
        cost: int | None = None,
        due_at: int | None = None,
        kind: str = KIND,
        expires_at: int | None = None,
    ) -> Document:
        count, priority = self.check(name, now)
        level = 1 if self.mode == "equal" else priority
        self.submitted += 1
        document = Document(
            self.submitted,
            self.customer(name),
            count,
            priority,
            level,
            cost,
            due_at,
            kind,
            expires_at,
        )
        self.documents.append(document)
        if due_at is None or due_at <= now:
            document.order = self._next_order()
            document.state = "waiting"
            self.recorded.append(Recorded(now, "arrived", document))
        return document

    def set(self, name: Hashable, now: int, weight: int, limit: int | None, paused: bool) -> None:
        settings = (weight, limit, paused)
        customer = self.customer(name)
        self.recorded.append(Recorded(now, "settings", customer=customer, settings=settings))

    def cancel(self, document: Document, now: int) -> None:
        """Cancel a waiting or delayed document."""
        if document.state == "waiting":
            self.recorded.append(Recorded(now, "cancelled", document))
        document.state = "ended"

    def finish(self, document: Document, now: int, real_cost: int = COST_ONE) -> None:
        document.state = "ended"
        self.recorded.append(Recorded(now, "finished", document, real_cost))

    def advance(self, document: Document, now: int, kind: str, real_cost: int = COST_ONE) -> None:
        """End a step: the document waits for another kind, with all attempts."""
        document.state = "waiting"
        document.attempts = 0
        document.step += 1
        self.recorded.append(Recorded(now, "finished", document, real_cost))
        self.recorded.append(Recorded(now, "advanced", document, kind=kind))

    def snooze(self, document: Document, now: int, delay_us: int) -> None:
        document.state = "delayed"
        document.due_at = now + delay_us
        document.attempts -= 1
        self.recorded.append(Recorded(now, "failed", document))

    def expire(self, now: int) -> list[Document]:
        """End the documents that have expired, and return them."""
        expired = [
            d
            for d in self.documents
            if d.expires_at is not None
            and d.expires_at <= now
            and d.state in ("waiting", "delayed")
            and d.attempts == d.step == 0
        ]
        for document in expired:
            self.cancel(document, now)
        return expired

    def fail(self, document: Document, now: int, delay_us: int | None) -> None:
        """Fail an attempt. Without a delay, or without attempts left, the document is dead."""
        if delay_us is None or document.attempts >= self.attempts_max:
            document.state = "ended"
        else:
            document.state = "delayed"
            document.due_at = now + delay_us
        self.recorded.append(Recorded(now, "failed", document))

    def release(self, document: Document, now: int) -> None:
        document.state = "waiting"
        document.attempts -= 1
        self.recorded.append(Recorded(now, "released", document))

    # ── A claim folds it in ──────────────────────────────────────────────────────────────────────

    def claim(
        self, now: int, n: int = 1, lease_us: int = LEASE_US, kinds: Sequence[str] = (KIND,)
    ) -> list[Document]:
        """Make `n` claims for these kinds, one after the other."""
        self._fold(now)
        claimed: list[Document] = []
        for _ in range(n):
            document = self._pick(now, kinds)
            if document is None:
                break
            document.state = "running"
            document.attempts += 1
            document.lease_ends_at = now + lease_us
            claimed.append(document)
        return claimed

    def _fold(self, now: int) -> None:
        expired = [d for d in self.documents if d.state == "running" and d.lease_ends_at <= now]
        for document in sorted(expired, key=lambda d: (d.lease_ends_at, d.number)):
            if document.attempts >= self.attempts_max:
                document.state = "ended"
                document.seen = "nowhere"
            else:
                document.state = "waiting"
                document.seen = "waiting"
            self._settle(now)

        for recorded in self.recorded:
            self._fold_one(recorded)
            self._settle(recorded.at)
        self.recorded = []

        became_due = [
            (d.due_at, d.number, d)
            for d in self.documents
            if d.state == "delayed" and d.due_at is not None and d.due_at <= now
        ]
        for due_at, _, document in sorted(became_due, key=lambda due: due[:2]):
            if document.order is None:
                document.order = self._next_order()
            document.state = "waiting"
            document.seen = "waiting"
            self._settle(due_at)

        self.documents = [d for d in self.documents if d.state != "ended"]

    def _fold_one(self, recorded: Recorded) -> None:
        if recorded.what == "settings":
            assert recorded.customer is not None
            customer = recorded.customer
            customer.weight, customer.limit, customer.paused = recorded.settings
            return
        document = recorded.document
        assert document is not None
        if recorded.what == "arrived":
            document.seen = "waiting"
        elif recorded.what in ("cancelled", "failed"):
            document.seen = "nowhere"
        elif recorded.what == "advanced":
            document.kind = recorded.kind
            document.seen = "waiting"
        elif recorded.what == "released":
            self._flow(document).virtual_time -= document.charge
            document.seen = "waiting"
        elif recorded.what == "finished":
            document.seen = "nowhere"
            if self.costs == "learned":
                self._correct(document, recorded.real_cost)

    def _correct(self, document: Document, real_cost: int) -> None:
        document.customer.finished_costs[document.kind].append(real_cost)
        if document.charged_cost is None or document.charged_weight is None:
            return
        difference = real_cost - document.charged_cost
        self._flow(document).virtual_time += difference * 1000 // document.charged_weight
        total = self._total_weight(document.level, document.kind)
        if total > 0:
            self.clocks[document.level, document.kind] += difference * 1000 // total

    def _settle(self, at: int) -> None:
        """After a whole event, update which flows are active and which document is each customer's
        head."""
        waiting = [d for d in self.documents if d.seen == "waiting"]
        for document in waiting:
            self._flow(document)
        if self.mode != "levels":
            waits_in = {(d.customer.name, d.level, d.kind) for d in waiting}
            for flow in self.flows:
                waits = (flow.customer.name, flow.level, flow.kind) in waits_in
                active = waits and not self.held(flow.customer)
                if active and not flow.active:
                    self._activate(flow)
                flow.active = active
        for customer in self.customers:
            heads: dict[str, int] = {}
            for d in waiting:
                if d.customer is customer:
                    heads[d.kind] = min(_order(d), heads.get(d.kind, _order(d)))
            for kind, head in heads.items():
                if head != customer.heads.get(kind):
                    customer.head_since[kind] = at
            customer.heads = heads

    def _activate(self, flow: Flow) -> None:
        inside = flow.level, flow.kind
        if self._total_weight(*inside) == 0:
            self.kind_times[inside] = max(self.kind_times[inside], self.level_times[flow.level])
        flow.virtual_time = max(flow.virtual_time, self.clocks[inside])
        self.tick += 1
        flow.tick = self.tick

    # ── One claim ────────────────────────────────────────────────────────────────────────────────

    def _pick(self, now: int, kinds: Sequence[str]) -> Document | None:
        document = None
        turn: Flow | None = None
        active = [flow for flow in self.flows if flow.active and flow.kind in kinds]
        free = [d for d in self._waiting() if d.kind in kinds and not self.held(d.customer)]
        is_patience_claim = any(self.since_patience[flow.kind] == 9 for flow in active)
        if is_patience_claim:
            document = self._longest_waiting(now, kinds)
        if document is None and self.mode == "levels":
            document = min(free, key=lambda d: (d.level, _order(d)), default=None)
        elif document is None:
            turn = min(active, key=self._rank, default=None)
            if turn is not None:
                inside = [d for d in free if self._flow(d) is turn]
                document = min(inside, key=_order)
        if document is None:
            return None

        self.number += 1
        if is_patience_claim:
            self.since_patience.update(dict.fromkeys(kinds, 0))
        elif self.mode != "levels":
            self.since_patience[document.kind] += 1
        document.charged_cost = document.charged_weight = None
        document.charge = 0
        if turn is not None:
            self._charge(turn, document)
        document.seen = "running"
        self._settle(now)
        return document

    def _rank(self, flow: Flow) -> tuple[int, int, int, str, int, int]:
        inside = flow.level, flow.kind
        of_kind = self.kind_times[inside], self.last_claims[inside], flow.kind
        return (flow.level, *of_kind, flow.virtual_time, flow.tick)

    def _longest_waiting(self, now: int, kinds: Sequence[str]) -> Document | None:
        patient = [
            (customer.head_since[kind], head)
            for customer in self.customers
            for kind, head in customer.heads.items()
            if kind in kinds
            and not self.held(customer)
            and now - customer.head_since[kind] > self.patience_us
        ]
        if not patient:
            return None
        _, head = min(patient)
        return next(d for d in self._waiting() if d.order == head)

    def _charge(self, flow: Flow, document: Document) -> None:
        inside = flow.level, flow.kind
        cost = self._cost(document)
        weight = flow.customer.weight
        document.charged_cost = cost
        document.charged_weight = weight
        document.charge = max(1, cost * 1000 // weight)
        progress = cost * 1000 // self._total_weight(*inside)
        self.clocks[inside] = max(self.clocks[inside] + progress, flow.virtual_time)
        flow.virtual_time += document.charge
        self.level_times[flow.level] = max(self.level_times[flow.level], self.kind_times[inside])
        self.kind_times[inside] += progress
        self.last_claims[inside] = self.number

    def _cost(self, document: Document) -> int:
        if self.costs == "known" and document.cost is not None:
            return document.cost
        finished = document.customer.finished_costs[document.kind]
        if self.costs == "learned" and finished:
            last = finished[-20:]
            return sum(last) // len(last)
        return COST_ONE

    # ── What can be counted is counted ───────────────────────────────────────────────────────────

    def held(self, customer: Customer) -> bool:
        running = [d for d in self.documents if d.seen == "running" and d.customer is customer]
        at_limit = customer.limit is not None and len(running) >= customer.limit
        return customer.paused or at_limit

    def _waiting(self) -> list[Document]:
        return [d for d in self.documents if d.seen == "waiting"]

    def _total_weight(self, level: int, kind: str) -> int:
        return sum(
            flow.customer.weight
            for flow in self.flows
            if flow.active and (flow.level, flow.kind) == (level, kind)
        )

    def _flow(self, document: Document) -> Flow:
        for flow in self.flows:
            if flow.customer is document.customer and (
                (flow.level, flow.kind) == (document.level, document.kind)
            ):
                return flow
        self.flows.append(Flow(document.customer, document.level, document.kind))
        return self.flows[-1]

    def _next_order(self) -> int:
        self.last_order += 1
        return self.last_order


def _order(document: Document) -> int:
    assert document.order is not None
    return document.order


@dataclass(frozen=True)
class Row:
    """One line of a trace."""

    at: int
    customer: str
    cost: int
    weight: int | None = None
    kind: str = KIND


def replay(
    rows: Sequence[Row],
    *,
    workers: int,
    mode: str,
    costs: str = "equal",
    patience_us: int,
    workers_for: Sequence[tuple[str, int]] = (),
) -> list[tuple[int, int, int, int]]:
    """Return (count, priority, started at, finished at) of each line.

    At equal moments documents finish first, then others are submitted, then free workers claim:
    those of one kind before those of all kinds."""
    queue = Reference(mode=mode, costs=costs, patience_us=patience_us)
    kinds = sorted({row.kind for row in rows})
    groups = [([kind], n) for kind, n in workers_for] + [(kinds, workers)]
    documents: list[Document] = []  # by line
    started: dict[Document, int] = {}
    finishes: dict[Document, int] = {}
    running: list[list[Document]] = [[] for _ in groups]
    while len(documents) < len(rows) or any(running):
        moments = [finishes[document] for inside in running for document in inside]
        if len(documents) < len(rows):
            moments.append(rows[len(documents)].at)
        now = min(moments)
        done = [document for inside in running for document in inside if finishes[document] == now]
        for document in sorted(done, key=lambda d: d.number):
            next(inside for inside in running if document in inside).remove(document)
            queue.finish(document, now, rows[document.number - 1].cost)
        while len(documents) < len(rows) and rows[len(documents)].at == now:
            row = rows[len(documents)]
            if row.weight is not None:
                queue.set(row.customer, now, row.weight, None, False)
            documents.append(queue.submit(row.customer, now, cost=row.cost, kind=row.kind))
        while True:
            for (served, workers_of_group), inside in zip(groups, running, strict=True):
                claimed = []
                if len(inside) < workers_of_group:
                    claimed = queue.claim(now, 1, lease_us=10**18, kinds=served)
                if claimed:
                    break
            else:
                break
            started[claimed[0]] = now
            finishes[claimed[0]] = now + rows[claimed[0].number - 1].cost
            inside.append(claimed[0])
    return [(d.count, d.priority, started[d], finishes[d]) for d in documents]
