"""The demo: a queue of its own in memory, with workers of its own. The real one is not touched.

One customer dumps 2,000 documents, ten quiet ones go on; the page "Now" shows it, and beside it
what the same arrivals would have met in two other orders, simulated.
"""

import threading
from dataclasses import dataclass
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from fairturn.clock import SECOND_US
from fairturn.config import Queue as OpenQueue
from fairturn.demo import traffic
from fairturn.keys import Keys
from fairturn.page.directory import Directory
from fairturn.page.now import now_page
from fairturn.page.rendering import PageRoute, see_other
from fairturn.page.trail import Trail, quantile
from fairturn.page.visitors import Operator, Overseer
from fairturn.priority import Rule
from fairturn.queue import Queue
from fairturn.service.service import Service
from fairturn.service.watching import Watch
from fairturn.simulator.comparing import Discipline, compare
from fairturn.simulator.plan import Plan
from fairturn.simulator.scenario import Scenario
from fairturn.simulator.trace import Growing
from fairturn.worker import Worker
from fairturn.worker.handling import ClaimedDocument

WORKERS = 2
SLOWER = 6  # than in a terminal: there is more to look at
SECONDS = 600.0  # then it ends by itself
COMPARED_S = traffic.SECONDS  # of the arrivals, that are simulated

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Compared(NamedTuple):
    """The p99 wait of the quiet customers, by order; those that are simulated, and the real one."""

    first_come_us: int
    levels_us: int
    fair_us: int | None


@dataclass(slots=True)
class Running:
    """A demo that runs."""

    queue: Queue
    worker: Worker
    sender: traffic.Sender
    trail: Trail
    directory: Directory
    stopping: threading.Event
    simulated: tuple[int, int] | None = None

    def compared(self) -> Compared | None:
        if self.simulated is None:
            return None
        waits = [
            wait
            for name, found in self.trail.lately().waits.items()
            if name != traffic.BULK
            for wait in found
        ]
        return Compared(*self.simulated, quantile(waits, 0.99))


class Demo:
    """At most one demo in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running: Running | None = None

    def begin(self, service: Service) -> None:
        """Begin it, unless it runs already."""
        with self._lock:
            if self.running is not None:
                return
            queue = OpenQueue(":memory:")
            queue.configure(reset_interval_s=traffic.RESET_INTERVAL_S)
            running = Running(
                queue=queue,
                worker=Worker(queue, _rest, concurrency=WORKERS, threads=True),
                sender=traffic.Sender(queue, traffic.schedule(seconds=SECONDS)),
                trail=Trail(queue.store, service.clock),
                directory=Directory(queue.store, service.clock),
                stopping=threading.Event(),
            )
            self.running = running
        threading.Thread(target=self._run, args=(running,), daemon=True).start()
        threading.Thread(target=_simulate, args=(running,), daemon=True).start()

    def end(self) -> None:
        """Stop it, and forget its documents."""
        running = self.running
        if running is not None:
            running.stopping.set()
            self.running = None

    def _run(self, running: Running) -> None:
        working = threading.Thread(target=running.worker.run, daemon=True)
        working.start()
        with running.sender.sending() as passed_s:
            while not running.stopping.wait(1.0) and passed_s() < SECONDS:
                running.trail.look()
        running.worker.stop(now=True)
        working.join()
        if self.running is running:
            self.running = None
        running.queue.close()


def _rest(document: ClaimedDocument) -> None:
    threading.Event().wait(SLOWER * document.payload["seconds"])


def _simulate(running: Running) -> None:
    """The same arrivals in two other orders."""
    growing = Growing()
    for at_s, customer, documents in traffic.schedule(seconds=COMPARED_S):
        for _ in range(documents):
            cost = round(SLOWER * traffic.DOCUMENT_S * SECOND_US)
            growing.add(round(at_s * SECOND_US), customer, cost)
    trace = growing.trace
    group_of = tuple(int(name == traffic.BULK) for name in trace.names)
    scenario = Scenario(
        name="demo",
        trace=trace,
        groups=("quiet", "bulk"),
        group_of=group_of,
        plan=Plan(workers=WORKERS),
    )
    rule = Rule(reset_interval_us=round(traffic.RESET_INTERVAL_S * SECOND_US))
    found = compare(scenario, [Discipline.FIFO, Discipline.LEVELS], rule=rule)
    first_come, levels = (
        found.of(mode).groups[0].waits.p99_us
        for mode in (
            Discipline.FIFO,
            Discipline.LEVELS,
        )
    )
    running.simulated = (first_come, levels)


@router.post("/demo/begin")
def begin(request: Request, visitor: Operator) -> Response:
    """Load the demo."""
    visitor.page.demo.begin(visitor.service)
    return see_other(request, "/demo")


@router.post("/demo/end")
def end(request: Request, visitor: Operator) -> Response:
    """Remove it."""
    visitor.page.demo.end()
    return see_other(request, "/")


@router.get("/demo")
def show_demo(request: Request, visitor: Overseer) -> Response:
    """The page Now, of the demo."""
    running = visitor.page.demo.running
    if running is None:
        return see_other(request, "/")
    service = visitor.service
    of_demo = Service(
        queue=running.queue,
        keys=Keys(running.queue.store, clock=service.clock),
        clock=service.clock,
        plan=service.plan,
        rates=service.rates,
        watch=Watch(running.queue.store),
    )
    seen = visitor._replace(service=of_demo)
    return now_page(
        request, seen, running.trail, running.directory, demo=True, compared=running.compared()
    )
