"""The demo: a separate queue in memory with its own worker. The real queue is not touched.

One customer submits 2,000 documents at once while ten quiet customers continue. The page "Now"
shows it, with the simulated waits of the same arrivals in two other orders.
"""

import threading
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from fairturn.dashboard.comparison import DemoComparison
from fairturn.dashboard.customer_index import CustomerIndex
from fairturn.dashboard.now import ExampleCache, now_page
from fairturn.dashboard.renderer import PageRoute, see_other
from fairturn.dashboard.samples import ActivitySampler
from fairturn.dashboard.visitors import Operator, Overseer
from fairturn.queue import Queue
from fairturn.service.service import Service
from fairturn.simulator.demo import traffic
from fairturn.worker.handler import ClaimedDocument
from fairturn.worker.worker import Worker

WORKERS = 2
SLOWER = 8  # than in a terminal, because the page shows more
SECONDS = 600.0  # until it ends

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@dataclass(slots=True)
class RunningDemo:
    queue: Queue
    worker: Worker
    sender: traffic.TrafficSender
    trail: ActivitySampler
    directory: CustomerIndex
    example: ExampleCache
    stopping: threading.Event
    comparison: DemoComparison


class Demo:
    """At most one demo in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running: RunningDemo | None = None

    def begin(self, service: Service) -> None:
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
                trail=ActivitySampler(queue.queries, service.clock),
                directory=CustomerIndex(queue.queries, service.clock),
                example=ExampleCache(),
                stopping=threading.Event(),
                comparison=DemoComparison(traffic.DemoPace(SLOWER * traffic.DOCUMENT_S, WORKERS)),
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
                running.trail.look()
        running.worker.stop(now=True)
        worker_thread.join()
        if self.running is running:
            self.running = None
        running.queue.close()


def _process(document: ClaimedDocument) -> None:
    threading.Event().wait(SLOWER * document.payload["seconds"])


@router.post("/demo/begin")
def begin(request: Request, visitor: Operator) -> Response:
    visitor.page.demo.begin(visitor.service)
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
    return now_page(
        request,
        visitor._replace(service=demo_service),
        running.trail,
        running.directory,
        running.example,
        comparison=running.comparison,
        demo=True,
    )
