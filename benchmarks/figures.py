"""Figures with their bars: measured in turns, printed as a table; rows below their bar are
named."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table."""

    name: str
    value: float  # a ratio, unless the name has a unit
    bar: float | None
    ours: str
    theirs: str = ""
    at_most: bool = False

    @property
    def falls_short(self) -> bool:
        if self.bar is None:
            return False
        return self.value > self.bar if self.at_most else self.value < self.bar


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turns(
    rounds: int, first: Callable[[], object], second: Callable[[], object]
) -> tuple[float, float]:
    """Return the median seconds of two functions, called alternately."""
    times = [(seconds(first), seconds(second)) for _ in range(rounds)]
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def report(title: str, figures: Sequence[Figure], *, as_json: bool) -> int:
    """Print the table, or a JSON line for each row; then name the rows that miss their bar."""
    if as_json:
        for figure in figures:
            print(json.dumps(asdict(figure)))
    else:
        print(title)
        show(figures)
    short = [figure.name for figure in figures if figure.falls_short]
    for name in short:
        print(f"falls short: {name}", file=sys.stderr)
    return 1 if short else 0


def show(figures: Sequence[Figure]) -> None:
    width = max(len(figure.name) for figure in figures)
    print(f"{'':{width}}  {'ours':>12}  {'yardstick':>12}  {'':>6}  bar")
    for figure in figures:
        bar = ""
        if figure.bar is not None:
            bar = f"{'at most' if figure.at_most else 'at least'} {figure.bar:g}"
            bar += "  FALLS SHORT" if figure.falls_short else ""
        print(
            f"{figure.name:{width}}  {figure.ours:>12}  {figure.theirs:>12}"
            f"  {figure.value:6.2f}  {bar}"
        )
