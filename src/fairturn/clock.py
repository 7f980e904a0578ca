"""The only module that reads the time.

A timestamp is an integer: microseconds since 1970-01-01 UTC. Naive datetimes are rejected.
"""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

SECOND_US = 1_000_000
TIMESTAMP_MAX = 1 << 62  # far beyond the year 9999
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The current time on a PostgreSQL server. Not now(), which is the start of the transaction: the
# transaction may have waited for a lock since.
SERVER_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
NO_BOOT = "wall"  # the boot id where the system provides none
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Uptime(NamedTuple):
    """A reading of a monotonic clock. Comparable only within one boot."""

    boot: str
    at: int


class Clock(Protocol):
    """The source of time that code with a notion of time is given."""

    def now(self) -> int:
        """Return the wall-clock time in microseconds since 1970 UTC. It may step either way."""
        ...

    def uptime(self) -> Uptime:
        """Return the time since boot, for leases on one host. It includes sleep and never steps."""
        ...


class SystemClock:
    """The clock of this machine."""

    def __init__(self) -> None:
        # Without a boot id (not Linux), leases follow the wall clock. After a restart of the
        # machine they are still valid for at most their length, which is safe.
        self._boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""

    def now(self) -> int:
        return time.time_ns() // 1000

    def uptime(self) -> Uptime:
        if self._boot:
            return Uptime(self._boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000)
        return Uptime(NO_BOOT, self.now())


class ManualClock:
    """A clock that moves only when it is advanced or set, for tests and simulation."""

    def __init__(self, at: int = 0, *, boot: str = "boot-1") -> None:
        self._now = at
        self._uptime = Uptime(boot, 0)

    def now(self) -> int:
        return self._now

    def uptime(self) -> Uptime:
        return self._uptime

    def advance(self, seconds: float) -> None:
        """Advance the wall clock and the uptime."""
        by = round(seconds * SECOND_US)
        self._now += by
        self._uptime = Uptime(self._uptime.boot, self._uptime.at + by)

    def step(self, seconds: float) -> None:
        """Step the wall clock as NTP does; the uptime does not change."""
        self._now += round(seconds * SECOND_US)

    def set(self, at: int) -> None:
        """Set the wall clock to a timestamp; the uptime does not change."""
        self._now = at

    def reboot(self, boot: str) -> None:
        """Simulate a restart of the machine: a new boot id, and an uptime of 0."""
        self._uptime = Uptime(boot, 0)


# Seconds on a monotonic clock, for timeouts and measurements within one process.
stopwatch = time.monotonic


def microseconds(seconds: float) -> int:
    """Return a duration in seconds as whole microseconds."""
    return round(seconds * SECOND_US)


def from_datetime(value: datetime) -> int:
    """Return an aware datetime as a timestamp; raise `TypeError` for a naive one."""
    if value.tzinfo is None or value.utcoffset() is None:
        raise TypeError(
            f"{value!r} has no time zone; pass an aware datetime, such as datetime.now(UTC)"
        )
    return (value - _EPOCH) // timedelta(microseconds=1)


def as_timestamp(value: datetime | int, what: str) -> int:
    """Convert an argument, either an aware datetime or microseconds since 1970 UTC, to
    microseconds. Errors name it `what`."""
    if isinstance(value, datetime):
        return from_datetime(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{what} is {value!r}; it must be an aware datetime, or microseconds since 1970 UTC"
        )
    if not -TIMESTAMP_MAX < value < TIMESTAMP_MAX:
        raise ValueError(f"{what} is {value}; it must be between -2^62 and 2^62 microseconds")
    return value


def to_datetime(timestamp: int) -> datetime:
    """Return a timestamp as an aware datetime in UTC."""
    return _EPOCH + timedelta(microseconds=timestamp)


def datetime_or_none(timestamp: int | None) -> datetime | None:
    """Return a timestamp as an aware datetime in UTC; None for None."""
    return None if timestamp is None else to_datetime(timestamp)
