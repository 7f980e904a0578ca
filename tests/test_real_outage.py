"""A real outage and real routing on PostgreSQL, with workers in processes of their own."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from fairturn import Document, Queue, State, Submission
from fairturn.clock import SECOND_US, SystemClock, stopwatch
from fairturn.simulator.history import trace_of
from fairturn.simulator.plan import plan_of
from fairturn.simulator.replay import replay
from tests.commands import SCRIPT
from tests.routed_handlers import RETRY_AFTER_S
from tests.servers.queues import Databases
from tests.wait import wait_until

ROOT = Path(__file__).parent.parent
DOCUMENTS = 2_000
CONCURRENCY = 4  # of each of the two workers
SERVICE_S = 0.04  # that the service takes for one document
PROBES = 4  # until the service returns
PICK_UP_S = 0.05  # from a submission to the start on an idle worker, which the simulator leaves out

pytestmark = pytest.mark.long


class Recogniser(ThreadingHTTPServer):
    """A service on localhost that can be unavailable, and records when it was asked meanwhile."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecogniserRequest)
        self.is_down = threading.Event()
        self.refused_s: list[float] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class RecogniserRequest(BaseHTTPRequestHandler):
    """POST answers {"pages": 1} after `SERVICE_S`, or 503 at once."""

    server: Recogniser

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.is_down.is_set():
            self.server.refused_s.append(stopwatch())
            self.send_error(503)
            return
        threading.Event().wait(SERVICE_S)
        answer = json.dumps({"pages": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def recogniser() -> Iterator[Recogniser]:
    with Recogniser() as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield service
        service.shutdown()


@contextmanager
def worker(place: str, *options: str, service_url: str = "") -> Iterator[None]:
    """Run `fairturn work` on the handlers of `tests/routed_handlers.py`."""
    command = [str(SCRIPT), "work", "tests.routed_handlers:handlers", "--database", place]
    environment = {**os.environ, "SERVICE_URL": service_url, "PYTHONPATH": str(ROOT)}
    passed = ["--pass-env", "SERVICE_URL", "--pass-env", "PYTHONPATH"]
    with subprocess.Popen(
        [*command, *passed, *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(60) == 0


@pytest.fixture
def place() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new()


def full_rate_at(ended_us: Sequence[int], from_us: int, per_s: float) -> int:
    """Return the first end of a document, from then on, at which a second with this rate begins."""
    ended = sorted(at for at in ended_us if at >= from_us)
    size = math.ceil(per_s)
    return next(
        first
        for first, last in zip(ended, ended[size - 1 :], strict=False)
        if last - first <= SECOND_US
    )


def test_an_outage_uses_no_attempt_and_the_work_resumes_at_the_full_rate(place: str) -> None:
    with ExitStack() as stack:
        queue = stack.enter_context(Queue(place, kinds="open"))
        service = stack.enter_context(recogniser())
        receipts = queue.submit_many(
            Submission(customer=f"customer-{n % 20}", payload=n, kind="recognised")
            for n in range(DOCUMENTS)
        )
        for _ in range(2):
            options = ("--concurrency", str(CONCURRENCY))
            stack.enter_context(worker(place, *options, service_url=service.url))
        wait_until(lambda: queue.summary().completed >= 600, "a third is done", 60)

        down_us = SystemClock().now()
        service.is_down.set()
        wait_until(queue.outages, "reports hold the service")
        wait_until(lambda: queue.outages()[0].probes >= PROBES, "probes find it unavailable", 60)
        (outage,) = queue.outages()
        returned_us = SystemClock().now()
        service.is_down.clear()
        wait_until(lambda: queue.summary().completed == DOCUMENTS, "all are done", 120)
        documents = [queue.get(receipt.id) for receipt in receipts]
        attempts = [queue.attempts(receipt.id) for receipt in receipts]

    assert (outage.service, outage.kinds) == ("recogniser", ("recognised",))
    assert {document.state for document in documents} == {State.COMPLETED}
    assert {document.attempts for document in documents} == {1}
    assert not any(attempts)
    first_s, *later_s = service.refused_s
    in_flight = [at for at in later_s if at < first_s + 0.9 * RETRY_AFTER_S]
    probes = later_s[len(in_flight) :]
    assert len(in_flight) < 4 * CONCURRENCY
    assert len(probes) in (PROBES, PROBES + 1)
    assert all(later - earlier >= 0.9 * RETRY_AFTER_S for earlier, later in pairwise(probes))
    ended_us = [document.ended_at_us or 0 for document in documents]
    before = [at for at in ended_us if at < down_us]
    per_s = len(before) / ((down_us - min(before)) / SECOND_US)
    resumed_us = full_rate_at(ended_us, returned_us, 0.9 * per_s)
    sys.stdout.write(
        f"{per_s:.0f} documents/s before, {len(service.refused_s)} requests while it was down, "
        f"the full rate {(resumed_us - returned_us) / SECOND_US:.1f} s after its return\n"
    )
    assert resumed_us - returned_us <= 10 * SECOND_US


QUIET = {kind: [f"{kind}-{n}" for n in range(5)] for kind in ("text", "ocr")}
EVERY_S = 0.75  # between two documents of a quiet customer
SECONDS = 20
FLOOD = 200


def p99_s(waits_us: list[int]) -> float:
    return sorted(waits_us)[math.ceil(len(waits_us) * 0.99) - 1] / SECOND_US


def submit_quietly(queue: Queue) -> int:
    """Submit a document of each quiet customer every `EVERY_S`, evenly spread; return how many."""
    customers = [(name, kind) for kind, names in QUIET.items() for name in names]
    begun_s, pace = stopwatch(), threading.Event()
    documents = round(SECONDS / EVERY_S) * len(customers)
    for n in range(documents):
        pace.wait(max(0.0, begun_s + n * EVERY_S / len(customers) - stopwatch()))
        customer, kind = customers[n % len(customers)]
        queue.submit(customer, payload=n, kind=kind)
    return documents


def waits_of(documents: list[Document], kind: str) -> list[int]:
    """Return the waits of the quiet customers of a kind."""
    return [
        document.claimed_at_us - document.submitted_at_us
        for document in documents
        if document.customer in QUIET[kind] and document.claimed_at_us is not None
    ]


def test_a_flood_of_one_kind_delays_no_other_kind(place: str) -> None:
    """A worker serves text alone, and two slots serve both kinds. The simulator gets the same
    arrivals and the real run times."""
    with ExitStack() as stack:
        queue = stack.enter_context(Queue(place, kinds="open"))
        for kind in QUIET:
            queue.set_kind(kind)
        stack.enter_context(worker(place, "--kind", "text", "--concurrency", "1"))
        stack.enter_context(worker(place, "--concurrency", "2"))
        wait_until(lambda: len(queue.queries.workers()) == 2, "both workers have started")
        queue.submit_many(Submission(customer="flood", payload=n, kind="ocr") for n in range(FLOOD))
        documents = FLOOD + submit_quietly(queue)
        wait_until(lambda: queue.summary().completed == documents, "all are done", 120)
        newest_first, rule = list(queue.iterate()), queue.rule

    trace = trace_of(newest_first)
    plan = plan_of(trace, workers=2, workers_for=[("text", 1)])
    replayed = replay(trace, rule=rule, plan=plan)
    for kind, customers in QUIET.items():
        simulated = [
            replayed.started_at[n] - trace.at[n]
            for n, customer in enumerate(trace.customer)
            if trace.names[customer] in customers
        ]
        real_s, simulated_s = p99_s(waits_of(newest_first, kind)), p99_s(simulated)
        sys.stdout.write(f"{kind}: p99 {real_s:.3f} s, simulated {simulated_s:.3f} s\n")
        assert real_s <= 2 * simulated_s + PICK_UP_S
