"""Discrete-event simulation of a trace: when each document starts and finishes.

Within one instant, leases expire, documents finish (by their number in the trace), documents are
submitted (in the order of the trace) and cancelled, delays end, workers are lost or return, and
free workers claim; repeated until nothing changes.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from fairturn.priority import Count, Rule
from fairturn.scheduling.flows import DEFAULT_KIND, PATIENCE_US, WEIGHT_ONE, Costs, Mode, Pick
from fairturn.simulator.orders import Order, Paper, RealOrder
from fairturn.simulator.plan import Plan, Step
from fairturn.simulator.trace import Trace

_REPORT_EVERY = 10_000
_NEVER = 1 << 63
_ONE_WORKER = Plan()


class SimulatedAttempt(NamedTuple):
    document: int
    waited_from: int
    started_at: int
    ended_at: int


class Replayed:
    """The outcome of each document, as columns in the order of the trace.

    `started_at` and `finished_at` are those of the successful attempt; `again_at` has when a
    document began to wait for it, if later than its submission; `earlier` has the attempts before.
    A document in `cancelled` has no successful attempt.
    """

    def __init__(self, documents: int) -> None:
        self.count = array("q", bytes(8 * documents))
        self.priority = array("b", bytes(documents))
        self.started_at = array("q", bytes(8 * documents))
        self.finished_at = array("q", bytes(8 * documents))
        self.again_at: dict[int, int] = {}
        self.earlier: list[SimulatedAttempt] = []
        self.cancelled: dict[int, int] = {}  # document -> when


def replay(
    trace: Trace,
    *,
    rule: Rule,
    mode: Mode = Mode.FAIR,
    plan: Plan = _ONE_WORKER,
    costs: Costs = Costs.EQUAL,
    patience_us: int = PATIENCE_US,
    progress: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Simulate a trace in a mode of the queue. `progress` is called with the documents done."""
    order = RealOrder(mode=mode, costs=costs, patience_us=patience_us, kinds=trace.kinds)
    return serve(trace, order, rule=rule, plan=plan, progress=progress)


def plan_of(trace: Trace, workers: int, workers_for: Sequence[tuple[str, int]] = ()) -> Plan:
    """Return a plan in which nothing fails: `workers` serve all kinds; `workers_for` has groups of
    workers that serve one kind each.

    Raises `ValueError` without workers, for a group whose kind no document has, and for a kind that
    no worker serves.
    """
    for kind, _ in workers_for:
        if kind not in trace.kinds:
            known = ", ".join(trace.kinds) or "none: the trace has no column kind"
            raise ValueError(f"no document is of kind {kind!r}; kinds of the trace: {known}")
    served = {kind for kind, n in workers_for if n > 0}
    if workers == 0 and len(trace) and (unserved := [k for k in trace.kinds if k not in served]):
        raise ValueError(
            f"no worker serves kind {unserved[0]!r}; add workers for it, or workers that serve all "
            "kinds"
        )
    groups = tuple((trace.kinds.index(kind), n) for kind, n in workers_for)
    return Plan(workers=workers, workers_for=groups)


