"""Measures of workers: how busy they are, when they are idle although documents wait, and how an
outage passes (pure)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fairturn.scheduling.outages import RESUME_US
from fairturn.simulator.measures import attempts_of, waits_of_all
from fairturn.simulator.plan import Outage, WorkerGroup
from fairturn.simulator.replay import Replayed
from fairturn.simulator.scenario import Scenario


class GroupLoad(NamedTuple):
    """The share of their time in which the workers of a group ran documents, until the last
    document ended."""

    group: WorkerGroup
    busy: float


class OutageResult(NamedTuple):
    """How an outage passed.

    `requests` are the attempts that found the service unavailable. `recovery_us` is the time from
    the return of the service until the full rate is back: no worker that serves a kind of the
    outage is idle although documents of it wait, or the number of running documents is unlimited
    again."""

    requests: int
    recovery_us: int


class _Interval(NamedTuple):
    """Free workers by group, waiting and running documents by kind, while nothing changes."""

    begin: int
    end: int
    free: list[int]
    waiting: list[int]
    running: list[int]


def loads(scenario: Scenario, run: Replayed) -> tuple[GroupLoad, ...]:
    """Return how busy each group of workers was."""
    plan, groups = scenario.plan, scenario.worker_groups
    attempts = list(attempts_of(scenario, run))
    ends_at = max((attempt.ended_at for attempt in attempts), default=0)
    busy = [0] * len(groups)
    for attempt in attempts:
        busy[attempt.group] += attempt.ended_at - attempt.started_at
    present = [group.workers * ends_at for group in groups]
    for loss in plan.losses:
        present[-1] -= loss.workers * max(0, min(loss.back_at, ends_at) - loss.at)
    return tuple(
        GroupLoad(group, of_group / most if most else 0.0)
        for group, of_group, most in zip(groups, busy, present, strict=True)
        if group.workers
    )


def idle_while_waiting(scenario: Scenario, run: Replayed) -> int:
    """Return the microseconds that workers were idle while documents that they serve waited, held
    or not."""
    groups = scenario.worker_groups
    return sum(
        (interval.end - interval.begin) * _idle(groups, interval.free, interval.waiting)
        for interval in _intervals(scenario, run)
    )


def outage_results(scenario: Scenario, run: Replayed) -> tuple[OutageResult, ...]:
    """Return how each outage of the plan passed."""
    kind_of = scenario.trace.kind_of
    attempts = list(attempts_of(scenario, run))
    return tuple(
        OutageResult(
            requests=sum(
                outage.at <= attempt.started_at < outage.back_at
                for attempt in attempts
                if kind_of(attempt.document) in outage.kinds
            ),
            recovery_us=_full_rate_at(scenario, run, outage) - outage.back_at,
        )
        for outage in scenario.plan.outages
    )


def _full_rate_at(scenario: Scenario, run: Replayed, outage: Outage) -> int:
    """Return when the full rate was back after an outage."""
    held_until = [
        hold.ended_at
        for hold in run.holds
        if hold.kinds == outage.kinds and outage.at <= hold.began_at < outage.back_at
    ]
    resumed_at = max([outage.back_at, *held_until])
    limits = scenario.plan.kind_limits
    for interval in _intervals(scenario, run):
        if interval.end <= resumed_at:
            continue
        eligible = [0] * len(interval.waiting)
        for kind in outage.kinds:
            limit = limits.get(kind, interval.running[kind] + interval.waiting[kind])
            eligible[kind] = min(interval.waiting[kind], limit - interval.running[kind])
        if not _idle(scenario.worker_groups, interval.free, eligible):
            return min(max(interval.begin, resumed_at), resumed_at + RESUME_US)
    return resumed_at


def _idle(groups: Sequence[WorkerGroup], free: Sequence[int], waiting: Sequence[int]) -> int:
    """Return how many of the free workers could take one of the waiting documents each."""
    left = list(waiting)
    idle = 0
    for group, workers in zip(groups, free, strict=True):
        idle_of_group = 0
        for kind in group.kinds:
            taken = max(0, min(workers - idle_of_group, left[kind]))
            idle_of_group += taken
            left[kind] -= taken
        idle += idle_of_group
    return idle


def _intervals(scenario: Scenario, run: Replayed) -> Iterator[_Interval]:
    """Yield the intervals in which nothing changes, in order. The lists of one are those of the
    next."""
    groups, kind_of = scenario.worker_groups, scenario.trace.kind_of
    free = [group.workers for group in groups]
    waiting, running = ([0] * len(scenario.trace.kind_names) for _ in range(2))
    # (when, which of the lists, index in it, change)
    lists = (free, waiting, running)
    changes = [(at, 0, len(free) - 1, change) for at, change in scenario.plan.changes()]
    for attempt in attempts_of(scenario, run):
        kind = kind_of(attempt.document)
        for at, change in ((attempt.started_at, 1), (attempt.ended_at, -1)):
            changes += [(at, 0, attempt.group, -change), (at, 2, kind, change)]
    for n, (begin, end) in waits_of_all(scenario, run):
        changes += [(begin, 1, kind_of(n), 1), (end, 1, kind_of(n), -1)]
    changes.sort()
    last = 0
    for at, which, index, change in changes:
        if at > last:
            yield _Interval(last, at, free, waiting, running)
            last = at
        lists[which][index] += change
