"""Waits of the quiet customers of a demo, measured and simulated in two other orders.

The traffic of a demo is known in advance, so the same arrivals can be simulated at the start.
"""

import threading
from typing import NamedTuple

from fairturn.clock import SECOND_US
from fairturn.dashboard.samples import RecentActivity, quantile
from fairturn.priority import Rule
from fairturn.simulator.comparison import Discipline, compare
from fairturn.simulator.demo import traffic
from fairturn.simulator.plan import Plan
from fairturn.simulator.scenario import Scenario
from fairturn.simulator.trace import Growing


class ComparisonResult(NamedTuple):
    """The p99 waits of the quiet customers; None while unknown."""

    first_come_us: int | None
    levels_us: int | None
    fair_us: int | None


class DemoComparison:
    """Simulates the arrivals of a demo, in a thread."""

    def __init__(self, pace: traffic.DemoPace) -> None:
        self._pace = pace
        self._simulated: tuple[int | None, int | None] = (None, None)
        threading.Thread(target=self._simulate, daemon=True).start()

    def with_measured(self, lately: RecentActivity) -> ComparisonResult:
        """Return the simulated waits and the recently measured ones."""
        waits = [
            wait for name, found in lately.waits.items() if name in traffic.QUIET for wait in found
        ]
        return ComparisonResult(*self._simulated, quantile(waits, 0.99))

    def _simulate(self) -> None:
        rule = Rule(reset_interval_us=round(traffic.SHORT_RESET_INTERVAL_S * SECOND_US))
        modes = (Discipline.FIFO, Discipline.LEVELS)
        found = compare(_scenario(self._pace), modes, rule=rule)
        first_come, levels = (found.of(mode).groups[0].waits.p99_us for mode in modes)
        self._simulated = (first_come, levels)


def _scenario(pace: traffic.DemoPace) -> Scenario:
    """Return the arrivals, with the quiet customers as the first group."""
    growing = Growing()
    for at_s, customer, documents in traffic.schedule():
        for _ in range(documents):
            growing.add(round(at_s * SECOND_US), customer, round(pace.document_s * SECOND_US))
    trace = growing.trace
    return Scenario(
        name="demo",
        trace=trace,
        groups=("quiet", "bulk"),
        group_of=tuple(int(name == traffic.BULK) for name in trace.names),
        plan=Plan(workers=pace.workers),
    )
