"""The demo: a queue of its own in memory, with workers of its own. The real one is not touched.

One customer dumps 2,000 documents, ten quiet ones go on; the page "Now" shows it, and beside it
what the same arrivals would have met in two other orders, simulated.
"""

import threading
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from fairturn.access.registry import Keys
from fairturn.config import Queue as OpenQueue
from fairturn.dashboard.comparison import Comparison
from fairturn.dashboard.customer_index import Directory
from fairturn.dashboard.now import Example, now_page
from fairturn.dashboard.renderer import PageRoute, see_other
from fairturn.dashboard.samples import Trail
from fairturn.dashboard.visitors import Operator, Overseer
from fairturn.demo import traffic
from fairturn.queue import Queue
from fairturn.service.change_feed import Watch
from fairturn.service.service import Service
from fairturn.worker import Worker
from fairturn.worker.handler import ClaimedDocument

WORKERS = 2
SLOWER = 8  # than in a terminal: there is more to look at
SECONDS = 600.0  # then it ends by itself

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@dataclass(slots=True)
class Running:
    """A demo that runs."""

    queue: Queue
    worker: Worker
    sender: traffic.Sender
    trail: Trail
    directory: Directory
    example: Example
    stopping: threading.Event
    comparison: Comparison


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
            queue.configure(reset_interval_s=traffic.SHORT_RESET_INTERVAL_S)
            running = Running(
                queue=queue,
                worker=Worker(queue, _rest, concurrency=WORKERS, threads=True),
                sender=traffic.Sender(queue, traffic.schedule(seconds=SECONDS)),
                trail=Trail(queue.store, service.clock),
                directory=Directory(queue.store, service.clock),
                example=Example(),
                stopping=threading.Event(),
                comparison=Comparison(traffic.Pace(SLOWER * traffic.DOCUMENT_S, WORKERS)),
            )
            self.running = running
        threading.Thread(target=self._run, args=(running,), daemon=True).start()

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
        request,
        seen,
        running.trail,
        running.directory,
        running.example,
        comparison=running.comparison,
        demo=True,
    )
