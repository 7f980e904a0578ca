"""The embedded store against a bare queue in plain apsw (bare.py): `make bench-store`.

Each figure is a ratio of two values measured in the same run, in turns, so that noise affects both.
The run prints the rows that miss their bar and then exits non-zero.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import apsw

from benchmarks.bare import BareQueue, Row
from benchmarks.figures import Figure, in_turns, report
from fairturn.contents.local import Folder
from fairturn.model import KINDS_MAX, Completed, KindSettings, Settings, Submission
from fairturn.queue import Queue
from fairturn.stores.sqlite import SqliteStore

PAYLOAD = {  # 200 bytes as JSON
    "file": "invoices/2026/11/invoice-0017.pdf",
    "language": "de",
    "pages": 3,
    "kind": "invoice",
    "callback": "orders/18273645/received",
    "note": "scanned at the front desk, second copy, page two is upside down!!",
}
LEASE_US = 30_000_000
BATCH = 100
NOW = 1_800_000_000_000_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the measurements. The bars are for the full sizes."""

    rounds: int
    singles: int
    batches: int
    customers: int
    waiting: int
    waiting_most: int
    claims: int


FULL = Sizes(
    rounds=9,
    singles=100,
    batches=10,
    customers=100_000,
    waiting=1_000_000,
    waiting_most=10_000_000,
    claims=200,
)
QUICK = Sizes(
    rounds=5,
    singles=50,
    batches=5,
    customers=10_000,
    waiting=50_000,
    waiting_most=200_000,
    claims=50,
)


