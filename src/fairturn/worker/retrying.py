"""How long a document waits before it is tried again: growing delays, spread out (pure)."""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from fairturn.clock import microseconds
from fairturn.model import RETRY_US_MAX

SPREAD = 0.5  # of the delay, added to it at random, so that what failed together comes back apart


class Delays(NamedTuple):
    """The delay after the first attempt, by how much it grows with each, and where it stops."""

    first_s: float = 5.0
    factor: float = 2.0
    most_s: float = 3_600.0


def check(delays: Delays) -> Delays:
    """Refuse delays that are none."""
    for name, value in delays._asdict().items():
        least = 1 if name == "factor" else 0
        if not isfinite(value) or value < least:
            raise ValueError(f"{name} is {value}; it must be a number of at least {least}")
    return delays


def delay_us(
    delays: Delays, attempt: int, random: Callable[[], float], after_s: float | None = None
) -> int:
    """When to try again, in microseconds from now, after the attempt of this number.

    A handler's own `after_s` takes the place of the growing delay. Either is the least there will
    be: the spread comes on top. `random` gives numbers from 0 to 1.
    """
    if after_s is None or not isfinite(after_s):
        # Above 2^64 the power alone would be too large for a float with some factors.
        floor_s = min(delays.most_s, delays.first_s * delays.factor ** min(attempt - 1, 64))
    else:
        floor_s = max(0.0, after_s)
    floor_us = microseconds(min(floor_s, RETRY_US_MAX / 1_000_000))
    return min(RETRY_US_MAX, floor_us + round(floor_us * SPREAD * random()))
