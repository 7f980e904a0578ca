"""One scenario simulated in several modes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from fairturn.priority import Rule
from fairturn.scheduling.flows import PATIENCE_US, Mode
from fairturn.simulator import capacity, measures
from fairturn.simulator.baselines import Line, Ring, aged, first_come
from fairturn.simulator.capacity import GroupLoad, OutageResult
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


class KindResult(NamedTuple):
    """The waits of the documents of one kind in one mode: of all, and of each group."""

    name: str
    waits: WaitSummary
    groups: tuple[WaitSummary, ...]


class Result(NamedTuple):
    """The measures of one mode. Those of claims are None or empty for ideals, which claim
    nothing."""

    mode: Discipline
    run: Replayed | Ideal
    groups: tuple[GroupResult, ...]
    kinds: tuple[KindResult, ...]
    all: WaitSummary
    evenness: Evenness | None
    idle_us: int | None
    loads: tuple[GroupLoad, ...]
    outages: tuple[OutageResult, ...]
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


def modes_of(scenario: Scenario, modes: Iterable[Discipline] = Discipline) -> list[Discipline]:
    """Return those of the modes in which the scenario can be simulated: the ideals divide one set
    of workers among customers, and there is no single ideal way to divide it among kinds too."""
    return [mode for mode in modes if scenario.has_ideal or mode not in IDEALS]


def compare(
    scenario: Scenario,
    modes: Iterable[Discipline],
    *,
    rule: Rule | None = None,
    patience_us: int = PATIENCE_US,
    progress: Progress = lambda mode, done: None,
) -> Comparison:
    """Serve the scenario in each mode. `progress` is called with a mode and its documents done.

    Raises `ValueError` for a mode that is not among `modes_of`."""
    modes = list(dict.fromkeys(modes))
    if impossible := set(modes) - set(modes_of(scenario)):
        raise ValueError(
            f"mode {min(impossible)} is an ideal for one kind of work without workers for kinds, "
            "limits of kinds and outages; leave it out"
        )
    rule = rule or Rule()
    priorities = check_all(scenario.trace, rule)[1]
    runs: dict[Discipline, Replayed | Ideal] = {}
    for mode in modes:
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
    finishes = gaps = evenness = idle_us = None
    loads: tuple[GroupLoad, ...] = ()
    outages: tuple[OutageResult, ...] = ()
    if isinstance(run, Replayed):
        gaps = measures.longest_gaps(scenario, run)
        evenness = measures.evenness(scenario, run)
        finishes = measures.finishes_by_customer(scenario, run)
        idle_us = capacity.idle_while_waiting(scenario, run)
        loads = capacity.loads(scenario, run)
        outages = capacity.outage_results(scenario, run)
    groups = []
    for group, (name, documents) in enumerate(
        zip(scenario.groups, scenario.documents_by_group(), strict=True)
    ):
        members = scenario.members(group)
        gap_us = None if gaps is None else max((gaps[c] for c in members), default=0)
        lags: dict[Discipline, int] = {}
        if finishes is not None:
            for ideal, by in ideals.items():
                behind = (measures.lag(by[c], finishes[c]) for c in members)
                lags[ideal] = max(behind, default=0)
        waits = _summary(documents, scenario, run)
        groups.append(GroupResult(name, len(members), waits, gap_us, lags))
    return Result(
        mode=mode,
        run=run,
        groups=tuple(groups),
        kinds=_kind_results(scenario, run),
        all=_summary(range(len(scenario.trace)), scenario, run),
        evenness=evenness,
        idle_us=idle_us,
        loads=loads,
        outages=outages,
        ends_at=max(run.finished_at, default=0),
    )


def _summary(documents: Sequence[int], scenario: Scenario, run: Replayed | Ideal) -> WaitSummary:
    waits = measures.waits_of(documents, scenario, run)
    dead = 0 if isinstance(run, Ideal) else sum(n in run.dead for n in documents)
    cancelled = len(documents) - len(waits) - dead
    return measures.summary_of(waits, cancelled=cancelled, dead=dead)


def _kind_results(scenario: Scenario, run: Replayed | Ideal) -> tuple[KindResult, ...]:
    results = []
    for name, by_group in zip(
        scenario.trace.kind_names, scenario.documents_by_kind_and_group(), strict=True
    ):
        groups = [_summary(documents, scenario, run) for documents in by_group]
        all_of_kind = list(chain.from_iterable(by_group))
        waits = _summary(all_of_kind, scenario, run)
        results.append(KindResult(name, waits, tuple(groups)))
    return tuple(results)
