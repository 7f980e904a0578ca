"""One of many claimers with a slow connection: `python -m benchmarks.claimers URL SECONDS`.

It claims one document at a time, with the outcome of the previous one, as a worker with slow
documents does. It prints a JSON list of the seconds of each claim.
"""

import json
import sys
import time

from benchmarks.contest import wait_for_start
from fairturn import Queue
from fairturn.model import Completed, Outcome

LEASE_US = 30_000_000


def main() -> None:
    url, seconds = sys.argv[1], float(sys.argv[2])
    took = []
    outcomes: list[Outcome] = []
    with Queue(url) as queue:
        queue.store.claim(0, worker="bench", lease_us=LEASE_US)  # opens the connection
        wait_for_start()
        end = time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            claims, *_ = queue.store.claim(1, worker="bench", lease_us=LEASE_US, outcomes=outcomes)
            took.append(time.monotonic() - begun)
            assert claims, "there are too few documents"
            outcomes = [Completed(claim.fence) for claim in claims]
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
