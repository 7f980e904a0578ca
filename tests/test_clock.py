"""Moments, and clocks."""

from datetime import UTC, datetime, timedelta, timezone, tzinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.clock import (
    ManualClock,
    SystemClock,
    Uptime,
    from_datetime,
    microseconds,
    stopwatch,
    to_datetime,
)

zones = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.integers(-(10**16), 10**17))
def test_a_moment_survives_the_way_to_a_datetime_and_back(moment: int) -> None:
    assert from_datetime(to_datetime(moment)) == moment
    assert to_datetime(moment).tzinfo is UTC


@given(
    st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(2200, 1, 1), timezones=zones)
)
def test_a_datetime_of_any_zone_is_the_same_moment(moment: datetime) -> None:
    assert from_datetime(moment) == from_datetime(moment.astimezone(UTC))
    assert to_datetime(from_datetime(moment)) == moment


def test_moments_count_microseconds_since_1970() -> None:
    assert from_datetime(datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))) == 0
    assert from_datetime(datetime(2024, 2, 29, 12, 0, 0, 1, tzinfo=UTC)) == 1_709_208_000_000_001
    assert from_datetime(datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)) == -1


class NoOffset(tzinfo):
    """A time zone without an offset from UTC."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None

    def dst(self, moment: datetime | None) -> None:
        return None

    def tzname(self, moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize("zone", [None, NoOffset()])
def test_a_datetime_without_a_zone_is_refused(zone: tzinfo | None) -> None:
    with pytest.raises(TypeError, match="has no time zone"):
        from_datetime(datetime(2024, 1, 1, tzinfo=zone))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 0), (1500, 1_500_000_000), (0.1, 100_000), (1e-6, 1), (4e-7, 0), (-2.5, -2_500_000)],
)
def test_a_duration_is_rounded_to_whole_microseconds(seconds: float, expected: int) -> None:
    assert microseconds(seconds) == expected


def test_the_clock_of_the_machine_tells_the_time_and_its_uptime_runs_forwards() -> None:
    clock = SystemClock()
    before, first = datetime.now(UTC), clock.uptime()

    now = clock.now()

    after, second = datetime.now(UTC), clock.uptime()
    assert from_datetime(before) <= now <= from_datetime(after)
    assert first.boot == second.boot != ""
    assert first.at <= second.at


def test_two_clocks_of_one_machine_are_of_the_same_boot() -> None:
    assert SystemClock().uptime().boot == SystemClock().uptime().boot


def test_a_stopwatch_never_runs_back() -> None:
    assert stopwatch() <= stopwatch()


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(5)

    assert [clock.now(), clock.now()] == [5, 5]
    assert clock.uptime() == clock.uptime() == Uptime("boot-1", 0)


def test_time_that_passes_moves_the_wall_clock_and_the_uptime() -> None:
    clock = ManualClock(5)

    clock.advance(1.5)

    assert (clock.now(), clock.uptime().at) == (1_500_005, 1_500_000)


def test_a_step_of_the_wall_clock_does_not_move_the_uptime() -> None:
    clock = ManualClock(5_000_000)
    clock.advance(1)

    clock.step(-3)
    stepped = clock.now()
    clock.set(42)

    assert (stepped, clock.now()) == (3_000_000, 42)
    assert clock.uptime() == Uptime("boot-1", 1_000_000)


def test_a_reboot_begins_another_uptime() -> None:
    clock = ManualClock(5)
    clock.advance(1)

    clock.reboot("boot-2")

    assert clock.uptime() == Uptime("boot-2", 0)
    assert clock.now() == 1_000_005
