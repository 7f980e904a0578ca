"""The waits of each group of customers in each mode: `make fairness`, the tables of
docs/fairness.md.

It runs every named workload in every mode, from a fixed seed, and a trace in the Standard Workload
Format if one is given. `tests/test_fairness.py` computes the same rows and compares them with the
page.
"""

import argparse
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fairturn.simulator import workloads
from fairturn.simulator.comparison import Comparison, Discipline, compare, modes_of
from fairturn.simulator.measures import WaitSummary, percentile
from fairturn.simulator.scenario import Scenario, scenario_of
from fairturn.simulator.trace_files import read, scaled

MODES = (
    Discipline.FIFO,
    Discipline.AGEING,
    Discipline.ROUND_ROBIN,
    Discipline.LEVELS,
    Discipline.FAIR,
    Discipline.EQUAL,
    Discipline.IDEAL_LEVELS,
    Discipline.IDEAL,
)
IDEAL_OF = {
    Discipline.FAIR: Discipline.IDEAL_LEVELS,
    Discipline.EQUAL: Discipline.IDEAL,
}
# At this density the trace loads four workers to about 0.9, with documents of up to 10 minutes.
TRACE_WORKERS, TRACE_SCALE, TRACE_COST_S_MAX = 4, 0.12, 600

NONE = "–"

Cells = tuple[str, ...]


class Bound(NamedTuple):
    """The p99 wait of a group in one mode, and its ideal."""

    group: str
    mode: Discipline
    p99_us: int
    ideal_us: int
    bound_us: int

    @property
    def holds(self) -> bool:
        return self.p99_us <= self.bound_us


def simulated(name: str) -> Comparison:
    """Simulate a named workload in all modes that are possible."""
    scenario = workloads.make(name)
    return compare(scenario, modes_of(scenario, MODES))


def trace_scenario(path: Path) -> Scenario:
    """Return a real trace at the density of the page."""
    trace = scaled(
        read(path).trace, time_scale=TRACE_SCALE, cost_us_max=TRACE_COST_S_MAX * 1_000_000
    )
    return scenario_of(trace, "trace", workers=TRACE_WORKERS)


def without(scenario: Scenario, group: str) -> Scenario:
    """Return a scenario in which nothing fails without the documents of one group."""
    customers = set(scenario.members(scenario.groups.index(group)))
    rows = [n for n, customer in enumerate(scenario.trace.customer) if customer not in customers]
    trace = copy(scenario.trace)
    trace.at, trace.customer, trace.cost, trace.kind = (
        array(column.typecode, (column[n] for n in rows))
        for column in (trace.at, trace.customer, trace.cost, trace.kind)
    )
    return replace(scenario, trace=trace)


def service_p99_us(scenario: Scenario) -> int:
    """Return the p99 duration over the documents of all customers."""
    return percentile(sorted(scenario.trace.cost), 99)


def bounds(comparison: Comparison) -> Iterator[Bound]:
    """Return `2 x (ideal p99 + p99 service)` for each group, in the modes that have an ideal."""
    service = service_p99_us(comparison.scenario)
    for mode, ideal in IDEAL_OF.items() if comparison.scenario.has_ideal else ():
        pairs = zip(comparison.of(mode).groups, comparison.of(ideal).groups, strict=True)
        for group, by_ideal in pairs:
            ideal_us = by_ideal.waits.p99_us
            yield Bound(group.name, mode, group.waits.p99_us, ideal_us, 2 * (ideal_us + service))


def _seconds(us: int) -> str:
    return f"{us / 1_000_000:,.1f}" if us < 1_000_000_000 else f"{us / 1_000_000:,.0f}"


# ── The tables ───────────────────────────────────────────────────────────────────────────────────

WAITS = ("workload", "group", *MODES)
BOUNDS = ("workload", "group", "p99 service", "fair", "at most", "equal", "at most ", "both hold")
FLOOD = "flood"
BESIDE_A_FLOOD = (Discipline.FAIR, Discipline.EQUAL, Discipline.LEVELS, Discipline.FIFO)
FLOODS = (
    *("workload", "group", "p99 service"),
    *(f"{mode}: {when}" for mode in BESIDE_A_FLOOD for when in ("alone", "beside the flood")),
)
OUTAGES = ("workload", "mode", "requests meanwhile", "full rate after", "dead documents")
TURNS = (
    "workload",
    "behind ideal-levels: fair",
    "levels",
    "behind ideal: equal",
    "fifo",
    "longest gap: fair",
    "equal",
    "levels ",
    "fifo ",
    "Jain: fair",
    "equal ",
    "levels  ",
    "fifo  ",
)


def wait_rows(comparison: Comparison) -> list[Cells]:
    """Return the p99 waits of each group in each mode, in seconds."""
    return _rows_of_waits(comparison, lambda waits: waits.p99_us)


