"""Test vectors of the rule and of the order of service."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fairturn.clock import microseconds
from fairturn.model import Settings
from fairturn.scheduling.flows import Mode


@dataclass(frozen=True, slots=True)
class CheckVector:
    """One submission, and the count and priority that the rule assigns."""

    customer: str
    at: int
    count: int
    priority: int


class PriorityCase(NamedTuple):
    """Submissions under one variant of the rule."""

    name: str
    settings: Settings
    checks: tuple[CheckVector, ...]


class ArrivalVector(NamedTuple):
    """One line of a trace. `cost` is its duration in microseconds."""

    at: int
    customer: str
    cost: int
    weight: float | None


@dataclass(frozen=True, slots=True)
class ServiceVector:
    """The expected result for one line of a trace."""

    count: int
    priority: int
    started_at: int
    finished_at: int


class OrderCase(NamedTuple):
    """A trace, served in one mode by `workers` workers."""

    name: str
    mode: Mode
    workers: int
    arrivals: tuple[ArrivalVector, ...]
    served: tuple[ServiceVector, ...]


def read_priority_cases(path: Path) -> list[PriorityCase]:
    """Return the cases of a `priority.json`."""
    return [
        PriorityCase(
            case["name"],
            Settings(
                reset=case["config"]["reset"],
                reset_interval_s=case["config"]["reset_interval_s"],
            ),
            tuple(
                CheckVector(
                    step["customer"], microseconds(step["at"]), step["count"], step["priority"]
                )
                for step in case["steps"]
            ),
        )
        for case in json.loads(path.read_text("utf-8"))["cases"]
    ]


def read_order_cases(folder: Path) -> list[OrderCase]:
    """Return the cases of all `TRACE.MODE.workersN.jsonl` of a folder, with their `TRACE.csv`."""
    cases = []
    for answers in sorted(folder.glob("*.jsonl")):
        trace, mode, workers = answers.stem.split(".")
        cases.append(
            OrderCase(
                answers.stem,
                Mode(mode),
                int(workers.removeprefix("workers")),
                _read_arrivals(folder / f"{trace}.csv"),
                _read_served(answers),
            )
        )
    return cases


def _read_arrivals(path: Path) -> tuple[ArrivalVector, ...]:
    with path.open(newline="", encoding="utf-8") as lines:
        return tuple(
            ArrivalVector(
                microseconds(float(row["at_s"])),
                row["customer"],
                microseconds(float(row["cost_s"])),
                float(row["weight"]) if row.get("weight") else None,
            )
            for row in csv.DictReader(lines)
        )


def _read_served(path: Path) -> tuple[ServiceVector, ...]:
    return tuple(
        ServiceVector(
            line["count"],
            line["priority"],
            microseconds(line["started_at_s"]),
            microseconds(line["finished_at_s"]),
        )
        for line in map(json.loads, path.read_text("utf-8").splitlines())
    )
