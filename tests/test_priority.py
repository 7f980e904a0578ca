"""The priority rule: the vectors, the table, and rejected settings."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.model import Settings
from fairturn.priority import BOUNDS, LEVELS, Count, Reset, Rule
from tests.reference import Reference

VECTORS = json.loads((Path(__file__).parent / "vectors" / "priority.json").read_text("utf-8"))
INTERVAL = 1_500_000_000

# The first and last count of each level, and the corresponding documents of an upload.
TABLE = [
    (1, 0, -2, 1, 3),
    (2, -3, -4, 4, 5),
    (3, -5, -6, 6, 7),
    (4, -7, -8, 8, 9),
    (5, -9, -10, 10, 11),
    (6, -11, -12, 12, 13),
    (7, -13, -14, 14, 15),
    (8, -15, -20, 16, 21),
    (9, -21, -1_000_000, 22, 1_000_001),
]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_every_check_of_the_vectors_has_exactly_their_answer(case: dict[str, Any]) -> None:
    rule = Rule(
        reset=Reset(case["config"]["reset"]),
        reset_interval_us=round(case["config"]["reset_interval_s"] * 1_000_000),
    )
    counts: dict[str, Count] = {}

    answers = []
    for step in case["steps"]:
        name = step["customer"]
        counts[name] = rule.check(counts.get(name), round(step["at"] * 1_000_000))
        count = counts[name].value
        answers.append({**step, "count": count, "priority": rule.priority(count)})

    assert answers == case["steps"]


def test_the_vectors_are_all_there() -> None:
    assert len(VECTORS["cases"]) == 12
    assert sum(len(case["steps"]) for case in VECTORS["cases"]) == 983


def test_the_defaults_are_those_of_the_published_description() -> None:
    described = Rule(
        bounds=(-2, -4, -6, -8, -10, -12, -14, -20), reset_interval_us=INTERVAL, reset=Reset.IDLE
    )

    assert Rule() == described
    assert Settings().rule == described


@pytest.mark.parametrize(("level", "first", "last", "first_of_burst", "last_of_burst"), TABLE)
def test_a_level_begins_and_ends_where_the_table_says(
    level: int, first: int, last: int, first_of_burst: int, last_of_burst: int
) -> None:
    rule = Rule()

    assert [rule.priority(first), rule.priority(last)] == [level, level]
    assert [1 - first, 1 - last] == [first_of_burst, last_of_burst]
    if level > 1:
        assert rule.priority(first + 1) == level - 1


def test_the_first_document_of_a_customer_has_count_0_and_priority_1() -> None:
    assert Rule().check(None, 77) == Count(0, 77)
    assert Rule().priority(0) == 1


@pytest.mark.parametrize("reset", list(Reset))
def test_exactly_the_interval_is_not_more_than_the_interval(reset: Reset) -> None:
    rule = Rule(reset=reset)
    last = Count(-4, 1_000)

    assert rule.check(last, 1_000 + INTERVAL).value == -5
    assert rule.check(last, 1_000 + INTERVAL + 1) == Count(0, 1_000 + INTERVAL + 1)


def test_a_steady_customer_is_reset_only_by_the_periodic_reading() -> None:
    last_idle = last_periodic = Count(0, 0)

    for minute in range(0, 60, 10):
        now = minute * 60_000_000
        last_idle = Rule(reset=Reset.IDLE).check(last_idle, now)
        last_periodic = Rule(reset=Reset.PERIODIC).check(last_periodic, now)

    assert last_idle.value == -6
    assert last_periodic.value == -2  # reset at 30 minutes; 40 and 50 followed


@pytest.mark.parametrize("reset", list(Reset))
def test_a_clock_that_steps_back_never_moves_the_last_update_back(reset: Reset) -> None:
    assert Rule(reset=reset).check(Count(-1, 5_000), 1) == Count(-2, 5_000)


@pytest.mark.parametrize("reset", list(Reset))
def test_the_count_that_is_shown_is_the_one_the_next_document_goes_down_from(reset: Reset) -> None:
    rule = Rule(reset=reset)
    last = Count(-9, 1_000)
    end = rule.resets_at(last)

    assert rule.shown(None, 0) == 0
    assert [rule.shown(last, 1_000), rule.shown(last, end), rule.shown(last, end + 1)] == [
        -9,
        -9,
        0,
    ]
    assert [rule.check(last, end).value, rule.check(last, end + 1).value] == [-10, 0]


steps_us = st.sampled_from([0, 1, 60_000_000, INTERVAL - 1, INTERVAL, INTERVAL + 1, -1, -INTERVAL])
bounds_of_any_kind = st.sets(st.integers(-40, 0), min_size=LEVELS - 1, max_size=LEVELS - 1).map(
    lambda chosen: tuple(sorted(chosen, reverse=True))
)


@given(
    checks=st.lists(st.tuples(st.integers(0, 2), steps_us), max_size=80),
    bounds=st.just(BOUNDS) | bounds_of_any_kind,
    reset=st.sampled_from(Reset),
    interval_us=st.sampled_from([1, 60_000_000, INTERVAL]),
)
def test_the_rule_agrees_with_the_reference_on_any_sequence_of_checks(
    checks: list[tuple[int, int]], bounds: tuple[int, ...], reset: Reset, interval_us: int
) -> None:
    rule = Rule(bounds=bounds, reset=reset, reset_interval_us=interval_us)
    reference = Reference(bounds=bounds, reset=reset.value, reset_interval_us=interval_us)
    counts: dict[int, Count] = {}
    now = 10 * INTERVAL

    for customer, step in checks:
        now += step
        counts[customer] = rule.check(counts.get(customer), now)
        found = (counts[customer].value, rule.priority(counts[customer].value))
        assert found == reference.check(customer, now)


@given(
    last=st.none() | st.builds(Count, st.integers(-30, 0), st.integers(0, 3 * INTERVAL)),
    now=st.integers(0, 5 * INTERVAL),
    n=st.integers(1, 30),
    reset=st.sampled_from(Reset),
)
def test_a_burst_is_that_many_checks_one_after_the_other(
    last: Count | None, now: int, n: int, reset: Reset
) -> None:
    rule = Rule(reset=reset)
    counts: list[int] = []
    one_by_one = last
    for _ in range(n):
        one_by_one = rule.check(one_by_one, now)
        counts.append(one_by_one.value)

    found, after = rule.burst(last, now, n)

    assert (list(found), after) == (counts, one_by_one)


def test_a_lower_count_never_has_a_better_priority() -> None:
    priorities = [Rule().priority(-n) for n in range(1_000)]

    assert priorities == sorted(priorities)
    assert set(priorities) == set(range(1, LEVELS + 1))


@pytest.mark.parametrize(
    "bounds",
    [
        (-2, -4, -6, -8, -10, -12, -14),
        (-2, -4, -6, -8, -10, -12, -14, -20, -30),
        (),
        (-2, -4, -6, -8, -10, -12, -14, -14),
        (-2, -4, -6, -8, -10, -12, -20, -14),
        (-20, -14, -12, -10, -8, -6, -4, -2),
    ],
)
def test_bounds_that_are_not_eight_falling_numbers_are_refused_by_name(
    bounds: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match="bounds") as refused:
        Rule(bounds=bounds)
    assert str(list(bounds)) in str(refused.value)


@pytest.mark.parametrize("interval_s", [0, -1, -1_500])
def test_an_interval_that_is_not_positive_is_refused_by_name(interval_s: int) -> None:
    with pytest.raises(ValueError, match=f"reset_interval_s is {interval_s};"):
        Rule(reset_interval_us=interval_s * 1_000_000)
    with pytest.raises(ValueError, match=f"reset_interval_s is {interval_s};"):
        Settings(reset_interval_s=interval_s)


def test_a_reading_of_the_reset_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="reset is 'weekly'; it must be one of: idle, periodic"):
        Settings(reset="weekly")  # type: ignore[arg-type]


def test_the_settings_of_a_queue_reach_its_rule() -> None:
    settings = Settings(
        bounds=(0, -1, -2, -3, -4, -5, -6, -7), reset=Reset.PERIODIC, reset_interval_s=0.5
    )

    assert settings.rule == Rule(
        bounds=(0, -1, -2, -3, -4, -5, -6, -7), reset=Reset.PERIODIC, reset_interval_us=500_000
    )
    assert [settings.rule.priority(-count) for count in range(10)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
