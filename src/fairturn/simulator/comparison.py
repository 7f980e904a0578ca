"""One scenario in several modes, side by side."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from fairturn.priority import Rule
from fairturn.scheduling.flows import PATIENCE_US, Mode
from fairturn.simulator import measures
from fairturn.simulator.baselines import Line, Ring, aged, first_come
from fairturn.simulator.ideal import Ideal, serve_ideally
from fairturn.simulator.measures import Evenness, Waits
from fairturn.simulator.orders import Order, RealOrder
from fairturn.simulator.replay import Replayed, check_all, serve
from fairturn.simulator.scenario import Scenario


class Discipline(StrEnum):
    """What decides: the modes of the queue, what others do, and what no queue can do."""

    FAIR = "fair"  # levels first; inside a level customers take turns
    EQUAL = "equal"  # everybody in one level
    LEVELS = "levels"  # the priority rule and nothing else
    FIFO = "fifo"  # first come, first served
    AGEING = "ageing"  # levels, but who waits rises
    ROUND_ROBIN = "round-robin"  # one document of each customer, again and again
    IDEAL_LEVELS = "ideal-levels"  # exact shares at every moment, inside levels
    IDEAL = "ideal"  # exact shares at every moment, blind to levels


IDEALS = (Discipline.IDEAL_LEVELS, Discipline.IDEAL)


class GroupResult(NamedTuple):
    """What a mode meant for the customers of a group, the worst of them where it is not waits.

    `gap_us` is the longest time without a claim while waiting; `lags` are the documents behind
    each ideal that was among the modes."""

    name: str
    customers: int
    waits: Waits
    gap_us: int | None
    lags: dict[Discipline, int]


class Result(NamedTuple):
    """One mode. The ideals claim nothing, and so some measures mean nothing for them."""

    mode: Discipline
    run: Replayed | Ideal
    groups: tuple[GroupResult, ...]
    all: Waits
    evenness: Evenness | None
    idle_us: int | None
    ends_at: int


class Comparison(NamedTuple):
    """A scenario, what served it, and what came out."""

    scenario: Scenario
    rule: Rule
    patience_us: int
    priorities: Sequence[int]
    results: tuple[Result, ...]

    def of(self, mode: Discipline) -> Result:
        """The result of one of the modes."""
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
    """Serve the scenario in each mode. `progress` hears how many documents are done in which."""
    rule = rule or Rule()
    priorities = check_all(scenario.trace, rule)[1]
    runs: dict[Discipline, Replayed | Ideal] = {}
    for mode in dict.fromkeys(modes):

        def tell(done: int, mode: Discipline = mode) -> None:
            progress(mode, done)

        if mode in IDEALS:
            runs[mode] = serve_ideally(
                scenario.trace,
                plan=scenario.plan,
                priorities=priorities if mode is Discipline.IDEAL_LEVELS else None,
                progress=tell,
            )
        else:
            order = order_of(mode, scenario, patience_us)
            runs[mode] = serve(scenario.trace, order, rule=rule, plan=scenario.plan, progress=tell)
        tell(len(scenario.trace))
    ideals = {
        mode: measures.finishes_by_customer(scenario, runs[mode]) for mode in IDEALS if mode in runs
    }
    results = tuple(_result(scenario, mode, run, ideals) for mode, run in runs.items())
    return Comparison(scenario, rule, patience_us, priorities, results)


def order_of(mode: Discipline, scenario: Scenario, patience_us: int = PATIENCE_US) -> Order:
    """The order behind a mode that is not an ideal."""
    if mode is Discipline.FIFO:
        return Line(first_come)
    if mode is Discipline.AGEING:
        return Line(aged)
    if mode is Discipline.ROUND_ROBIN:
        return Ring()
    return RealOrder(mode=Mode(mode.value), costs=scenario.costs, patience_us=patience_us)


def _result(
    scenario: Scenario,
    mode: Discipline,
    run: Replayed | Ideal,
    ideals: dict[Discipline, list[list[int]]],
) -> Result:
    documents: list[list[int]] = [[] for _ in scenario.groups]
    for n, customer in enumerate(scenario.trace.customer):
        documents[scenario.group_of[customer]].append(n)
    spells = gaps = evenness = idle_us = None
    if isinstance(run, Replayed):
        spells = measures.waiting_spells(scenario, run)
        claims = measures.claims_by_customer(scenario, run)
        gaps = [measures.longest_gap(s, c) for s, c in zip(spells, claims, strict=True)]
        evenness = measures.evenness(scenario, run, spells)
        idle_us = measures.idle_while_waiting(scenario, run)
    finishes = measures.finishes_by_customer(scenario, run) if mode not in IDEALS else None
    groups = []
    waits_of_all: list[int] = []
    for group, name in enumerate(scenario.groups):
        members = scenario.members(group)
        waits = measures.waits_of(documents[group], scenario, run)
        waits_of_all += waits
        groups.append(
            GroupResult(
                name=name,
                customers=len(members),
                waits=measures.summary_of(waits, len(documents[group]) - len(waits)),
                gap_us=None if gaps is None else max((gaps[c] for c in members), default=0),
                lags={}
                if finishes is None
                else {
                    ideal: max((measures.lag(by[c], finishes[c]) for c in members), default=0)
                    for ideal, by in ideals.items()
                },
            )
        )
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