def serve(
    trace: Trace,
    order: Order,
    *,
    rule: Rule,
    plan: Plan,
    progress: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Simulate a trace in any order, with the failures of the plan."""
    result = Replayed(len(trace))
    result.count, result.priority = check_all(trace, rule)
    return _Replay(trace, order, result, plan).run(progress)


def check_all(trace: Trace, rule: Rule) -> tuple["array[int]", "array[int]"]:
    """Return the counts and priorities of all documents, which depend on submissions only."""
    last: list[Count | None] = [None] * len(trace.names)
    counts = array("q", bytes(8 * len(trace)))
    priorities = array("b", bytes(len(trace)))
    for n, (customer, at) in enumerate(zip(trace.customer, trace.at, strict=True)):
        count = last[customer] = rule.check(last[customer], at)
        counts[n] = count.value
        priorities[n] = rule.priority(count.value)
    return counts, priorities


def _claims_of_kinds(order: Order, plan: Plan) -> Iterator[Callable[[int], Pick | None]]:
    if plan.workers_for and not isinstance(order, RealOrder):
        raise ValueError("only the order of the queue has workers for one kind")
    for kind, _ in plan.workers_for:
        assert isinstance(order, RealOrder)
        yield partial(order.pick, kinds=(kind,))


class _State(IntEnum):
    WAITING = 0  # or not submitted yet
    RUNNING = 1
    LOST = 2  # with its worker; running to the queue until the lease expires
    DELAYED = 3  # after a failed attempt
    ENDED = 4


class _Replay:
    def __init__(self, trace: Trace, order: Order, result: Replayed, plan: Plan) -> None:
        self.trace = trace
        self.order = order
        self.plan = plan
        self.result = result
        # Free workers of each group, in the order in which the groups are asked. The workers that
        # serve all kinds are the last group.
        self.free = [*(n for _, n in plan.workers_for), plan.workers]
        self.claims = [*_claims_of_kinds(order, plan), order.pick]
        self.group: dict[int, int] = {}  # of the worker that runs the document
        self.ended = 0
        self.state = bytearray(len(trace))
        self.running: list[tuple[int, int]] = []  # (when it finishes, number), a heap
        self.picks: dict[int, Pick] = {}
        self.failed: dict[int, int] = {}  # failed attempts by document
        self.cancelled_at = plan.cancelled_at()
        self.agenda = plan.agenda()
        for at, document in plan.cancels:
            if at < trace.at[document]:
                raise ValueError(
                    f"document {document} is cancelled at {at}, before its submission at "
                    f"{trace.at[document]}"
                )

    def run(self, progress: Callable[[int], None]) -> Replayed:
        for customer, limit in self.plan.limits.items():
            self.order.change(customer, WEIGHT_ONE, limit, 0)
        arrivals, running, agenda = self.trace.at, self.running, self.agenda
        submitted, reported, documents = 0, 0, len(arrivals)
        while self.ended < documents:
            now = arrivals[submitted] if submitted < documents else _NEVER
            if running and running[0][0] < now:
                now = running[0][0]
            if agenda:
                now = min(now, agenda[0][0])
                self._run_agenda(now, Step.LEASE)
            assert now < _NEVER, "documents wait, but no event is pending"
            while running and running[0][0] == now:
                self._finish(heappop(running)[1], now)
            while submitted < documents and arrivals[submitted] == now:
                self._submit(submitted, now)
                submitted += 1
            if agenda:
                self._run_agenda(now, Step.WORKERS)
            self._claim(now)
            if self.ended - reported >= _REPORT_EVERY:
                reported = self.ended - self.ended % _REPORT_EVERY
                progress(reported)
        return self.result

    def _paper(self, n: int) -> Paper:
        trace = self.trace
        kind = trace.kind[n] if trace.kind else DEFAULT_KIND
        priority = self.result.priority[n]
        return Paper(n, trace.customer[n], priority, trace.at[n], trace.cost[n], kind)

    def _submit(self, n: int, now: int) -> None:
        weight = self.trace.weight.get(n)
        if weight is not None:
            customer = self.trace.customer[n]
            self.order.change(customer, weight, self.plan.limits.get(customer), now)
        self.order.arrive(self._paper(n), now)

    def _claim(self, now: int) -> None:
        group = 0  # each document goes to the first group that can take it
        while group < len(self.free):
            if not self.free[group] or (pick := self.claims[group](now)) is None:
                group += 1
                continue
            n = pick.order
            self.free[group] -= 1
            self.group[n] = group
            group = 0
            self.picks[n] = pick
            self.state[n] = _State.RUNNING
            self.result.started_at[n] = now
            heappush(self.running, (now + self.trace.cost[n], n))

    def _finish(self, n: int, now: int) -> None:
        self.free[self.group.pop(n)] += 1
        pick = self.picks.pop(n)
        delays = self.plan.failures.get(n, ()) if self.plan.failures else ()
        failed = self.failed.get(n, 0) if delays else 0
        if failed < len(delays):
            self.order.end(pick, None, now)
            self.failed[n] = failed + 1
            self._interrupt(n, now, _State.DELAYED, now + delays[failed])
            if self.cancelled_at.get(n, now) < now:
                self._cancel(n, now)
            return
        self.order.end(pick, self.trace.cost[n], now)
        self.result.finished_at[n] = now
        self.state[n] = _State.ENDED
        self.ended += 1

    # ── Failures ─────────────────────────────────────────────────────────────────────────────────

    def _run_agenda(self, now: int, last: Step) -> None:
        """Apply the events of this instant, up to this kind of step."""
        agenda = self.agenda
        while agenda and agenda[0][:2] <= (now, last):
            _, step, n = heappop(agenda)
            if step is Step.CANCEL:
                self._cancel(n, now)
            elif step is Step.WORKERS:
                self._lose(max(0, -n), now)
                self.free[-1] += max(0, n)
            elif self.state[n] == _State.LOST and self.cancelled_at.get(n, _NEVER) <= now:
                self.order.end(self.picks.pop(n), None, now)
                self.state[n] = _State.DELAYED
                self._cancel(n, now)
            elif self.state[n] == _State.LOST:
                self._wait_again(n, now)
                del self.picks[n]
                self.order.take_back(self._paper(n), now)
            elif self.state[n] == _State.DELAYED:
                self._wait_again(n, now)
                self.order.arrive(self._paper(n), now)

    def _wait_again(self, n: int, now: int) -> None:
        self.state[n] = _State.WAITING
        self.result.again_at[n] = now

    def _lose(self, workers: int, now: int) -> None:
        """Lose workers that serve all kinds: busy ones first, by the numbers of their documents."""
        running, general = self.running, len(self.free) - 1
        lost = sorted(n for _, n in running if self.group[n] == general)[:workers]
        self.free[-1] -= workers - len(lost)
        for n in lost:
            self._interrupt(n, now, _State.LOST, now + self.plan.lease_us)
        running[:] = [entry for entry in running if self.state[entry[1]] == _State.RUNNING]
        heapify(running)

    def _interrupt(self, n: int, now: int, state: _State, until: int) -> None:
        result = self.result
        waited_from = result.again_at.get(n, self.trace.at[n])
        result.earlier.append(SimulatedAttempt(n, waited_from, result.started_at[n], now))
        self.state[n] = state
        step = Step.LEASE if state is _State.LOST else Step.DUE
        heappush(self.agenda, (until, step, n))

    def _cancel(self, n: int, now: int) -> None:
        """Cancel a waiting or delayed document; a running or ended one does not change."""
        if self.state[n] == _State.WAITING:
            self.order.leave(self._paper(n), now)
        elif self.state[n] == _State.DELAYED:
            self.result.again_at[n] = now  # a delayed document does not wait
        else:
            return
        self.result.cancelled[n] = now
        self.state[n] = _State.ENDED
        self.ended += 1
