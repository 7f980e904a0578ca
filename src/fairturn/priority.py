"""The priority rule: a count per customer, and nine levels. No I/O.

A customer's count starts at 0 and decreases by one with each document. It is reset to 0 by the
first document submitted more than the reset interval after the last update. The count determines
the document's priority: 1 is served first, 9 last.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

LEVELS = 9
BOUNDS = (-2, -4, -6, -8, -10, -12, -14, -20)
# An update from the future, because the clock was set back, counts as just now. Further ahead than
# this, it resets the count, which would otherwise stay until the clock catches up.
CLOCK_AHEAD_US_MAX = 24 * 3_600 * 1_000_000
RESET_INTERVAL_US = 1_500_000_000


class Reset(StrEnum):
    """The start of the reset interval."""

    IDLE = "idle"  # the last document: only a customer that pauses is reset
    PERIODIC = "periodic"  # the last reset: a busy customer is reset too


class Count(NamedTuple):
    """A customer's pending documents count and the time of its last update."""

    value: int
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule with its settings; the defaults are the published ones."""

    bounds: tuple[int, ...] = BOUNDS
    reset_interval_us: int = RESET_INTERVAL_US
    reset: Reset = Reset.IDLE
    _depths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        object.__setattr__(self, "reset", Reset(self.reset))
        if len(self.bounds) != LEVELS - 1:
            raise ValueError(
                f"bounds is {list(self.bounds)}, {len(self.bounds)} numbers; "
                f"it must have {LEVELS - 1}, for {LEVELS} levels"
            )
        if any(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"bounds is {list(self.bounds)}; it must be strictly decreasing")
        if self.reset_interval_us <= 0:
            raise ValueError(
                f"reset_interval_s is {self.reset_interval_us / 1_000_000:g}; it must be positive"
            )
        object.__setattr__(self, "_depths", tuple(-bound for bound in self.bounds))

    def check(self, last: Count | None, now: int) -> Count:
        """Return the count after one more document at `now`."""
        if last is None or self._is_over(last, now):
            return Count(0, now)
        if self.reset is Reset.PERIODIC or now < last.updated_at:
            return Count(last.value - 1, last.updated_at)
        return Count(last.value - 1, now)

    def burst(self, last: Count | None, now: int, n: int) -> tuple[range, Count]:
        """Return the counts of `n` documents submitted at `now`, and the count after them. Only the
        first can be a reset; each further one decreases the count by one."""
        first, updated_at = self.check(last, now)
        return range(first, first - n, -1), Count(first - n + 1, updated_at)

    def priority(self, count: int) -> int:
        """Return the priority for a count, 1 to 9."""
        return bisect_left(self._depths, -count) + 1

    def shown(self, last: Count | None, now: int) -> int:
        """Return a customer's count to show at `now`: 0 once the interval has passed."""
        return 0 if last is None or self._is_over(last, now) else last.value

    def _is_over(self, last: Count, now: int) -> bool:
        since = now - last.updated_at
        return since > self.reset_interval_us or -since > CLOCK_AHEAD_US_MAX

    def resets_at(self, last: Count) -> int:
        """Return the last time at which the count holds; after it, the count is 0."""
        return last.updated_at + self.reset_interval_us
