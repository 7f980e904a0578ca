"""Measures of documents in a run: waits, gaps, lags behind the ideals, Jain's index (pure).

The wait of a document is the time from its submission to its end, less the time that it takes in an
empty system. Without failures and lost workers, that is the time from submission to start.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fairturn.scheduling.flows import WEIGHT_ONE
from fairturn.simulator.ideal import Ideal
from fairturn.simulator.replay import Replayed, SimulatedAttempt
from fairturn.simulator.scenario import Scenario
from fairturn.simulator.trace import Trace

WINDOW_US = 300_000_000

Spell = tuple[int, int]  # from, until
# A customer has turns in each kind: a claim of one kind does not serve its documents of another.
CustomerAndKind = tuple[int, int]


class WaitSummary(NamedTuple):
    """The waits of the finished documents of a group."""

    documents: int
    cancelled: int
    dead: int
    mean_us: int
    p50_us: int
    p95_us: int
    p99_us: int
    max_us: int


class Evenness(NamedTuple):
    """Jain's index of the service per weight of customers that waited throughout a window: 1 if all
    received the same, 1/n if one of n received all."""

    windows: int  # with at least two such customers, at least one of them served
    mean: float
    least: float


def waits_of(documents: Iterable[int], scenario: Scenario, run: Replayed | Ideal) -> list[int]:
    """Return the sorted waits of the documents that finished."""
    trace, plan, without = scenario.trace, scenario.plan, unfinished(run)
    return sorted(
        max(0, run.finished_at[n] - trace.at[n] - plan.alone_us(n, trace.cost[n]))
        for n in documents
        if n not in without
    )


def unfinished(run: Replayed | Ideal) -> Mapping[int, int]:
    """Return the documents that ended without finishing, and when."""
    return run.cancelled if isinstance(run, Ideal) else {**run.cancelled, **run.dead}


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest value that is at least `percent` per cent of the sorted values."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def summary_of(waits: Sequence[int], *, cancelled: int, dead: int = 0) -> WaitSummary:
    """Return a summary of sorted waits; zeros if there are none."""
    if not waits:
        return WaitSummary(0, cancelled, dead, 0, 0, 0, 0, 0)
    return WaitSummary(
        documents=len(waits),
        cancelled=cancelled,
        dead=dead,
        mean_us=round(sum(waits) / len(waits)),
        p50_us=percentile(waits, 50),
        p95_us=percentile(waits, 95),
        p99_us=percentile(waits, 99),
        max_us=waits[-1],
    )


def lag(ideal: Sequence[int], real: Sequence[int]) -> int:
    """Return the most documents that a customer was behind the ideal, by sorted finish times."""
    behind = (done - bisect_right(real, at) for done, at in enumerate(ideal, start=1))
    return max(0, max(behind, default=0))


def finishes_by_customer(scenario: Scenario, run: Replayed | Ideal) -> list[list[int]]:
    """Return the sorted finish times of each customer."""
    found: list[list[int]] = [[] for _ in scenario.trace.names]
    without = unfinished(run)
    for n, at in enumerate(run.finished_at):
        if n not in without:
            found[scenario.trace.customer[n]].append(at)
    for of_customer in found:
        of_customer.sort()
    return found


# ── From attempts ────────────────────────────────────────────────────────────────────────────────


def attempts_of(scenario: Scenario, run: Replayed) -> Iterator[SimulatedAttempt]:
    yield from run.earlier
    at, again, without = scenario.trace.at, run.again_at, unfinished(run)
    columns = zip(run.started_at, run.finished_at, run.group, strict=True)
    for n, (started, finished, group) in enumerate(columns):
        if n not in without:
            yield SimulatedAttempt(n, again.get(n, at[n]), started, finished, group)


def waits_of_all(scenario: Scenario, run: Replayed) -> Iterator[tuple[int, Spell]]:
    """Yield the waits of all documents: for each attempt, and for a cancel."""
    for attempt in attempts_of(scenario, run):
        yield attempt.document, (attempt.waited_from, attempt.started_at)
    for n, cancelled_at in run.cancelled.items():
        yield n, (run.again_at.get(n, scenario.trace.at[n]), cancelled_at)


def waiting_spells(scenario: Scenario, run: Replayed) -> dict[CustomerAndKind, list[Spell]]:
    """Return the intervals in which documents of each customer and kind waited, sorted and
    merged."""
    spells: defaultdict[CustomerAndKind, list[Spell]] = defaultdict(list)
    trace = scenario.trace
    for n, (begin, end) in waits_of_all(scenario, run):
        if end > begin:
            spells[trace.customer[n], trace.kind_of(n)].append((begin, end))
    return {whose: joined(waits) for whose, waits in spells.items()}


def joined(spells: Iterable[Spell]) -> list[Spell]:
    union: list[Spell] = []
    for begin, end in sorted(spells):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def longest_gaps(scenario: Scenario, run: Replayed) -> list[int]:
    """Return the longest time that each customer waited in one kind without a claim of it."""
    gaps = [0] * len(scenario.trace.names)
    claims = claims_of(scenario, run)
    for whose, spells in waiting_spells(scenario, run).items():
        customer = whose[0]
        gaps[customer] = max(gaps[customer], longest_gap(spells, claims.get(whose, ())))
    return gaps


def longest_gap(spells: Sequence[Spell], claims: Sequence[int]) -> int:
    """Return the longest time of waiting without a claim, by sorted claims."""
    longest = 0
    first = 0
    for begin, end in spells:
        first = bisect_right(claims, begin, first)
        last = bisect_right(claims, end, first)
        timestamps = [begin, *claims[first:last], end]
        longest = max(longest, *(after - before for before, after in pairwise(timestamps)))
        first = last
    return longest


def claims_of(scenario: Scenario, run: Replayed) -> dict[CustomerAndKind, list[int]]:
    """Return the sorted timestamps of the claims of each customer and kind."""
    claims: defaultdict[CustomerAndKind, list[int]] = defaultdict(list)
    trace = scenario.trace
    for attempt in attempts_of(scenario, run):
        n = attempt.document
        claims[trace.customer[n], trace.kind_of(n)].append(attempt.started_at)
    for timestamps in claims.values():
        timestamps.sort()
    return claims


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of shares that are not all zero."""
    largest = max(shares)
    parts = [share / largest for share in shares]  # so that no square underflows or overflows
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


