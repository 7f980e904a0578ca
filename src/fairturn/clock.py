"""The only module that reads the time.

A moment is an integer of microseconds since 1970-01-01 UTC, so that 1500 s means
1,500,000,000 everywhere. A naive datetime has no meaning here and is refused.
"""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

SECOND_US = 1_000_000
MOMENT_MAX = 1 << 62  # far beyond the year 9999
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The moment on the clock of a PostgreSQL server, read when it is evaluated: not when the
# transaction began, which may have waited for a lock since.
SERVER_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
NO_BOOT = "wall"  # where nothing tells one boot from another
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Uptime(NamedTuple):
    """Time that no step of the wall clock can move; it compares only within one boot."""

    boot: str
    at: int


class Clock(Protocol):
    """Where the time comes from. Everything that needs it is handed one."""

    def now(self) -> int:
        """The moment, in microseconds since 1970 UTC. It may step, forwards or back."""
        ...

    def uptime(self) -> Uptime:
        """For leases on one host: runs on during sleep, never steps."""
        ...


class SystemClock:
    """The clock of this machine."""

    def __init__(self) -> None:
        # Without a boot id and a boot clock (not Linux) leases follow the wall clock: they then
        # outlive a restart of the machine by at most their length, which is the safe side.
        self._boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""

    def now(self) -> int:
        return time.time_ns() // 1000

    def uptime(self) -> Uptime:
        if self._boot:
            return Uptime(self._boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000)
        return Uptime(NO_BOOT, self.now())


class ManualClock:
    """A clock that stands still until it is moved: for tests and simulation."""

    def __init__(self, at: int = 0, *, boot: str = "boot-1") -> None:
        self._now = at
        self._uptime = Uptime(boot, 0)

    def now(self) -> int:
        return self._now

    def uptime(self) -> Uptime:
        return self._uptime

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        by = round(seconds * SECOND_US)
        self._now += by
        self._uptime = Uptime(self._uptime.boot, self._uptime.at + by)

    def step(self, seconds: float) -> None:
        """Step the wall clock, as an administrator or NTP does, while no time passes."""
        self._now += round(seconds * SECOND_US)

    def set(self, at: int) -> None:
        """Put the wall clock to a moment, while no time passes."""
        self._now = at

    def reboot(self, boot: str) -> None:
        """Restart the machine: another boot id, and the uptime starts at nothing."""
        self._uptime = Uptime(boot, 0)


# Seconds on a clock that only runs forwards, for waiting and measuring inside one process.
stopwatch = time.monotonic


def microseconds(seconds: float) -> int:
    """A duration in seconds as whole microseconds."""
    return round(seconds * SECOND_US)


def from_datetime(moment: datetime) -> int:
    """An aware datetime as a moment. A naive one is refused: it says no place on earth."""
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise TypeError(
            f"{moment!r} has no time zone; pass an aware datetime, such as datetime.now(UTC)"
        )
    return (moment - _EPOCH) // timedelta(microseconds=1)


def as_moment(value: datetime | int, what: str) -> int:
    """A moment that somebody handed in as an aware datetime or as a moment; `what` names it."""
    if isinstance(value, datetime):
        return from_datetime(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{what} is {value!r}; it must be an aware datetime, or microseconds since 1970 UTC"
        )
    if not -MOMENT_MAX < value < MOMENT_MAX:
        raise ValueError(f"{what} is {value}; that is more microseconds than a store can hold")
    return value


def to_datetime(moment: int) -> datetime:
    """A moment as an aware datetime in UTC."""
    return _EPOCH + timedelta(microseconds=moment)