class Bench:
    """The measurements, each in new files."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder = folder
        self._sizes = sizes
        self._files = 0
        self.figures: list[Figure] = []

    @contextmanager
    def queue(self, synchronous: str = "FULL") -> Iterator[Queue]:
        self._files += 1
        path = self._folder / f"fairturn-{self._files}.db"
        settings = Settings(waiting_max=10**9, waiting_per_customer_max=10**9)
        store = SqliteStore(path, settings=settings, synchronous=synchronous)
        with Queue(store, contents=Folder(self._folder / f"{path.name}.contents")) as queue:
            yield queue
        for file in self._folder.glob(f"{path.name}*"):
            if file.is_file():
                file.unlink()

    @contextmanager
    def bare(self, synchronous: str = "FULL") -> Iterator[BareQueue]:
        self._files += 1
        path = self._folder / f"bare-{self._files}.db"
        bare = BareQueue(path, synchronous)
        yield bare
        bare.close()
        for file in self._folder.glob(f"{path.name}*"):
            file.unlink()

    def add(
        self, name: str, *, bare_s: float, our_s: float, documents: int, bar: float | None
    ) -> None:
        self.figures.append(
            Figure(
                name=name,
                value=bare_s / our_s,
                bar=bar,
                ours=f"{documents / our_s:,.0f}/s",
                theirs=f"{documents / bare_s:,.0f}/s",
            )
        )

    # ── Submitting ───────────────────────────────────────────────────────────────────────────────

    def submit_one(self, synchronous: str, bar: float | None) -> None:
        n = self._sizes.singles
        with self.queue(synchronous) as queue, self.bare(synchronous) as bare:
            row = bare_rows(1)[0]

            def ours() -> None:
                for i in range(n):
                    queue.submit(customer(i), payload=PAYLOAD)

            def theirs() -> None:
                for _ in range(n):
                    bare.submit(row)

            ours()
            theirs()
            bare_s, our_s = in_turns(self._sizes.rounds, theirs, ours)
        self.add(
            f"submit one at a time, {synchronous}",
            bare_s=bare_s,
            our_s=our_s,
            documents=n,
            bar=bar,
        )

    def submit_many(self, synchronous: str, bar: float | None) -> None:
        n = 1_000
        with self.queue(synchronous) as queue, self.bare(synchronous) as bare:
            documents = [Submission(customer="dump", payload=PAYLOAD) for _ in range(n)]
            rows = bare_rows(n)

            def ours() -> None:
                queue.submit_many(documents)

            def theirs() -> None:
                bare.submit_many(rows)

            ours()
            theirs()
            bare_s, our_s = in_turns(4 * self._sizes.rounds, theirs, ours)
        self.add(
            f"submit_many of 1,000, {synchronous}",
            bare_s=bare_s,
            our_s=our_s,
            documents=n,
            bar=bar,
        )

    def submit_from_threads(self, synchronous: str, bar: float | None) -> None:
        threads, n = 8, self._sizes.singles
        with self.queue(synchronous) as queue, self.bare(synchronous) as bare:
            rows = bare_rows(threads)

            def submit(number: int) -> None:
                for _ in range(n):
                    queue.submit(customer(number), payload=PAYLOAD)

            def ours() -> None:
                started = [threading.Thread(target=submit, args=(i,)) for i in range(threads)]
                for thread in started:
                    thread.start()
                for thread in started:
                    thread.join()

            def theirs() -> None:
                for _ in range(n):
                    bare.submit_many(rows)

            ours()
            theirs()
            bare_s, our_s = in_turns(self._sizes.rounds, theirs, ours)
        self.add(
            f"8 threads one at a time, against 8 rows a commit, {synchronous}",
            bare_s=bare_s,
            our_s=our_s,
            documents=threads * n,
            bar=bar,
        )

    # ── Claiming and finishing ───────────────────────────────────────────────────────────────────

    def drain(self, synchronous: str, bar: float | None, *, run: int = 1) -> None:
        batches, rounds = self._sizes.batches, self._sizes.rounds
        n = batches * BATCH
        with self.queue(synchronous) as queue, self.bare(synchronous) as bare:
            fill(queue, customers=100, documents=2 * n * (rounds + 1), run=run)
            for _ in range(2 * batches * (rounds + 1) // 10 + 1):
                bare.submit_many(bare_rows(1_000))
            drain(queue, batches)
            drain_bare(bare, batches)
            bare_s, our_s = in_turns(
                rounds, lambda: drain_bare(bare, batches), lambda: drain(queue, batches)
            )
        self.add(
            f"claim and finish by {BATCH}, 100 customers"
            + (f" with {run} documents in a row" if run > 1 else "")
            + f", {synchronous}",
            bare_s=bare_s,
            our_s=our_s,
            documents=n,
            bar=bar,
        )

    def drain_large(self, name: str, *, customers: int, documents: int, bar: float) -> None:
        """Measure a large queue against a small one, both of fairturn."""
        batches, rounds = self._sizes.batches, self._sizes.rounds
        n = batches * BATCH
        with self.queue() as small, self.queue() as large:
            fill(small, customers=100, documents=2 * n * (rounds + 1))
            fill(large, customers=customers, documents=documents)
            drain(small, batches)
            drain(large, batches)
            small_s, large_s = in_turns(
                rounds, lambda: drain(small, batches), lambda: drain(large, batches)
            )
        self.figures.append(
            Figure(
                name=f"{name}, against 100 customers and {2 * n * (rounds + 1):,} waiting",
                value=small_s / large_s,
                bar=bar,
                ours=f"{n / large_s:,.0f}/s",
                theirs=f"{n / small_s:,.0f}/s",
            )
        )

    def drain_kind(self, kinds: int, bar: float) -> None:
        """Measure claims of one kind among many against a queue with only that kind."""
        batches, rounds = self._sizes.batches, self._sizes.rounds
        n = batches * BATCH
        served, *others = [f"kind-{number}" for number in range(kinds)]
        documents = 2 * n * (rounds + 1)
        with self.queue() as one, self.queue() as many:
            for queue in (one, many):
                queue.store.configure_kind(served, KindSettings())
                fill(queue, customers=100, documents=documents, kind=served)
            for kind in others:
                many.store.configure_kind(kind, KindSettings())
                fill(many, customers=100, documents=documents // 100, kind=kind)
            drain(one, batches, [served])
            drain(many, batches, [served])
            one_s, many_s = in_turns(
                rounds,
                lambda: drain(one, batches, [served]),
                lambda: drain(many, batches, [served]),
            )
        self.figures.append(
            Figure(
                name=f"claim and finish by {BATCH} one of {kinds} kinds, against one kind",
                value=one_s / many_s,
                bar=bar,
                ours=f"{n / many_s:,.0f}/s",
                theirs=f"{n / one_s:,.0f}/s",
            )
        )

    def claim_one(self, bar: float) -> None:
        """Measure a claim of one document in the largest queue against a small one."""
        most, claims = self._sizes.waiting_most, self._sizes.claims
        with self.queue() as small, self.queue() as large:
            fill(small, customers=1_000, documents=10_000)
            fill(large, customers=1_000, documents=most, run=1_000)
            times = [
                (claim_each(small, claims), claim_each(large, claims))
                for _ in range(self._sizes.rounds + 1)
            ][1:]
            small_s = statistics.median(pair[0] for pair in times)
            large_s = statistics.median(pair[1] for pair in times)
        self.figures.append(
            Figure(
                name=f"time of a claim of one at {most:,} waiting, against 10,000",
                value=large_s / small_s,
                bar=bar,
                at_most=True,
                ours=f"{1e6 * large_s / claims:,.0f} µs",
                theirs=f"{1e6 * small_s / claims:,.0f} µs",
            )
        )


def customer(number: int) -> str:
    return f"customer-{number % 100}"


def bare_rows(n: int) -> list[Row]:
    return [(customer(i), i % 9 + 1, NOW, PAYLOAD) for i in range(n)]


def fill(
    queue: Queue, *, customers: int, documents: int, run: int = 1, kind: str | None = None
) -> None:
    """Submit documents of many customers, in turns with `run` documents each."""
    size = 10_000
    made = 0
    while made < documents:
        n = min(size, documents - made)
        batch = [
            Submission(
                customer=f"customer-{(made + i) // run % customers}", payload=PAYLOAD, kind=kind
            )
            for i in range(n)
        ]
        queue.submit_many(batch)
        made += n
        if documents > 100_000 and sys.stderr.isatty():
            print(f"\r  filling: {made:,} of {documents:,} ", end="", file=sys.stderr)
    queue.store.claim(0, worker="bench", lease_us=LEASE_US)  # folds all events
    if documents > 100_000 and sys.stderr.isatty():
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr)


def drain(queue: Queue, batches: int, kinds: list[str] | None = None) -> None:
    store = queue.store
    for _ in range(batches):
        claims, *_ = store.claim(BATCH, worker="bench", lease_us=LEASE_US, kinds=kinds)
        assert len(claims) == BATCH
        lost = store.finish([Completed(claim.fence) for claim in claims])
        assert not lost


def drain_bare(bare: BareQueue, batches: int) -> None:
    for _ in range(batches):
        claimed = bare.claim(BATCH, NOW)
        assert len(claimed) == BATCH
        bare.finish(claimed, NOW)


def claim_each(queue: Queue, claims: int) -> float:
    """Return the seconds of claims of one document, without their outcomes."""
    store = queue.store
    took = 0.0
    for _ in range(claims):
        started = time.perf_counter()
        claimed, *_ = store.claim(1, worker="bench", lease_us=LEASE_US)
        took += time.perf_counter() - started
        store.finish([Completed(claimed[0].fence)])
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--json", action="store_true", help="a JSON line for each row")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build"),
        help="where to make the files: a disk, because a file system in memory has no fsync",
    )
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    options.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), sizes)
        steps: list[tuple[str, Callable[[], None]]] = [
            ("submit one", lambda: bench.submit_one("FULL", 0.6)),
            ("submit_many", lambda: bench.submit_many("FULL", 0.4)),
            ("threads", lambda: bench.submit_from_threads("FULL", 0.35)),
            ("drain", lambda: bench.drain("FULL", 0.5)),
            (
                "customers",
                lambda: bench.drain_large(
                    f"the same, {sizes.customers:,} customers",
                    customers=sizes.customers,
                    documents=max(10 * sizes.customers // 2, 200_000),
                    bar=0.8,
                ),
            ),
            (
                "waiting",
                lambda: bench.drain_large(
                    f"the same, {sizes.waiting:,} waiting",
                    customers=100,
                    documents=sizes.waiting,
                    bar=0.8,
                ),
            ),
            ("kinds", lambda: bench.drain_kind(KINDS_MAX - 1, 0.9)),
            ("claim one", lambda: bench.claim_one(1.5)),
            ("drain runs", lambda: bench.drain("FULL", None, run=100)),
            ("submit one NORMAL", lambda: bench.submit_one("NORMAL", None)),
            ("submit_many NORMAL", lambda: bench.submit_many("NORMAL", None)),
            ("threads NORMAL", lambda: bench.submit_from_threads("NORMAL", None)),
            ("drain NORMAL", lambda: bench.drain("NORMAL", None)),
        ]
        for name, step in steps:
            if options.only in name:
                print(f"measuring: {name}", file=sys.stderr)
                step()
    title = f"SQLite {apsw.sqlite_lib_version()}, medians of {sizes.rounds} rounds in turns"
    return report(title, bench.figures, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
