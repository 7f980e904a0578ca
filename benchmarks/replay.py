"""`fairturn replay` on a million documents: `make bench-replay`.

Time and memory of the whole command, and the time per document against a trace of 10,000. It prints
the rows that miss their bar and exits non-zero.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CUSTOMERS = 1_000
SECONDS_MAX = 60.0
MEMORY_BYTES_MAX = 1_000_000_000
# The allowed growth of the time per document from 10,000 documents to a million.
GROWTH_MAX = 1.5


def write_trace(path: Path, documents: int) -> None:
    """Write random arrivals that load four workers to 0.9."""
    chance = random.Random(1993)
    at_us = 0
    with path.open("w") as file:
        file.write("at_s,customer,cost_s\n")
        for _ in range(documents):
            at_us += chance.randrange(27_800)
            customer = int(CUSTOMERS * chance.random() ** 2)
            file.write(f"{at_us / 1e6},customer-{customer},{chance.randrange(100_000) / 1e6}\n")


def replay(path: Path) -> float:
    """Return the seconds that the command takes."""
    fairturn = str(Path(sys.executable).with_name("fairturn"))
    command = [fairturn, "replay", str(path), "--workers", "4"]
    started = time.perf_counter()
    subprocess.run([*command, "--json"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    documents = parser.parse_args().documents
    short = []
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.csv", Path(folder) / "large.csv"
        write_trace(small, 10_000)
        write_trace(large, documents)
        start = min(replay(small) for _ in range(3))
        empty = Path(folder) / "empty.csv"
        write_trace(empty, 0)
        launch = min(replay(empty) for _ in range(3))
        took = replay(large)
    memory_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    each, each_small = (took - launch) / documents, (start - launch) / 10_000
    print(
        f"{documents:,} documents of {CUSTOMERS:,} customers: {took:.1f} s (at most {SECONDS_MAX})"
    )
    print(f"memory: {memory_bytes / 1e6:,.0f} MB (at most {MEMORY_BYTES_MAX / 1e6:,.0f})")
    print(f"time for each document, against 10,000: {each / each_small:.2f} (at most {GROWTH_MAX})")
    if took > SECONDS_MAX:
        short.append("time")
    if memory_bytes > MEMORY_BYTES_MAX:
        short.append("memory")
    if each > GROWTH_MAX * each_small:
        short.append("growth")
    for name in short:
        print(f"falls short: {name}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