def evenness(scenario: Scenario, run: Replayed, window_us: int = WINDOW_US) -> Evenness:
    """Return how evenly the customers that waited in one kind throughout each window were
    served."""
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)  # (window, kind) -> customers
    for (customer, kind), spells in sorted(waiting_spells(scenario, run).items()):
        for begin, end in spells:
            for window in range(-(-begin // window_us), end // window_us):
                waiting[window, kind].append(customer)
    waiting = {where: members for where, members in waiting.items() if len(members) > 1}
    served: dict[tuple[int, int, int], int] = {
        (*where, customer): 0 for where, members in waiting.items() for customer in members
    }
    trace = scenario.trace
    for attempt in attempts_of(scenario, run) if served else ():
        kind, customer = trace.kind_of(attempt.document), trace.customer[attempt.document]
        for window in range(attempt.started_at // window_us, attempt.ended_at // window_us + 1):
            if (window, kind, customer) in served:
                begin = max(attempt.started_at, window * window_us)
                end = min(attempt.ended_at, (window + 1) * window_us)
                served[window, kind, customer] += end - begin
    weights = last_weights(scenario)
    indices = []
    for where, members in sorted(waiting.items()):
        shares = [served[(*where, customer)] / weights[customer] for customer in members]
        if any(shares):
            indices.append(jain(shares))
    if not indices:
        return Evenness(0, 1.0, 1.0)
    return Evenness(len(indices), sum(indices) / len(indices), min(indices))


def last_weights(scenario: Scenario) -> list[int]:
    """Return the weight of each customer at the end."""
    weights = [WEIGHT_ONE] * len(scenario.trace.names)
    for n, weight in sorted(scenario.trace.weight.items()):
        weights[scenario.trace.customer[n]] = weight
    return weights


# ── Waits of a replayed trace ────────────────────────────────────────────────────────────────────


class Waits(NamedTuple):
    """The waits from submission to start, and the range of priorities."""

    documents: int
    p50_us: int
    p99_us: int
    max_us: int
    best_priority: int
    worst_priority: int


def waits_by_customer(trace: Trace, replayed: Replayed) -> dict[str, Waits]:
    """Return the waits of each customer, in the order of their first documents."""
    documents: list[list[int]] = [[] for _ in trace.names]
    for n, customer in enumerate(trace.customer):
        documents[customer].append(n)
    found = zip(trace.names, documents, strict=True)
    return {name: _waits(of_customer, trace, replayed) for name, of_customer in found}


def waits_in_all(trace: Trace, replayed: Replayed) -> Waits:
    """Return the waits of all documents of a trace that is not empty."""
    return _waits(range(len(trace)), trace, replayed)


def _waits(documents: Sequence[int], trace: Trace, replayed: Replayed) -> Waits:
    waits = sorted(replayed.started_at[n] - trace.at[n] for n in documents)
    priorities = {replayed.priority[n] for n in documents}
    return Waits(
        documents=len(waits),
        p50_us=percentile(waits, 50),
        p99_us=percentile(waits, 99),
        max_us=waits[-1],
        best_priority=min(priorities),
        worst_priority=max(priorities),
    )
