"""The priority rule: a count that goes down with each document, and nine levels. Pure.

A customer's count starts at 0, goes down by one with each document, and is 0 again for the first
document that comes more than the reset interval after the last update. The document's priority
follows from the count: 1 is served first, 9 last.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

LEVELS = 9
BOUNDS = (-2, -4, -6, -8, -10, -12, -14, -20)
# A clock that is set back counts as no time passed; further back than this, as a new beginning.
CLOCK_AHEAD_US_MAX = 24 * 3_600 * 1_000_000
RESET_INTERVAL_US = 1_500_000_000


class Reset(StrEnum):
    """What the reset interval runs from."""

    IDLE = "idle"  # from the last document: only a customer who pauses is reset
    PERIODIC = "periodic"  # from the last reset: a busy customer is reset as well


class Count(NamedTuple):
    """A customer's pending documents count and the moment of its last update."""

    value: int
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule with its settings; the defaults are those of the texts."""

    bounds: tuple[int, ...] = BOUNDS
    reset_interval_us: int = RESET_INTERVAL_US
    reset: Reset = Reset.IDLE
    _depths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        object.__setattr__(self, "reset", Reset(self.reset))
        if len(self.bounds) != LEVELS - 1:
            raise ValueError(
                f"bounds {list(self.bounds)} has {len(self.bounds)} numbers; "
                f"{LEVELS - 1} are needed for {LEVELS} levels"
            )
        if any(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"bounds {list(self.bounds)} must fall strictly from first to last")
        if self.reset_interval_us <= 0:
            raise ValueError(
                f"reset_interval_s is {self.reset_interval_us / 1_000_000:g}; it must be positive"
            )
        object.__setattr__(self, "_depths", tuple(-bound for bound in self.bounds))

    def check(self, last: Count | None, now: int) -> Count:
        """The count after one more document at `now`."""
        if last is None or self._is_over(last, now):
            return Count(0, now)
        if self.reset is Reset.PERIODIC or now < last.updated_at:
            return Count(last.value - 1, last.updated_at)
        return Count(last.value - 1, now)

    def burst(self, last: Count | None, now: int, n: int) -> tuple[range, Count]:
        """The counts that `n` documents at one moment find, one check each, and the count after
        them: only the first can be a reset, and each of the others goes down by one."""
        first, updated_at = self.check(last, now)
        return range(first, first - n, -1), Count(first - n + 1, updated_at)

    def priority(self, count: int) -> int:
        """The level of a document that found this count: 1 to 9."""
        return bisect_left(self._depths, -count) + 1

    def shown(self, last: Count | None, now: int) -> int:
        """The count to show for a customer at `now`: 0 once the interval has passed."""
        return 0 if last is None or self._is_over(last, now) else last.value

    def _is_over(self, last: Count, now: int) -> bool:
        """Whether the interval has passed; or the last update lies so far ahead that the clock must
        have been wrong then, and would otherwise keep the count from ever being reset."""
        since = now - last.updated_at
        return since > self.reset_interval_us or -since > CLOCK_AHEAD_US_MAX

    def resets_at(self, last: Count) -> int:
        """The last moment at which a document still finds this count; after it, the count is 0."""
        return last.updated_at + self.reset_interval_us
