"""What if: the recorded history, served again under other settings, beside the present ones."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Overseer, Visitor
from fairturn.errors import FairturnError
from fairturn.model import SECONDS_MAX, Settings, State
from fairturn.priority import Reset
from fairturn.queue import Queue
from fairturn.scheduling.flows import Mode
from fairturn.service.administration import workers_of
from fairturn.service.problems import Code, Problem, refusing_misuse
from fairturn.simulator.comparison import Discipline, compare
from fairturn.simulator.history import trace_of
from fairturn.simulator.measures import Waits
from fairturn.simulator.scenario import Scenario, scenario_of

HISTORY_MAX = 20_000
RUNS_MAX = 20
AT_ONCE_MAX = 2
WORKERS_MAX = 1_000
WEIGHTS_MAX = 100

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Choice(StrEnum):
    """What can be tried."""

    FAIR = "fair"
    LEVELS = "levels"
    EQUAL = "equal"
    FIFO = "fifo"


class Wish(NamedTuple):
    """The settings to try."""

    mode: Choice
    workers: int
    reset: Reset
    reset_interval_s: float
    weights: tuple[tuple[str, float], ...] = ()


class Group(NamedTuple):
    """What it meant for some customers, before and after."""

    name: str
    customers: int
    before: Waits
    after: Waits


class Outcome(NamedTuple):
    """Both runs."""

    documents: int
    customers: int
    groups: tuple[Group, ...]
    named: bool  # whether groups are customers


@dataclass(slots=True)
class Run:
    """One simulation, while it runs and afterwards."""

    present: Wish
    wish: Wish
    done: int = 0
    total: int = 0
    outcome: Outcome | None = None
    failed: bool = False
    nothing: bool = False  # there was no history
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0


class Runs:
    """The last simulations of this process."""

    def __init__(self, token: Callable[[], str] = lambda: secrets.token_urlsafe(9)) -> None:
        self._token = token
        self._runs: OrderedDict[str, Run] = OrderedDict()

    def get(self, id: str) -> Run | None:
        return self._runs.get(id)

    def begin(self, queue: Queue, present: Wish, wish: Wish) -> str:
        """Start one in a thread; gives its name."""
        if sum(not run.ended.is_set() for run in self._runs.values()) >= AT_ONCE_MAX:
            raise Problem(Code.TOO_MANY_AT_ONCE, retry_after_s=5)
        while len(self._runs) >= RUNS_MAX:
            self._runs.popitem(last=False)
        id, run = self._token(), Run(present, wish)
        self._runs[id] = run
        threading.Thread(target=_work, args=(queue, run), daemon=True).start()
        return id


def _work(queue: Queue, run: Run) -> None:
    try:
        _simulate(queue, run)
    except (FairturnError, ValueError):
        run.failed = True
    finally:
        run.ended.set()


def _simulate(queue: Queue, run: Run) -> None:
    history = queue.iterate(states=State.COMPLETED)
    trace = trace_of(islice(history, HISTORY_MAX))
    run.total = 2 * len(trace)
    if not len(trace):
        run.nothing = True
        return
    scenario = scenario_of(trace, "history", workers=run.present.workers)
    settings = queue.settings

    def served(wish: Wish, scenario: Scenario, begun: int) -> tuple[tuple[str, int, Waits], ...]:
        def progress(mode: Discipline, done: int) -> None:
            run.done = begun + done

        found = compare(
            scenario,
            [Discipline(wish.mode.value)],
            rule=_settings(settings, wish).rule,
            patience_us=settings.patience_us,
            progress=progress,
        )
        (result,) = found.results
        return tuple((group.name, group.customers, group.waits) for group in result.groups)

    before = served(run.present, scenario, 0)
    changed = scenario.changed(workers=run.wish.workers, weights=run.wish.weights)
    after = served(run.wish, changed, len(trace))
    groups = tuple(
        Group(name, customers, waits, then)
        for (name, customers, waits), (_, _, then) in zip(before, after, strict=True)
    )
    named = len(scenario.groups) == len(trace.names) and scenario.groups == tuple(trace.names)
    run.outcome = Outcome(len(trace), len(trace.names), groups, named)


def _settings(settings: Settings, wish: Wish) -> Settings:
    return replace(settings, reset=wish.reset, reset_interval_s=wish.reset_interval_s)


@router.get("/what-if")
def show_what_if(request: Request, visitor: Overseer, run: str | None = None) -> Response:
    """The form, and a simulation if one was begun."""
    found = None if run is None else visitor.page.runs.get(run)
    if run is not None and found is None:
        raise Problem(Code.NOT_FOUND)
    present = _present(visitor)
    return render(
        request,
        visitor,
        "whatif.html",
        run=found,
        present=present,
        wish=present if found is None else found.wish,
        choices=list(Choice),
        resets=list(Reset),
        workers_max=WORKERS_MAX,
        history_max=HISTORY_MAX,
    )


def _present(visitor: Visitor) -> Wish:
    service = visitor.service
    settings = service.queue.settings
    slots = sum(worker.slots for worker in workers_of(service) if worker.alive)
    mode = {Mode.FAIR: Choice.FAIR, Mode.LEVELS: Choice.LEVELS, Mode.EQUAL: Choice.EQUAL}
    return Wish(
        mode[settings.mode],
        min(WORKERS_MAX, max(1, slots)),
        settings.reset,
        settings.reset_interval_s,
    )


@router.post("/what-if")
def begin(
    request: Request,
    visitor: Overseer,
    *,
    mode: Annotated[Choice, Form()],
    workers: Annotated[int, Form(ge=1, le=WORKERS_MAX)],
    reset: Annotated[Reset, Form()],
    reset_interval_s: Annotated[float, Form(gt=0, le=SECONDS_MAX)],
    weights: Annotated[str, Form(max_length=20_000)] = "",
) -> Response:
    """Begin a simulation. Nothing of the queue is changed by it."""
    with refusing_misuse():
        wish = Wish(mode, workers, reset, reset_interval_s, _weights(weights))
    id = visitor.page.runs.begin(visitor.service.queue, _present(visitor), wish)
    return see_other(request, "/what-if", run=id)


def _weights(text: str) -> tuple[tuple[str, float], ...]:
    """One customer a line: its name, =, its weight."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > WEIGHTS_MAX:
        raise ValueError(f"{len(lines)} weights; at most {WEIGHTS_MAX} are taken")
    found = []
    for line in lines:
        name, equals, weight = line.rpartition("=")
        if not equals:
            raise ValueError(f"{line[:40]!r} is not like: acme = 2")
        found.append((name.strip(), float(weight)))
    return tuple(found)
