"""What the workers of the benchmarks do with a document."""

import time
from typing import Any


def nothing(document: Any) -> None:
    """No work at all: what is left is what the queue costs."""


def nap(document: Any) -> None:
    """50 ms in which the processor is free."""
    time.sleep(0.05)


def short_nap(document: Any) -> None:
    """20 ms in which the processor is free."""
    time.sleep(0.02)


def now(document: Any) -> float:
    """When it started, on the clock that all processes of a machine share."""
    return time.monotonic()
