"""Exponential backoff with jitter: the delay before a document is tried again (pure)."""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from fairturn.clock import microseconds
from fairturn.model import RETRY_US_MAX

SPREAD = 0.5  # jitter: up to half of the delay is added, so that failures do not come back together


class Delays(NamedTuple):
    """The delay after the first attempt, its growth factor, and its maximum.

    With the default of five attempts the delays are 20 s, 140 s, 980 s and 1 h: the last attempt
    begins 79 minutes after the first at the earliest, so that an outage of an hour kills nothing.
    """

    first_s: float = 20.0
    factor: float = 7.0
    most_s: float = 3_600.0


def check(delays: Delays) -> Delays:
    """Return the delays, or raise `ValueError`."""
    for name, value in delays._asdict().items():
        least = 1 if name == "factor" else 0
        if not isfinite(value) or value < least:
            raise ValueError(f"{name} is {value}; it must be a number of at least {least}")
    return delays


def delay_us(
    delays: Delays, attempt: int, random: Callable[[], float], after_s: float | None = None
) -> int:
    """The delay before the next attempt, in microseconds, after the attempt of this number.

    It is the larger of the backoff and a handler's own `after_s`, plus the jitter: `after_s` never
    shortens it. `random` returns numbers from 0 to 1.
    """
    # Above 2^64 the power alone would be too large for a float with some factors.
    floor_s = min(delays.most_s, delays.first_s * delays.factor ** min(attempt - 1, 64))
    if after_s is not None and isfinite(after_s):
        floor_s = max(floor_s, after_s)
    floor_us = microseconds(min(floor_s, RETRY_US_MAX / 1_000_000))
    return min(RETRY_US_MAX, floor_us + round(floor_us * SPREAD * random()))
