"""The demo: a separate queue in memory with its own worker. The real queue is not touched.

One customer submits 2,000 documents at once while ten quiet customers continue. The page "Now"
shows it, with the simulated waits of the same arrivals in two other orders.
"""

import threading
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from fairturn.clock import SECOND_US
from fairturn.dashboard.customer_index import CustomerIndex
from fairturn.dashboard.now import ExampleCache, now_page
from fairturn.dashboard.renderer import PageRoute, see_other
from fairturn.dashboard.samples import ActivitySampler, RecentActivity, quantile
from fairturn.dashboard.visitors import Operator, Overseer, PageContext
from fairturn.priority import Rule
from fairturn.queue import Queue
from fairturn.service.service import Service
from fairturn.simulator.comparison import Discipline, compare
from fairturn.simulator.demo import traffic
from fairturn.simulator.plan import Plan
from fairturn.simulator.scenario import Scenario
from fairturn.simulator.trace import Growing
from fairturn.worker.handler import ClaimedDocument
from fairturn.worker.worker import Worker

WORKERS = 2
SLOWER = 8  # than in a terminal, because the page shows more
SECONDS = 600.0  # until it ends

router = APIRouter(route_class=PageRoute, include_in_schema=False)


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


@dataclass(slots=True)
class RunningDemo:
    queue: Queue
    worker: Worker
    sender: traffic.TrafficSender
    page: PageContext
    stopping: threading.Event


class Demo:
    """At most one demo in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running: RunningDemo | None = None

    def begin(self, service: Service, page: PageContext) -> None:
        """Start the demo unless it is running."""
        with self._lock:
            if self.running is not None:
                return
            queue = Queue(":memory:")
            queue.configure(reset_interval_s=traffic.SHORT_RESET_INTERVAL_S)
            running = RunningDemo(
                queue=queue,
                worker=Worker(queue, _process, concurrency=WORKERS, threads=True),
                sender=traffic.TrafficSender(queue, traffic.schedule(seconds=SECONDS)),
                page=replace(
                    page,
                    trail=ActivitySampler(queue.queries, service.clock),
                    directory=CustomerIndex(queue.queries, service.clock),
                    example=ExampleCache(),
                    comparison=DemoComparison(
                        traffic.DemoPace(SLOWER * traffic.DOCUMENT_S, WORKERS)
                    ),
                ),
                stopping=threading.Event(),
            )
            self.running = running
        threading.Thread(target=self._run, args=(running,), daemon=True).start()

    def end(self) -> None:
        """Stop the demo and drop its queue."""
        running = self.running
        if running is not None:
            running.stopping.set()
            self.running = None

    def _run(self, running: RunningDemo) -> None:
        worker_thread = threading.Thread(target=running.worker.run, daemon=True)
        worker_thread.start()
        with running.sender.sending() as passed_s:
            while not running.stopping.wait(1.0) and passed_s() < SECONDS:
                running.page.trail.sample()
        running.worker.stop(now=True)
        worker_thread.join()
        if self.running is running:
            self.running = None
        running.queue.close()


def _process(document: ClaimedDocument) -> None:
    threading.Event().wait(SLOWER * document.payload["seconds"])


@router.post("/demo/begin")
def begin(request: Request, visitor: Operator) -> Response:
    visitor.page.demo.begin(visitor.service, visitor.page)
    return see_other(request, "/demo")


@router.post("/demo/end")
def end(request: Request, visitor: Operator) -> Response:
    visitor.page.demo.end()
    return see_other(request, "/")


@router.get("/demo")
def show_demo(request: Request, visitor: Overseer) -> Response:
    running = visitor.page.demo.running
    if running is None:
        return see_other(request, "/")
    service = visitor.service
    demo_service = Service(running.queue, service.plan, service.clock)
    demo_visitor = visitor._replace(service=demo_service, page=running.page)
    return now_page(request, demo_visitor, demo=True)
