"""The handlers of the benchmarks."""

import time
from typing import Any


def nothing(document: Any) -> None:
    """Do nothing: the time that remains is the overhead of the queue."""


def nap(document: Any) -> None:
    """Sleep for 50 ms."""
    time.sleep(0.05)


def short_nap(document: Any) -> None:
    """Sleep for 20 ms."""
    time.sleep(0.02)


def now(document: Any) -> float:
    """Return when it started, on the monotonic clock that all processes share."""
    return time.monotonic()
