"""The cost of the submit function against COPY: `make bench-bulk`.

Both store the same documents on the same server, in transactions of 1,000, by turns. COPY writes
the rows of `documents` and nothing else: it makes no check of the rule, no counter, no event and no
receipt. It is a bound for any way to submit, not another way to submit.
"""

import argparse
from collections.abc import Callable
from contextlib import closing

import psycopg

from benchmarks.figures import in_turns
from fairturn.model import NewDocument
from fairturn.stores.postgres import PostgresStore
from tests.servers.postgres import started

BATCH = 1_000
BODY = '{"pages":3}'
COPY = """
    COPY fairturn.documents (number, customer, order_number, count, submitted_at, size_bytes, level,
        priority, state, body_type, body_text) FROM STDIN"""
NUMBERS = "SELECT nextval('fairturn.document_numbers') FROM generate_series(1, %s)"


def submit(store: PostgresStore) -> None:
    store.submit([NewDocument(f"customer {n % 100}", BODY, size_bytes=11) for n in range(BATCH)])


def copy(connection: "psycopg.Connection[tuple[int]]") -> None:
    with connection.transaction():
        numbers = connection.execute(NUMBERS, (BATCH,)).fetchall()
        with connection.cursor().copy(COPY) as rows:
            for (number,) in numbers:
                rows.write_row((number, 1, number, 0, 0, 11, 1, 1, 1, "payload", BODY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000, help="in each round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    times = max(1, options.documents // BATCH)

    def repeated(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                work()

        return run

    with (
        started(fsync=True) as server,
        closing(PostgresStore(server.url())) as store,
        psycopg.connect(server.url(), autocommit=True) as connection,
    ):
        submit(store)
        function, bound = in_turns(
            options.rounds,
            repeated(lambda: submit(store)),
            repeated(lambda: copy(connection)),
        )
    n = times * BATCH
    print(f"submit function  {n / function:10,.0f} documents/s")
    print(f"COPY alone       {n / bound:10,.0f} documents/s")
    print(f"ratio            {bound / function:10.2f}")


if __name__ == "__main__":
    main()
