"""Discrete-event simulation of a trace: when each document starts and finishes.

Within one instant, leases expire, documents finish (by their number in the trace), documents are
submitted (in the order of the trace) and cancelled, delays end, workers are lost or return, and
free workers claim; repeated until nothing changes.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from fairturn.priority import Count, Rule
from fairturn.scheduling.flows import PATIENCE_US, WEIGHT_ONE, Costs, Mode, Pick
from fairturn.simulator.holds import NEVER, HeldOrder, Hold
from fairturn.simulator.orders import Order, Paper, RealOrder
from fairturn.simulator.plan import Outage, Plan, Step
from fairturn.simulator.trace import Trace

_REPORT_EVERY = 10_000
_ONE_WORKER = Plan()


class SimulatedAttempt(NamedTuple):
    document: int
    waited_from: int
    started_at: int
    ended_at: int
    group: int  # of the worker, by its number in `Plan.groups`


class Replayed:
    """The outcome of each document, as columns in the order of the trace.

    `started_at`, `finished_at` and `group`, that of the worker, are those of the successful
    attempt; `again_at` has when a document began to wait for it, if later than its submission;
    `earlier` has the attempts before. Documents in `cancelled` and `dead` have no successful
    attempt.
    """

    def __init__(self, documents: int) -> None:
        self.count = array("q", bytes(8 * documents))
        self.priority = array("b", bytes(documents))
        self.started_at = array("q", bytes(8 * documents))
        self.finished_at = array("q", bytes(8 * documents))
        self.group = array("i", bytes(4 * documents))
        self.again_at: dict[int, int] = {}
        self.earlier: list[SimulatedAttempt] = []
        self.cancelled: dict[int, int] = {}  # document -> when
        self.dead: dict[int, int] = {}  # document -> when
        self.holds: list[Hold] = []  # during outages


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


class _State(IntEnum):
    WAITING = 0  # or not submitted yet
    RUNNING = 1
    LOST = 2  # with its worker; running to the queue until the lease expires
    DELAYED = 3  # after a failed attempt
    ENDED = 4


class _Replay:
    """The simulation. It has more than 15 attributes because it is the state of all documents,
    workers and pending events."""

    def __init__(self, trace: Trace, order: Order, result: Replayed, plan: Plan) -> None:
        self.trace = trace
        self.held = None if plan.is_unheld else HeldOrder(order, trace, plan)
        self.order = self.held or order
        self.plan = plan
        self.result = result
        groups = plan.groups(len(trace.kind_names))
        self.free = [group.workers for group in groups]
        self.served = [group.kinds for group in groups]
        self.found: dict[int, Outage] = {}  # by running attempts, which will report them
        self.ended = 0
        self.state = bytearray(len(trace))
        self.running: list[tuple[int, int]] = []  # (when it finishes, number), a heap
        self.picks: dict[int, Pick] = {}
        self.failed: Counter[int] = Counter()  # failures of the plan, by document
        self.attempts: Counter[int] = Counter()  # that count, by document, without the present one
        self.returned: Counter[int] = Counter()  # reports of outages that used no attempt
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
        now = -1
        while self.ended < documents:
            now = self._next_at(arrivals[submitted] if submitted < documents else NEVER, now)
            if agenda:
                self._run_agenda(now, Step.LEASE)
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
        if self.held is not None:
            self.result.holds = self.held.ended
        return self.result

    def _next_at(self, arrives_at: int, last: int) -> int:
        """Return the time of the next event; `last` is that of the last one."""
        now = arrives_at
        if self.running and self.running[0][0] < now:
            now = self.running[0][0]
        if self.agenda:
            now = min(now, self.agenda[0][0])
        if self.held is not None:
            now = min(now, self.held.changes_after(last))
        assert now < NEVER, "documents wait, but no event is pending"
        return now

    def _paper(self, n: int) -> Paper:
        trace = self.trace
        priority = self.result.priority[n]
        kind = trace.kind_of(n)
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
            kinds = self.served[group]
            if not self.free[group] or (pick := self.order.pick(now, kinds)) is None:
                group += 1
                continue
            n = pick.order
            self.free[group] -= 1
            self.result.group[n] = group
            group = 0
            self.picks[n] = pick
            self.state[n] = _State.RUNNING
            self.result.started_at[n] = now
            heappush(self.running, (now + self._begin(n, now), n))

    def _begin(self, n: int, now: int) -> int:
        """Begin an attempt and return how long it will run."""
        if self.plan.outages:
            outage = self.plan.outage_at(self.trace.kind_of(n), now)
            if outage is not None:
                self.found[n] = outage
                return outage.fails_after_us
        return self.trace.cost[n]

    # ── Ends of attempts ─────────────────────────────────────────────────────────────────────────

    def _finish(self, n: int, now: int) -> None:
        self.free[self.result.group[n]] += 1
        pick = self.picks.pop(n)
        if n in self.found:
            self._report(n, pick, self.found.pop(n), now)
            return
        delays = self.plan.failures.get(n, ()) if self.plan.failures else ()
        failed = self.failed[n] if delays else 0
        if failed < len(delays):
            self.order.end(pick, None, now)
            self.failed[n] = failed + 1
            self._fail(n, now, delays[failed])
            return
        self.order.end(pick, self.trace.cost[n], now)
        self.result.finished_at[n] = now
        self._end(n)

    def _report(self, n: int, pick: Pick, outage: Outage, now: int) -> None:
        """End an attempt that found a service unavailable."""
        assert self.held is not None
        result = self.held.report(pick, outage, now)
        if result.uses_attempt(self.returned[n]):
            self._fail(n, now, result.delay_us)
        else:
            self.returned[n] += 1
            self._delay(n, now, result.delay_us)

    def _fail(self, n: int, now: int, delay: int) -> None:
        """End an attempt that counts."""
        self.attempts[n] += 1
        if self.attempts[n] < self.plan.attempts_max or self._is_cancelled(n, now):
            self._delay(n, now, delay)
        else:
            self._note_attempt(n, now)
            self._die(n, now)

    def _delay(self, n: int, now: int, delay: int) -> None:
        self._interrupt(n, now, _State.DELAYED, now + delay)
        if self._is_cancelled(n, now):
            self._cancel(n, now)

    def _is_cancelled(self, n: int, now: int) -> bool:
        """Whether a running document was cancelled before this time."""
        return self.cancelled_at.get(n, now) < now

    def _interrupt(self, n: int, now: int, state: _State, until: int) -> None:
        self._note_attempt(n, now)
        self.state[n] = state
        step = Step.LEASE if state is _State.LOST else Step.DUE
        heappush(self.agenda, (until, step, n))

    def _note_attempt(self, n: int, now: int) -> None:
        result = self.result
        waited_from = result.again_at.get(n, self.trace.at[n])
        attempt = SimulatedAttempt(n, waited_from, result.started_at[n], now, result.group[n])
        result.earlier.append(attempt)

    def _die(self, n: int, now: int) -> None:
        self.result.dead[n] = now
        self._end(n)

    def _end(self, n: int) -> None:
        self.state[n] = _State.ENDED
        self.ended += 1

    # ── The agenda ───────────────────────────────────────────────────────────────────────────────

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
            elif self.state[n] == _State.LOST:
                self._expire(n, now)
            elif self.state[n] == _State.DELAYED:
                self._wait_again(n, now)
                self.order.arrive(self._paper(n), now)

    def _lose(self, workers: int, now: int) -> None:
        """Lose workers that serve all kinds: busy ones first, by the numbers of their documents."""
        running, general = self.running, len(self.free) - 1
        lost = sorted(n for _, n in running if self.result.group[n] == general)[:workers]
        self.free[-1] -= workers - len(lost)
        for n in lost:
            self.found.pop(n, None)
            if self.held is not None:
                self.held.lose(n)
            self._interrupt(n, now, _State.LOST, now + self.plan.lease_us)
        running[:] = [entry for entry in running if self.state[entry[1]] == _State.RUNNING]
        heapify(running)

    def _expire(self, n: int, now: int) -> None:
        """End the lease of a document whose worker was lost."""
        pick = self.picks.pop(n)
        self.attempts[n] += 1
        if self.cancelled_at.get(n, NEVER) <= now:
            self.order.end(pick, None, now)
            self.state[n] = _State.DELAYED
            self._cancel(n, now)
        elif self.attempts[n] >= self.plan.attempts_max:
            self.order.end(pick, None, now)
            self._die(n, now)
        else:
            self._wait_again(n, now)
            self.order.take_back(self._paper(n), now)

    def _wait_again(self, n: int, now: int) -> None:
        self.state[n] = _State.WAITING
        self.result.again_at[n] = now

    def _cancel(self, n: int, now: int) -> None:
        """Cancel a waiting or delayed document; a running or ended one does not change."""
        if self.state[n] == _State.WAITING:
            self.order.leave(self._paper(n), now)
        elif self.state[n] == _State.DELAYED:
            self.result.again_at[n] = now  # a delayed document does not wait
        else:
            return
        self.result.cancelled[n] = now
        self._end(n)
