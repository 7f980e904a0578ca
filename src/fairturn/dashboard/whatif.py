"""The page What if: simulates the completed documents of the queue with other settings."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Overseer, Visitor
from fairturn.errors import FairturnError
from fairturn.model import SECONDS_MAX, State
from fairturn.priority import Reset
from fairturn.queue import Queue
from fairturn.service.administration import workers_of
from fairturn.service.problems import Problem, ProblemCode, refusing_misuse
from fairturn.simulator.comparison import Discipline, compare
from fairturn.simulator.history import trace_of
from fairturn.simulator.measures import WaitSummary
from fairturn.simulator.scenario import Scenario, scenario_of

HISTORY_MAX = 20_000
RUNS_MAX = 20
AT_ONCE_MAX = 2
WORKERS_MAX = 1_000
WEIGHTS_MAX = 100

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class WhatIfMode(StrEnum):
    FAIR = "fair"
    LEVELS = "levels"
    EQUAL = "equal"
    FIFO = "fifo"


class WhatIfSettings(NamedTuple):
    mode: WhatIfMode
    workers: int
    reset: Reset
    reset_interval_s: float
    weights: tuple[tuple[str, float], ...] = ()


class WhatIfGroup(NamedTuple):
    name: str
    customers: int
    before: WaitSummary
    after: WaitSummary


class WhatIfResult(NamedTuple):
    documents: int
    customers: int
    groups: tuple[WhatIfGroup, ...]
    named: bool  # whether groups are customers


@dataclass(slots=True)
class WhatIfRun:
    """One simulation, while it runs and afterwards."""

    present: WhatIfSettings
    wish: WhatIfSettings
    done: int = 0
    total: int = 0
    outcome: WhatIfResult | None = None
    nothing: bool = False  # the queue has no completed documents
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0


class WhatIfRuns:
    """The last simulations of this process."""

    def __init__(self, token: Callable[[], str] = lambda: secrets.token_urlsafe(9)) -> None:
        self._token = token
        self._runs: OrderedDict[str, WhatIfRun] = OrderedDict()

    def get(self, id: str) -> WhatIfRun | None:
        return self._runs.get(id)

    def begin(self, queue: Queue, present: WhatIfSettings, wish: WhatIfSettings) -> str:
        """Start a simulation in a thread and return its id."""
        if sum(not run.ended.is_set() for run in self._runs.values()) >= AT_ONCE_MAX:
            raise Problem(ProblemCode.TOO_MANY_AT_ONCE, retry_after_s=5)
        while len(self._runs) >= RUNS_MAX:
            self._runs.popitem(last=False)
        id, run = self._token(), WhatIfRun(present, wish)
        self._runs[id] = run
        threading.Thread(target=_work, args=(queue, run), daemon=True).start()
        return id


def _work(queue: Queue, run: WhatIfRun) -> None:
    try:
        with suppress(FairturnError, ValueError):  # the page reports that there is no outcome
            _simulate(queue, run)
    finally:
        run.ended.set()


def _simulate(queue: Queue, run: WhatIfRun) -> None:
    history = queue.iterate(states=State.COMPLETED)
    trace = trace_of(islice(history, HISTORY_MAX))
    run.total = 2 * len(trace)
    if not len(trace):
        run.nothing = True
        return
    scenario = scenario_of(trace, "history", workers=run.present.workers)
    settings = queue.settings

    def served(
        wish: WhatIfSettings, scenario: Scenario, begun: int
    ) -> tuple[tuple[str, int, WaitSummary], ...]:
        def progress(mode: Discipline, done: int) -> None:
            run.done = begun + done

        found = compare(
            scenario,
            [Discipline(wish.mode.value)],
            rule=replace(settings, reset=wish.reset, reset_interval_s=wish.reset_interval_s).rule,
            patience_us=settings.patience_us,
            progress=progress,
        )
        (result,) = found.results
        return tuple((group.name, group.customers, group.waits) for group in result.groups)

    before = served(run.present, scenario, 0)
    changed = scenario.changed(workers=run.wish.workers, weights=run.wish.weights)
    after = served(run.wish, changed, len(trace))
    groups = tuple(
        WhatIfGroup(name, customers, waits, then)
        for (name, customers, waits), (_, _, then) in zip(before, after, strict=True)
    )
    named = len(scenario.groups) == len(trace.names) and scenario.groups == tuple(trace.names)
    run.outcome = WhatIfResult(len(trace), len(trace.names), groups, named)


@router.get("/what-if")
def show_what_if(request: Request, visitor: Overseer, run: str | None = None) -> Response:
    found = None if run is None else visitor.page.runs.get(run)
    if run is not None and found is None:
        raise Problem(ProblemCode.NOT_FOUND)
    present = _present(visitor)
    return render(
        request,
        visitor,
        "whatif.html",
        run=found,
        present=present,
        wish=present if found is None else found.wish,
        choices=list(WhatIfMode),
        resets=list(Reset),
        workers_max=WORKERS_MAX,
        history_max=HISTORY_MAX,
    )


def _present(visitor: Visitor) -> WhatIfSettings:
    service = visitor.service
    settings = service.queue.settings
    slots = sum(worker.slots for worker in workers_of(service) if worker.alive)
    return WhatIfSettings(
        WhatIfMode(settings.mode.value),
        min(WORKERS_MAX, max(1, slots)),
        settings.reset,
        settings.reset_interval_s,
    )


@router.post("/what-if")
def begin(
    request: Request,
    visitor: Overseer,
    *,
    mode: Annotated[WhatIfMode, Form()],
    workers: Annotated[int, Form(ge=1, le=WORKERS_MAX)],
    reset: Annotated[Reset, Form()],
    reset_interval_s: Annotated[float, Form(gt=0, le=SECONDS_MAX)],
    weights: Annotated[str, Form(max_length=20_000)] = "",
) -> Response:
    """Start a simulation. It does not change the queue."""
    with refusing_misuse():
        wish = WhatIfSettings(mode, workers, reset, reset_interval_s, _weights(weights))
    id = visitor.page.runs.begin(visitor.service.queue, _present(visitor), wish)
    return see_other(request, "/what-if", run=id)


def _weights(text: str) -> tuple[tuple[str, float], ...]:
    """Parse lines of `name = weight`."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > WEIGHTS_MAX:
        raise ValueError(f"{len(lines)} weights are given; at most {WEIGHTS_MAX} are accepted")
    found = []
    for line in lines:
        name, equals, weight = line.rpartition("=")
        if not equals:
            raise ValueError(f"{line[:40]!r} is not a weight, such as acme = 2")
        found.append((name.strip(), float(weight)))
    return tuple(found)
