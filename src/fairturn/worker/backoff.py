"""Exponential backoff with jitter: before a retry, and while the store does not answer (pure)."""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from fairturn.clock import microseconds
from fairturn.model import RETRY_US_MAX

PAUSE_S, PAUSE_S_MAX = 0.05, 5.0  # between calls of a store that does not answer
SPREAD = 0.5  # jitter: up to half of the delay is added, so that retries spread out


class Backoff(NamedTuple):
    """The delay after the first attempt, its growth factor, and its maximum.

    With the default of five attempts the delays are 20 s, 140 s, 980 s and 1 h. The last attempt
    begins at least 79 minutes after the first, so that an outage of an hour makes no document dead.
    """

    first_s: float = 20.0
    factor: float = 7.0
    most_s: float = 3_600.0


def check(backoff: Backoff) -> Backoff:
    """Return the backoff; raise `ValueError` if a value is out of range."""
    for name, value in backoff._asdict().items():
        least = 1 if name == "factor" else 0
        if not isfinite(value) or value < least:
            raise ValueError(f"{name} is {value}; it must be a number of at least {least}")
    return backoff


def delay_us(
    backoff: Backoff, attempt: int, random: Callable[[], float], after_s: float | None = None
) -> int:
    """Return the delay after attempt number `attempt`, in microseconds: the larger of the backoff
    and `after_s`, plus jitter. `random` returns numbers from 0 to 1."""
    # A larger exponent could overflow a float.
    floor_s = min(backoff.most_s, backoff.first_s * backoff.factor ** min(attempt - 1, 64))
    if after_s is not None and isfinite(after_s):
        floor_s = max(floor_s, after_s)
    floor_us = microseconds(min(floor_s, RETRY_US_MAX / 1_000_000))
    return min(RETRY_US_MAX, floor_us + round(floor_us * SPREAD * random()))


class Outage:
    """When the store failed first, and when it is called again."""

    def __init__(self, random: Callable[[], float]) -> None:
        self.until_s = 0.0  # no calls before this
        self._random = random
        self._pause_s = 0.0
        self._since_s: float | None = None
        self._last_s = 0.0  # the last failure

    def go_on(self, now_s: float) -> float:
        """Record a failure; return the pause before the next call."""
        if self._since_s is None:
            self._since_s = now_s
        self._last_s = now_s
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S, self._pause_s * 2))
        pause_s = self._pause_s * (1 + self._random() / 2)
        self.until_s = now_s + pause_s
        return pause_s

    def end(self, now_s: float, begun_s: float) -> float | None:
        """Record the success of a call; return how long the outage lasted if this ends one.

        A call that began before the last failure ends none.
        """
        if self._since_s is None or begun_s < self._last_s:
            return None
        away_s, self._since_s, self._pause_s = now_s - self._since_s, None, 0.0
        return away_s
