"""How long large operations block claims and submissions: `make bench-postgres-stalls`.

One process changes the mode, purges a customer, or folds the events of a time without workers.
Another one claims and submits meanwhile, one document at a time. The figure is its longest call:
every operation must work in short transactions.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psycopg

from benchmarks.figures import Figure, report
from fairturn.model import NewDocument, Settings
from fairturn.scheduling.flows import Mode
from fairturn.stores.postgres import PostgresStore
from tests.servers.postgres import Server, started

LEASE_US = 60_000_000
BATCH = 1_000
STALL_MS_MAX = 1_000
Prepare = Callable[[PostgresStore, str, int], None]
Work = Callable[[PostgresStore, int], object]


def new(customer: str, **fields: int) -> NewDocument:
    return NewDocument(customer, "1", **fields)  # type: ignore[arg-type]


def submit(store: PostgresStore, n: int, name: Callable[[int], str], **fields: int) -> None:
    for first in range(0, n, BATCH):
        store.submit([new(name(first + i), **fields) for i in range(min(BATCH, n - first))])


def one_customer(store: PostgresStore, url: str, n: int) -> None:
    submit(store, n, lambda number: "large")
    _fold(store)


def many_customers(store: PostgresStore, url: str, n: int) -> None:
    submit(store, n, lambda number: f"customer {number}")
    _fold(store)


def unfolded(store: PostgresStore, url: str, n: int) -> None:
    for number in range(n // 10):  # one event per call
        store.submit([new(f"customer {number % 1_000}")] * 10)


def due(store: PostgresStore, url: str, n: int) -> None:
    later = time.time_ns() // 1_000 + 3_600 * 1_000_000
    submit(store, n, lambda number: "large", due_at=later)
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE fairturn.documents SET delayed_until = 1, due_at = 1")


def expired(store: PostgresStore, url: str, n: int) -> None:
    submit(store, n, lambda number: "large")
    taken = 0
    while claims := store.claim(BATCH, worker="dead", lease_us=LEASE_US).claims:
        taken += len(claims)
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE fairturn.documents SET lease_until = 1")
        connection.execute("UPDATE fairturn.leases SET until = 1")
        connection.execute("UPDATE fairturn.scheduler_states SET leases_from = 0")


def cancelled(store: PostgresStore, url: str, n: int) -> None:
    for _ in range(0, n, BATCH):
        store.cancel([receipt.id for receipt in store.submit([new("large")] * BATCH)])


def _fold(store: PostgresStore) -> None:
    (claimed,) = store.claim(1, worker="first", lease_us=LEASE_US).claims
    assert claimed


def change_mode(store: PostgresStore, n: int) -> None:
    store.configure(Settings(mode=Mode.EQUAL))


def purge(store: PostgresStore, n: int) -> None:
    store.purge("large")


def claim(store: PostgresStore, n: int) -> None:
    for _ in range(max(20, n // BATCH)):  # enough to fold all events
        store.claim(1, worker="first", lease_us=LEASE_US)


CASES: dict[str, tuple[Prepare, Work]] = {
    "mode, one customer": (one_customer, change_mode),
    "mode, a customer for each document": (many_customers, change_mode),
    "purge": (one_customer, purge),
    "claims after submissions": (unfolded, claim),
    "claims after cancels": (cancelled, claim),
    "documents that become due": (due, claim),
    "leases that expire": (expired, claim),
}


def measure(server: Server, name: str, n: int) -> Figure:
    prepare, work = CASES[name]
    with (
        database(server) as url,
        closing(PostgresStore(url)) as store,
        closing(PostgresStore(url)) as other,
    ):
        prepare(store, url, n)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
        over = threading.Event()
        took: list[float] = []

        def run() -> None:
            begun = time.monotonic()
            work(store, n)
            took.append(time.monotonic() - begun)
            over.set()

        thread = threading.Thread(target=run)
        thread.start()
        stalls = []
        while not over.is_set():
            begun = time.monotonic()
            other.submit([new("other")])
            other.claim(1, worker="second", lease_us=LEASE_US)
            stalls.append(1e3 * (time.monotonic() - begun))
        thread.join()
    print(f"  {name}: {took[0]:.1f} s, {len(stalls)} calls meanwhile", file=sys.stderr)
    return Figure(
        name=f"{name}, {n:,}: longest submission and claim of another process, ms",
        value=max(stalls),
        bar=STALL_MS_MAX,
        at_most=True,
        ours=f"{max(stalls):,.0f} ms",
        theirs=f"{took[0]:.1f} s in all",
    )


@contextmanager
def database(server: Server) -> Iterator[str]:
    server.create("stalls")
    try:
        yield server.url("stalls", tcp=True)
    finally:
        server.drop("stalls")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=300_000, help="how many documents")
    parser.add_argument("--only", choices=CASES, help="only this measurement")
    parser.add_argument("--json", action="store_true", help="a JSON line for each row")
    options = parser.parse_args()
    with started(fsync=True) as server:
        names = [options.only] if options.only else list(CASES)
        figures = [measure(server, name, options.documents) for name in names]
    return report("PostgreSQL, fsync on", figures, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
