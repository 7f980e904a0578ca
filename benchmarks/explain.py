"""How long an explanation takes: `make bench-explain`.

Each row is a file in which every customer has waited beyond the patience: 10,000 customers with 100
documents each, for which turns for the longest waiting are taken one by one; and 100,000 customers
with one document each, whose lines the database aggregates. All documents are in one level; with
--all-levels they are spread over the nine levels by the rule. Documents are chosen at random. The
benchmark fails if the p99 of a row is above its bar.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from fairturn import Queue, Submission
from fairturn.clock import SECOND_US, SystemClock
from fairturn.explain.sentences import tell
from fairturn.priority import BOUNDS

ROWS = ((10_000, 1_000_000, 200), (100_000, 100_000, 300))  # customers, documents, bar in ms
BATCH = 10_000
ALL_IN_LEVEL_9 = (8, 7, 6, 5, 4, 3, 2, 1)


class Later(SystemClock):
    """The clock of this machine, shifted into the future."""

    def __init__(self) -> None:
        super().__init__()
        self.by_us = 0

    def now(self) -> int:
        return super().now() + self.by_us


def main() -> None:
    arguments = _arguments()
    chosen = arguments.customers or arguments.documents
    only = (arguments.customers or 10_000, arguments.documents or 1_000_000, arguments.bar)
    rows = (only,) if chosen else ROWS
    within = [_row(arguments, *row) for row in rows]
    sys.exit(not all(within))


def _row(arguments: argparse.Namespace, customers: int, documents: int, bar_ms: int) -> bool:
    """Measure and print one row; return whether it is within its bar."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        clock = Later()
        file = Path(folder) / "documents.db"
        bounds = BOUNDS if arguments.all_levels else ALL_IN_LEVEL_9
        with Queue(file, clock=clock, bounds=bounds, mode=arguments.mode) as queue:
            ids = _fill(queue, customers, documents)
            queue.store.claim(50, worker="w", lease_us=3_600 * SECOND_US)
        # Another process than the claimer, like a page or a command.
        with Queue(file, clock=clock) as queue:
            clock.by_us = 300 * SECOND_US
            times = _ask(queue, ids, arguments.asks)
    p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    print(
        f"{customers:,} customers, {documents:,} documents, "
        f"{'all levels' if arguments.all_levels else 'one level'}, mode {arguments.mode}, "
        f"{len(times)} answers: "
        f"p50 {p50:.0f} ms, p99 {p99:.0f} ms (bar {bar_ms} ms), longest {times[-1]:.0f} ms"
    )
    return p99 <= bar_ms


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--customers", type=int, help="one row of its own, instead of both")
    parser.add_argument("--documents", type=int, help="of that row")
    parser.add_argument("--bar", type=int, default=300, help="of that row, in ms")
    parser.add_argument("--asks", type=int, default=200)
    parser.add_argument("--mode", choices=["fair", "equal", "levels"], default="fair")
    parser.add_argument("--all-levels", action="store_true")
    parser.add_argument("--folder", help="where the file is made; the system's by default")
    return parser.parse_args()


def _fill(queue: Queue, customers: int, documents: int) -> list[str]:
    ids: list[str] = []
    for first in range(0, documents, BATCH):
        numbers = range(first, min(first + BATCH, documents))
        receipts = queue.submit_many(
            Submission(customer=f"customer-{n % customers:06}", payload=n) for n in numbers
        )
        ids += [receipt.id for receipt in receipts]
        if sys.stderr.isatty():
            print(f"\rsubmitted {len(ids):,}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return ids


def _ask(queue: Queue, ids: list[str], asks: int) -> list[float]:
    chance = Random(1)
    times = []
    for _ in range(asks):
        id = chance.choice(ids)
        begun = time.perf_counter()
        tell(queue.explain(id))
        times.append(1_000 * (time.perf_counter() - begun))
    return sorted(times)


if __name__ == "__main__":
    main()
