"""One scenario simulated in several modes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from fairturn.priority import Rule
from fairturn.scheduling.flows import PATIENCE_US, Mode
from fairturn.simulator import measures
from fairturn.simulator.baselines import Line, Ring, aged, first_come
from fairturn.simulator.ideal import Ideal, serve_ideally
from fairturn.simulator.measures import Evenness, WaitSummary
from fairturn.simulator.orders import Order, RealOrder
from fairturn.simulator.replay import Replayed, check_all, serve
from fairturn.simulator.scenario import Scenario


class Discipline(StrEnum):
    """The modes of the queue, the orders of other queues, and ideals that no queue can reach."""

    FAIR = "fair"  # levels first; inside a level customers take turns
    EQUAL = "equal"  # all customers take turns in one level
    LEVELS = "levels"  # the priority rule and nothing else
    FIFO = "fifo"  # first come, first served
    AGEING = "ageing"  # levels; documents rise while they wait
    ROUND_ROBIN = "round-robin"  # one document of each customer in turn
    IDEAL_LEVELS = "ideal-levels"  # exact shares at every instant, inside levels
    IDEAL = "ideal"  # exact shares at every instant, without levels


IDEALS = (Discipline.IDEAL_LEVELS, Discipline.IDEAL)


class GroupResult(NamedTuple):
    """The measures of a group in one mode: the waits of all its documents, and the worst customer's
    gap and lags.

    `gap_us` is the longest time without a claim while documents waited; `lags` are the documents
    behind each ideal that was simulated."""

    name: str
    customers: int
    waits: WaitSummary
    gap_us: int | None
    lags: dict[Discipline, int]


class Result(NamedTuple):
    """The measures of one mode. Those of claims are None for ideals, which claim nothing."""

    mode: Discipline
    run: Replayed | Ideal
    groups: tuple[GroupResult, ...]
    all: WaitSummary
    evenness: Evenness | None
    idle_us: int | None
    ends_at: int


class Comparison(NamedTuple):
    scenario: Scenario
    rule: Rule
    patience_us: int
    priorities: Sequence[int]
    results: tuple[Result, ...]

    def of(self, mode: Discipline) -> Result:
        return next(result for result in self.results if result.mode is mode)


Progress = Callable[[Discipline, int], None]


def compare(
    scenario: Scenario,
    modes: Iterable[Discipline],
    *,
    rule: Rule | None = None,
    patience_us: int = PATIENCE_US,
    progress: Progress = lambda mode, done: None,
) -> Comparison:
    """Serve the scenario in each mode. `progress` is called with a mode and its documents done."""
    rule = rule or Rule()
    priorities = check_all(scenario.trace, rule)[1]
    runs: dict[Discipline, Replayed | Ideal] = {}
    for mode in dict.fromkeys(modes):
        report = partial(progress, mode)
        if mode in IDEALS:
            runs[mode] = serve_ideally(
                scenario.trace,
                plan=scenario.plan,
                priorities=priorities if mode is Discipline.IDEAL_LEVELS else None,
                progress=report,
            )
        else:
            order = order_of(mode, scenario, patience_us)
            runs[mode] = serve(
                scenario.trace, order, rule=rule, plan=scenario.plan, progress=report
            )
        report(len(scenario.trace))
    ideals = {
        mode: measures.finishes_by_customer(scenario, runs[mode]) for mode in IDEALS if mode in runs
    }
    results = tuple(result_of(scenario, mode, run, ideals) for mode, run in runs.items())
    return Comparison(scenario, rule, patience_us, priorities, results)


def order_of(mode: Discipline, scenario: Scenario, patience_us: int = PATIENCE_US) -> Order:
    """Return the order of a mode that is not an ideal."""
    if mode is Discipline.FIFO:
        return Line(first_come)
    if mode is Discipline.AGEING:
        return Line(aged)
    if mode is Discipline.ROUND_ROBIN:
        return Ring()
    return RealOrder(
        mode=Mode(mode.value),
        costs=scenario.costs,
        patience_us=patience_us,
        kinds=scenario.trace.kinds,
    )


def result_of(
    scenario: Scenario,
    mode: Discipline,
    run: Replayed | Ideal,
    ideals: Mapping[Discipline, list[list[int]]] = MappingProxyType({}),
) -> Result:
    """Return the measures of a run. `ideals` has the sorted finish times of each customer, for each
    ideal to compare with."""
    documents = scenario.documents_by_group()
    finishes = gaps = evenness = idle_us = None
    if isinstance(run, Replayed):
        spells = measures.waiting_spells(scenario, run)
        claims = measures.claims_by_customer(scenario, run)
        gaps = [measures.longest_gap(s, c) for s, c in zip(spells, claims, strict=True)]
        evenness = measures.evenness(scenario, run, spells)
        idle_us = measures.idle_while_waiting(scenario, run)
        finishes = measures.finishes_by_customer(scenario, run)
    groups = []
    waits_of_all: list[int] = []
    for group, name in enumerate(scenario.groups):
        members = scenario.members(group)
        waits = measures.waits_of(documents[group], scenario, run)
        waits_of_all += waits
        summary = measures.summary_of(waits, len(documents[group]) - len(waits))
        gap_us = None if gaps is None else max((gaps[c] for c in members), default=0)
        lags: dict[Discipline, int] = {}
        if finishes is not None:
            for ideal, by in ideals.items():
                behind = (measures.lag(by[c], finishes[c]) for c in members)
                lags[ideal] = max(behind, default=0)
        groups.append(GroupResult(name, len(members), summary, gap_us, lags))
    waits_of_all.sort()
    return Result(
        mode=mode,
        run=run,
        groups=tuple(groups),
        all=measures.summary_of(waits_of_all, len(run.cancelled)),
        evenness=evenness,
        idle_us=idle_us,
        ends_at=max(run.finished_at, default=0),
    )
