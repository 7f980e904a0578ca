"""Results of several queues, measured in rounds: medians, spread, and ratios to a baseline."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.figures import Figure


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The results of one contestant, a value for each round."""

    name: str
    values: list[float]
    unit: str = "/s"
    ratios: list[float] = field(default_factory=list)  # to the baseline of the same round
    pooled: float | None = None  # over all rounds, instead of a median
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.pooled is None else self.pooled

    @property
    def shown(self) -> str:
        return f"{self.median:,.0f}/s" if self.unit == "/s" else f"{self.median:.2f} {self.unit}"

    @property
    def spread(self) -> str:
        form = ",.0f" if self.unit == "/s" else ".2f"
        return f"{min(self.values):{form}} to {max(self.values):{form}}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One measurement: the results of all contestants, and the bars."""

    title: str
    standings: Sequence[Standing]
    figures: Sequence[Figure]


def report(title: str, sections: Sequence[Section], *, as_json: bool) -> int:
    """Print the table, or a JSON line for each row; then name the rows that miss their bar."""
    if as_json:
        for section in sections:
            rows = [*map(asdict, section.standings), *map(asdict, section.figures)]
            for row in rows:
                print(json.dumps({"section": section.title, **row}))
    else:
        print(title)
        for section in sections:
            _show(section)
    short = [
        f"{section.title}: {figure.name}"
        for section in sections
        for figure in section.figures
        if figure.falls_short
    ]
    for name in short:
        print(f"falls short: {name}", file=sys.stderr)
    return 1 if short else 0


def _show(section: Section) -> None:
    print(f"\n{section.title:44}{'median':>13}  {'lowest to highest':>20}  of the bare")
    for one in section.standings:
        if not one.values:
            print(f"  {one.name:42}{'no figure':>13}  {one.note}")
            continue
        ratio = f"{statistics.median(one.ratios):11.2f}" if one.ratios else ""
        print(f"  {one.name:42}{one.shown:>13}  {one.spread:>20}  {ratio}".rstrip())
    for figure in section.figures:
        bar = ""
        if figure.bar is not None:
            bar = f"  bar: {'at most' if figure.at_most else 'at least'} {figure.bar:g}"
            bar += "  FALLS SHORT" if figure.falls_short else ""
        print(f"  → {figure.name}: {figure.value:,.2f}{bar}")
