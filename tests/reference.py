"""The priority rule and the order of service again: slow, obvious and independent.

It deliberately imports nothing from fairturn. Where the engine has heaps, incremental sums and
flows that it drops, this has lists and loops over all documents: it caches nothing that can be
counted and drops nothing. Where the two disagree, one of them is wrong.

Moments are integer microseconds. A document of cost 1 is 1,000,000; a weight of 1 is 1000.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

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
    order: int | None = None
    state: str = "delayed"  # delayed, waiting, running, ended
    seen: str = "nowhere"  # nowhere, waiting, running
    attempts: int = 0
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
    head: int | None = None
    head_since: int = 0
    finished_costs: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Flow:
    customer: Customer
    level: int
    virtual_time: int = 0
    tick: int = 0
    active: bool = False


@dataclass(eq=False)
class Recorded:
    """An event that the next claim folds."""

    at: int
    what: str  # arrived, cancelled, finished, failed, released, settings
    document: Document | None = None
    real_cost: int = 0
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
        self.clocks = [0] * 10
        self.number = 0  # of the last claim that took a document
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
        self, name: Hashable, now: int, *, cost: int | None = None, due_at: int | None = None
    ) -> Document:
        count, priority = self.check(name, now)
        level = 1 if self.mode == "equal" else priority
        self.submitted += 1
        document = Document(
            self.submitted, self.customer(name), count, priority, level, cost, due_at
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

    def claim(self, now: int, n: int = 1, lease_us: int = LEASE_US) -> list[Document]:
        """Make `n` claims one after the other."""
        self._fold(now)
        claimed: list[Document] = []
        for _ in range(n):
            document = self._pick(now)
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
        elif recorded.what == "released":
            self._flow(document).virtual_time -= document.charge
            document.seen = "waiting"
        elif recorded.what == "finished":
            document.seen = "nowhere"
            if self.costs == "learned":
                self._correct(document, recorded.real_cost)

    def _correct(self, document: Document, real_cost: int) -> None:
        document.customer.finished_costs.append(real_cost)
        if document.charged_cost is None or document.charged_weight is None:
            return
        difference = real_cost - document.charged_cost
        self._flow(document).virtual_time += difference * 1000 // document.charged_weight
        total = self._total_weight(document.level)
        if total > 0:
            self.clocks[document.level] += difference * 1000 // total

    def _settle(self, at: int) -> None:
        """After a whole event, update which flows are active and which document is each customer's
        head."""
        waiting = [d for d in self.documents if d.seen == "waiting"]
        for document in waiting:
            self._flow(document)
        if self.mode != "levels":
            waits_in = {(d.customer.name, d.level) for d in waiting}
            for flow in self.flows:
                waits = (flow.customer.name, flow.level) in waits_in
                active = waits and not self.held(flow.customer)
                if active and not flow.active:
                    flow.virtual_time = max(flow.virtual_time, self.clocks[flow.level])
                    self.tick += 1
                    flow.tick = self.tick
                flow.active = active
        for customer in self.customers:
            orders = [_order(d) for d in waiting if d.customer is customer]
            head = min(orders) if orders else None
            if head != customer.head:
                customer.head = head
                customer.head_since = at

    # ── One claim ────────────────────────────────────────────────────────────────────────────────

    def _pick(self, now: int) -> Document | None:
        document = None
        turn: Flow | None = None
        if (self.number + 1) % 10 == 0 and self.mode != "levels":
            document = self._longest_waiting(now)
        if document is None and self.mode == "levels":
            free = [d for d in self._waiting() if not self.held(d.customer)]
            document = min(free, key=lambda d: (d.level, _order(d)), default=None)
        elif document is None:
            turn = min(
                (flow for flow in self.flows if flow.active),
                key=lambda flow: (flow.level, flow.virtual_time, flow.tick),
                default=None,
            )
            if turn is not None:
                inside = [
                    d
                    for d in self._waiting()
                    if d.customer is turn.customer and d.level == turn.level
                ]
                document = min(inside, key=_order)
        if document is None:
            return None

        self.number += 1
        document.charged_cost = document.charged_weight = None
        document.charge = 0
        if turn is not None:
            self._charge(turn, document)
        document.seen = "running"
        self._settle(now)
        return document

    def _longest_waiting(self, now: int) -> Document | None:
        patient = [
            customer
            for customer in self.customers
            if customer.head is not None
            and not self.held(customer)
            and now - customer.head_since > self.patience_us
        ]
        if not patient:
            return None
        first = min(patient, key=lambda c: (c.head_since, -1 if c.head is None else c.head))
        return next(d for d in self._waiting() if d.order == first.head)

    def _charge(self, flow: Flow, document: Document) -> None:
        cost = self._cost(document)
        weight = flow.customer.weight
        document.charged_cost = cost
        document.charged_weight = weight
        document.charge = max(1, cost * 1000 // weight)
        moved = self.clocks[flow.level] + cost * 1000 // self._total_weight(flow.level)
        self.clocks[flow.level] = max(moved, flow.virtual_time)
        flow.virtual_time += document.charge

    def _cost(self, document: Document) -> int:
        if self.costs == "known" and document.cost is not None:
            return document.cost
        if self.costs == "learned" and document.customer.finished_costs:
            last = document.customer.finished_costs[-20:]
            return sum(last) // len(last)
        return COST_ONE

    # ── What can be counted is counted ───────────────────────────────────────────────────────────

    def held(self, customer: Customer) -> bool:
        running = [d for d in self.documents if d.seen == "running" and d.customer is customer]
        at_limit = customer.limit is not None and len(running) >= customer.limit
        return customer.paused or at_limit

    def _waiting(self) -> list[Document]:
        return [d for d in self.documents if d.seen == "waiting"]

    def _total_weight(self, level: int) -> int:
        return sum(
            flow.customer.weight for flow in self.flows if flow.active and flow.level == level
        )

    def _flow(self, document: Document) -> Flow:
        for flow in self.flows:
            if flow.customer is document.customer and flow.level == document.level:
                return flow
        self.flows.append(Flow(document.customer, document.level))
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


def replay(
    rows: Sequence[Row], *, workers: int, mode: str, costs: str = "equal", patience_us: int
) -> list[tuple[int, int, int, int]]:
    """Return (count, priority, started at, finished at) of each line.

    At equal moments documents finish first, then others are submitted, then free workers claim."""
    queue = Reference(mode=mode, costs=costs, patience_us=patience_us)
    documents: list[Document] = []  # by line
    started: dict[Document, int] = {}
    finishes: dict[Document, int] = {}
    running: list[Document] = []
    while len(documents) < len(rows) or running:
        moments = [finishes[document] for document in running]
        if len(documents) < len(rows):
            moments.append(rows[len(documents)].at)
        now = min(moments)
        done = [document for document in running if finishes[document] == now]
        for document in sorted(done, key=lambda d: d.number):
            running.remove(document)
            queue.finish(document, now, rows[document.number - 1].cost)
        while len(documents) < len(rows) and rows[len(documents)].at == now:
            row = rows[len(documents)]
            if row.weight is not None:
                queue.set(row.customer, now, row.weight, None, False)
            documents.append(queue.submit(row.customer, now, cost=row.cost))
        for document in queue.claim(now, workers - len(running), lease_us=10**18):
            started[document] = now
            finishes[document] = now + rows[document.number - 1].cost
            running.append(document)
    return [(d.count, d.priority, started[d], finishes[d]) for d in documents]
