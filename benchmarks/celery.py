"""A bulk upload beside quiet customers in Celery, with and without stamp: `make bench-celery`.

First the cost of `stamp` for a publisher: the same publish with and without it, in random
order; also with the server on a core of its own. Then one customer publishes 1,000 tasks of 20 ms
at once while five others publish one per second each. The figure is how long the quiet customers'
tasks wait with two workers, on Valkey and on RabbitMQ, and for the same arrivals in fairturn's own
queue.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import celery_apps
from benchmarks.celery_apps import BY_HAND, NAP_S, PLAIN, STAMPED
from benchmarks.figures import Figure, report
from fairturn import Queue, Worker
from tests.servers import rabbitmq, valkey
from tests.wait import wait_until

ROOT = Path(__file__).parent.parent
DUMP, QUIET = 1_000, 5
WORKERS = 2
OVERHEAD_BAR = 1.15
HANDLER = "benchmarks.handlers:short_nap"


class Bench:
    """The measurements, each in a new queue."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._folder = folder
        self.dump = DUMP // 5 if quick else DUMP
        self._publishes = 500 if quick else 4_000
        self._made = 0
        self.figures: list[Figure] = []

    # ── Waits ────────────────────────────────────────────────────────────────────────────────────

    def celery(self, where: str, broker: str, counts: str, mode: str) -> None:
        """Return the waits of quiet customers in one mode of Celery."""
        self._made += 1
        record = self._folder / f"record-{self._made}"
        setup = (mode, broker, counts, f"bench-{os.getpid()}-{self._made}", str(record))
        app = celery_apps.make(*setup)
        nap = app.tasks["nap"]

        def publish(customer: str) -> None:
            options: dict[str, Any] = {}
            if mode == BY_HAND:  # by a publisher that knows the bulk customer in advance
                first, last = (9, 1) if broker.startswith("amqp") else (1, 9)
                options["priority"] = last if customer == "dump" else first
            task = {"customer_id": customer, "published_at": time.time()}
            nap.apply_async((), task, **options)

        with _celery_worker(setup):
            publish("warm")
            wait_until(lambda: record.exists() and record.read_text(), "the worker runs")
            sent = arrive(self.dump, publish)
            wait_until(lambda: _lines(record) == sent + 1, "all tasks run", 120)
        rows = [line.rsplit(" ", 1) for line in record.read_text().splitlines()]
        waits = [float(wait) for customer, wait in rows if customer.startswith("quiet")]
        self._add(f"{where}: {mode}", waits)

    def fairturn(self) -> None:
        """Return the waits for the same arrivals in a fairturn queue on a file."""
        with Queue(self._folder / "documents.db") as queue:
            worker = Worker(queue, HANDLER, concurrency=WORKERS)
            running = threading.Thread(target=worker.run)
            running.start()
            queue.submit("warm")
            wait_until(lambda: queue.customer("warm").waiting == 0, "the worker runs")
            arrive(self.dump, queue.submit)
            wait_until(lambda: queue.summary().waiting == 0, "all documents run", 120)
            worker.stop()
            running.join()
            waits = [
                (document.claimed_at_us - document.submitted_at_us) / 1_000_000
                for document in queue.iterate()
                if document.customer.startswith("quiet") and document.claimed_at_us is not None
            ]
        self._add("fairturn's own queue", waits)

    def _add(self, name: str, waits: list[float]) -> None:
        waits.sort()
        p50, p99 = (waits[min(len(waits) - 1, int(len(waits) * q))] for q in (0.5, 0.99))
        for label, wait in (("p50", p50), ("p99", p99)):
            self.figures.append(
                Figure(name=f"{name}, {label}", value=wait, bar=None, ours=f"{wait * 1000:,.0f} ms")
            )

    # ── What it costs ────────────────────────────────────────────────────────────────────────────

    def overhead(self, where: str, broker: str, counts: str, bar: float | None) -> None:
        """Return the median time of a publish with and without stamp, in random order."""
        apps = {
            mode: celery_apps.make(mode, broker, counts, f"cost-{os.getpid()}", os.devnull)
            for mode in (BY_HAND, STAMPED)
        }
        took: dict[str, list[float]] = {mode: [] for mode in apps}
        order = list(apps)
        for turn in range(self._publishes + 100):
            random.shuffle(order)
            for mode in order:
                nap = apps[mode].tasks["nap"]
                begun = time.perf_counter()
                nap.delay(customer_id=f"customer {turn % 7}", published_at=0)
                if turn >= 100:  # connections and caches are warm
                    took[mode].append(time.perf_counter() - begun)
        plain, stamped = (statistics.median(took[mode]) for mode in (BY_HAND, STAMPED))
        self.figures.append(
            Figure(
                name=f"{where}: publishing with stamp, against without",
                value=stamped / plain,
                bar=bar,
                at_most=True,
                ours=f"{stamped * 1e6:,.0f} µs",
                theirs=f"{plain * 1e6:,.0f} µs",
            )
        )


@contextmanager
def apart(server: int) -> Iterator[None]:
    """Pin a server to a core that the publisher does not use, as if it had its own machine. On a
    shared core the server preempts the publisher."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(server, {max(cores)})
        os.sched_setaffinity(0, cores - {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(server, cores)
        os.sched_setaffinity(0, cores)


def arrive(dump: int, publish: Callable[[str], object]) -> int:
    """Publish the bulk upload and the quiet customers' tasks when they are due; return their
    number."""
    lasts_s = dump * NAP_S / WORKERS
    timestamps = sorted(
        (second + number / QUIET, f"quiet {number}")
        for second in range(int(lasts_s * 0.8))
        for number in range(QUIET)
    )
    dumping = threading.Thread(target=lambda: [publish("dump") for _ in range(dump)])
    begun = time.monotonic()
    dumping.start()
    for timestamp, customer in timestamps:
        time.sleep(max(0.0, begun + timestamp - time.monotonic()))
        publish(customer)
    dumping.join()
    return dump + len(timestamps)


@contextmanager
def _celery_worker(setup: tuple[str, ...]) -> Iterator[None]:
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "benchmarks.celery_apps"]
    with subprocess.Popen(
        [*command, "worker", f"--concurrency={WORKERS}", "--loglevel=ERROR", "--without-gossip"],
        cwd=ROOT,
        env={**os.environ, "FAIRTURN_BENCH_CELERY": "|".join(setup)},
        stdout=subprocess.DEVNULL,
    ) as worker:
        try:
            yield
        finally:
            worker.terminate()


def _lines(record: Path) -> int:
    return record.read_text().count("\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the dump")
    parser.add_argument("--overhead", action="store_true", help="only what stamp costs publishers")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each figure")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="fairturn-bench-") as folder,
        valkey.started() as redis,
        rabbitmq.started() as rabbit,
    ):
        bench = Bench(Path(folder), quick=options.quick)
        bench.overhead("Redis", redis.url, redis.url, OVERHEAD_BAR)
        with apart(redis.pid):
            bench.overhead("Redis on a core of its own", redis.url, redis.url, None)
        bench.overhead("RabbitMQ", rabbit.url, redis.url, None)
        if not options.overhead:
            for where, broker in (("Redis", redis.url), ("RabbitMQ", rabbit.url)):
                for mode in (PLAIN, BY_HAND, STAMPED):
                    redis.client().flushall()
                    bench.celery(where, broker, redis.url, mode)
            bench.fairturn()
    return report(
        f"Quiet customers beside a dump of {bench.dump:,} tasks of 20 ms, two workers; seconds.",
        bench.figures,
        as_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