def _rows_of_waits(comparison: Comparison, of: Callable[[WaitSummary], int]) -> list[Cells]:
    groups = {result.mode: result.groups for result in comparison.results}
    return [
        (
            comparison.scenario.name,
            name,
            *(
                _seconds(of(groups[mode][number].waits)) if mode in groups else NONE
                for mode in MODES
            ),
        )
        for number, name in enumerate(comparison.scenario.groups)
    ]


def bound_rows(comparison: Comparison) -> list[Cells]:
    """Return the p99 waits of fair and equal beside their ideals, in seconds."""
    service = _seconds(service_p99_us(comparison.scenario))
    found = list(bounds(comparison))
    rows: list[Cells] = []
    for name in comparison.scenario.groups if found else ():
        fair, equal = (bound for bound in found if bound.group == name)
        values = (fair.p99_us, fair.bound_us, equal.p99_us, equal.bound_us)
        holds = "yes" if fair.holds and equal.holds else "**no**"
        rows.append((comparison.scenario.name, name, service, *map(_seconds, values), holds))
    return rows


def turn_rows(comparison: Comparison) -> list[Cells]:
    """Return lags in documents, gaps in seconds and Jain's index of the worst-served customers."""

    def lag(mode: Discipline, ideal: Discipline) -> str:
        if not comparison.scenario.has_ideal:
            return NONE
        return f"{max(group.lags[ideal] for group in comparison.of(mode).groups):,}"

    def gap(mode: Discipline) -> str:
        return _seconds(max(group.gap_us or 0 for group in comparison.of(mode).groups))

    def jain(mode: Discipline) -> str:
        even = comparison.of(mode).evenness
        return f"{even.mean:.2f}" if even is not None and even.windows else NONE

    shown = (Discipline.FAIR, Discipline.EQUAL, Discipline.LEVELS, Discipline.FIFO)
    return [
        (
            comparison.scenario.name,
            lag(Discipline.FAIR, Discipline.IDEAL_LEVELS),
            lag(Discipline.LEVELS, Discipline.IDEAL_LEVELS),
            lag(Discipline.EQUAL, Discipline.IDEAL),
            lag(Discipline.FIFO, Discipline.IDEAL),
            *map(gap, shown),
            *map(jain, shown),
        )
    ]


def flood_rows(comparison: Comparison) -> list[Cells]:
    """Return the p99 waits of each group without the flood and beside it, in seconds."""
    scenario = comparison.scenario
    if FLOOD not in scenario.groups:
        return []
    calm = compare(without(scenario, FLOOD), BESIDE_A_FLOOD)
    service = service_p99_us(scenario)
    rows: list[Cells] = []
    for number, name in enumerate(scenario.groups):
        pairs = [
            of.of(mode).groups[number].waits.p99_us
            for mode in BESIDE_A_FLOOD
            for of in (calm, comparison)
        ]
        if name != FLOOD:
            rows.append((scenario.name, name, _seconds(service), *map(_seconds, pairs)))
    return rows


def mean_rows(comparison: Comparison) -> list[Cells]:
    """Return the mean waits of each group in each mode, in seconds."""
    return _rows_of_waits(comparison, lambda waits: waits.mean_us)


def outage_rows(comparison: Comparison) -> list[Cells]:
    """Return how the outages of a workload passed in each mode."""
    return [
        (
            comparison.scenario.name,
            result.mode,
            f"{of.requests:,}",
            _seconds(of.recovery_us),
            f"{result.all.dead:,}",
        )
        for result in comparison.results
        for of in result.outages
    ]


def line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.strip() for cell in cells)} |"


def table(columns: Sequence[str], rows: Iterable[Cells]) -> str:
    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace in the Standard Workload Format")
    path = parser.parse_args().trace
    comparisons = [simulated(name) for name in workloads.WORKLOADS]
    for title, columns, rows in (
        ("p99 waits, seconds", WAITS, wait_rows),
        ("against the ideals, seconds", BOUNDS, bound_rows),
        ("lags, gaps and evenness", TURNS, turn_rows),
        ("floods in one kind: p99 waits, seconds", FLOODS, flood_rows),
        ("outages, seconds", OUTAGES, outage_rows),
    ):
        print(f"### {title}\n")
        print(table(columns, [row for comparison in comparisons for row in rows(comparison)]))
        print()
    if path is not None:
        comparison = compare(trace_scenario(path), MODES)
        print("### the trace: mean waits, p99 waits, against the ideals, seconds\n")
        print(table(WAITS, mean_rows(comparison)) + "\n")
        print(table(WAITS, wait_rows(comparison)) + "\n")
        print(table(BOUNDS, bound_rows(comparison)))


if __name__ == "__main__":
    main()
