"""The accuracy of predicted starts: `make bench-forecast` prints the table of docs/explain.md.

It requests explanations in every workload of the simulator, as `tests/test_forecast.py` does, for
more documents, and prints the percentage of intervals that contained the actual start.
"""

import argparse

from fairturn.scheduling.flows import Mode
from fairturn.simulator import workloads
from tests.test_forecast import held

MODES = (Mode.FAIR, Mode.EQUAL, Mode.LEVELS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--asks", type=int, default=400, help="documents of each workload")
    asks = parser.parse_args().asks
    sums = dict.fromkeys(MODES, (0, 0))
    print(f"| workload | {' | '.join(MODES)} |\n|---|---|---|---|")
    for name in workloads.WORKLOADS:
        row = []
        for mode in MODES:
            inside, total = held(name, mode, asks)
            sums[mode] = (sums[mode][0] + inside, sums[mode][1] + total)
            row.append(f"{100 * inside / total:.0f}")
        print(f"| {name} | {' | '.join(row)} |", flush=True)
    shares = (f"**{100 * inside / total:.0f}**" for inside, total in sums.values())
    print(f"| **all documents** | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
