"""An old transaction, and ten million waiting documents: `make bench-postgres-long`.

An open transaction, such as a report or a forgotten session, prevents the server from removing the
dead rows of claims. Both cases are compared with fairturn's own small case in the same run;
`--minutes`, `--rate` and `--waiting` make it shorter.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psycopg

from benchmarks import store as in_batches
from benchmarks.contest import PAYLOAD, customer
from benchmarks.figures import Figure, report, seconds
from benchmarks.postgres import percentile, settle
from fairturn import Queue, Submission
from fairturn.model import Completed, Outcome
from tests.servers.postgres import Server, started

AT_ONCE = 10  # documents per claim and per submission
PAUSE_S = 0.01  # after an empty claim


class Load:
    """Submits documents at a steady rate; one claimer takes them as they arrive."""

    def __init__(self, url: str, rate: float) -> None:
        self._url = url
        self._every_s = AT_ONCE / rate

    def run(self, seconds: float) -> list[float]:
        """Return the milliseconds of each claim that returned documents."""
        over = threading.Event()
        submitting = threading.Thread(target=self._submit, args=(over,))
        submitting.start()
        try:
            return self._claim(time.monotonic() + seconds)
        finally:
            over.set()
            submitting.join()

    def _submit(self, over: threading.Event) -> None:
        next_at = time.monotonic()
        number = 0
        with Queue(self._url) as queue:
            while not over.wait(max(0.0, next_at - time.monotonic())):
                batch = [
                    Submission(customer=customer(number + i), payload=PAYLOAD)
                    for i in range(AT_ONCE)
                ]
                queue.submit_many(batch)
                number += AT_ONCE
                next_at += self._every_s

    def _claim(self, end_at: float) -> list[float]:
        took = []
        outcomes: list[Outcome] = []
        with Queue(self._url) as queue:
            while (begun := time.monotonic()) < end_at:
                claims, *_ = queue.store.claim(
                    AT_ONCE, worker="bench", lease_us=in_batches.LEASE_US, outcomes=outcomes
                )
                if claims:
                    took.append(1e3 * (time.monotonic() - begun))
                else:
                    time.sleep(PAUSE_S)
                outcomes = [Completed(claim.fence) for claim in claims]
            queue.store.finish(outcomes)
        return took


def old_transaction(server: Server, *, minutes: float, rate: float) -> list[Figure]:
    """Measure claims while a transaction is open, minute by minute, against claims before it."""
    with database(server, "held") as url:
        load = Load(url, rate)
        load.run(min(30.0, 15 * minutes))  # the first claims, and the first run of autovacuum
        before = percentile(load.run(min(60.0, 60 * minutes)), 99)
        worst = last = 0.0
        with psycopg.connect(url) as held:
            held.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            held.execute("SELECT pg_current_xact_id()").fetchone()
            parts = max(1, round(minutes))
            for part in range(parts):
                last = percentile(load.run(60 * minutes / parts), 99)
                worst = max(worst, last)
                print(f"  part {part + 1} of {parts}: claim p99 {last:.1f} ms", file=sys.stderr)
    return [
        Figure(
            name=f"claim p99 at {rate:g} documents/s, a transaction open for {minutes:g} min, "
            "against before: its last part",
            value=last / before,
            bar=3.0,
            at_most=True,
            ours=f"{last:.1f} ms",
            theirs=f"{before:.1f} ms",
        ),
        Figure(
            name="the same: its worst part",
            value=worst / before,
            bar=None,
            ours=f"{worst:.1f} ms",
            theirs=f"{before:.1f} ms",
        ),
    ]


def many_waiting(server: Server, waiting: int) -> list[Figure]:
    """Measure drains in batches of 100, and claims of one, in a large queue against a small one."""
    batches, rounds, claims = 10, 5, 100
    n = batches * in_batches.BATCH
    times: list[tuple[float, ...]] = []
    with (
        database(server, "small") as small_url,
        database(server, "large") as large_url,
        Queue(small_url) as small,
        Queue(large_url) as large,
    ):
        in_batches.fill(small, customers=1_000, documents=2 * rounds * n)
        in_batches.fill(large, customers=1_000, documents=waiting, run=1_000)
        for url in (small_url, large_url):
            settle(url)
        for _ in range(rounds + 1):
            drained = [seconds(partial(in_batches.drain, q, batches)) for q in (small, large)]
            claimed = [in_batches.claim_each(queue, claims) for queue in (small, large)]
            times.append((*drained, *claimed))
    small_s, large_s, one_s, one_large_s = (
        statistics.median(column) for column in zip(*times[1:], strict=True)
    )
    return [
        Figure(
            name=f"claim and finish by {in_batches.BATCH} with {waiting:,} waiting, against few",
            value=small_s / large_s,
            bar=0.8,
            ours=f"{n / large_s:,.0f}/s",
            theirs=f"{n / small_s:,.0f}/s",
        ),
        Figure(
            name=f"time of a claim of one with {waiting:,} waiting, against few",
            value=one_large_s / one_s,
            bar=1.5,
            at_most=True,
            ours=f"{1e3 * one_large_s / claims:.2f} ms",
            theirs=f"{1e3 * one_s / claims:.2f} ms",
        ),
    ]


@contextmanager
def database(server: Server, name: str) -> Iterator[str]:
    server.create(name)
    try:
        yield server.url(name, tcp=True)
    finally:
        server.drop(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long it is held open")
    parser.add_argument("--rate", type=float, default=200, help="documents a second")
    parser.add_argument("--waiting", type=int, default=10_000_000, help="documents that wait")
    parser.add_argument("--json", action="store_true", help="a JSON line for each row")
    parser.add_argument("--only", choices=("held", "waiting"), help="only this measurement")
    options = parser.parse_args()
    figures: list[Figure] = []
    with started(fsync=True) as server:
        if options.only in (None, "held"):
            print("measuring: a transaction held open", file=sys.stderr)
            figures += old_transaction(server, minutes=options.minutes, rate=options.rate)
        if options.only in (None, "waiting"):
            print(f"measuring: {options.waiting:,} waiting", file=sys.stderr)
            figures += many_waiting(server, options.waiting)
        with psycopg.connect(server.url()) as connection:
            ((version,),) = connection.execute("SHOW server_version").fetchall()
    return report(f"PostgreSQL {version}, fsync on", figures, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
