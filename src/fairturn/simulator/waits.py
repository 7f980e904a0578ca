"""The waits of a replayed trace, by customer and in total."""

from typing import NamedTuple

from fairturn.simulator.measures import percentile
from fairturn.simulator.replay import Replayed
from fairturn.simulator.trace import Trace


class Waits(NamedTuple):
    """Waits from submission to start, and the range of priorities."""

    documents: int
    p50_us: int
    p99_us: int
    max_us: int
    best_priority: int
    worst_priority: int


def waits_by_customer(trace: Trace, replayed: Replayed) -> dict[str, Waits]:
    """Return the waits of each customer, in the order of their first documents."""
    waits: list[list[int]] = [[] for _ in trace.names]
    priorities: list[set[int]] = [set() for _ in trace.names]
    for n, customer in enumerate(trace.customer):
        waits[customer].append(replayed.started_at[n] - trace.at[n])
        priorities[customer].add(replayed.priority[n])
    return {
        name: _waits(waits[customer], priorities[customer])
        for customer, name in enumerate(trace.names)
    }


def waits_in_all(trace: Trace, replayed: Replayed) -> Waits:
    """Return the waits of all documents of a trace that is not empty."""
    waits = [started - at for started, at in zip(replayed.started_at, trace.at, strict=True)]
    return _waits(waits, set(replayed.priority))


def _waits(waits: list[int], priorities: set[int]) -> Waits:
    waits.sort()
    return Waits(
        documents=len(waits),
        p50_us=percentile(waits, 50),
        p99_us=percentile(waits, 99),
        max_us=waits[-1],
        best_priority=min(priorities),
        worst_priority=max(priorities),
    )
