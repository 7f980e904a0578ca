"""Every number in docs/fairness.md, recomputed from the fixed seed."""

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from benchmarks import fairness
from fairturn.priority import Reset, Rule
from fairturn.scheduling.outages import RESUME_US
from fairturn.simulator.comparison import Comparison, Discipline, GroupResult, compare
from fairturn.simulator.workloads import WORKLOADS

PAGE = (Path(__file__).parent.parent / "docs" / "fairness.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
TRACE = os.environ.get("FAIRTURN_TRACE")


@cache
def simulated(name: str) -> Comparison:
    return fairness.simulated(name)


def rows_on_the_page(name: str) -> list[str]:
    return [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]


def group(comparison: Comparison, mode: Discipline, name: str) -> GroupResult:
    (found,) = [of for of in comparison.of(mode).groups if of.name == name]
    return found


def p99_s(comparison: Comparison, mode: Discipline, name: str) -> float:
    return group(comparison, mode, name).waits.p99_us / 1_000_000


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_page_has_the_numbers_of_every_workload_and_its_bars_hold(name: str) -> None:
    comparison = simulated(name)

    assert rows_on_the_page(name) == [
        fairness.line(row)
        for rows in (
            fairness.wait_rows,
            fairness.bound_rows,
            fairness.turn_rows,
            fairness.flood_rows,
            fairness.outage_rows,
        )
        for row in rows(comparison)
    ]
    for bound in fairness.bounds(comparison):
        assert bound.holds, f"{name}: {bound}"
    held = bool(comparison.scenario.plan.outages)
    for result in comparison.results:
        assert bool(result.idle_us) is held, f"{name}: workers are idle in {result.mode}"


def test_beside_a_dump_quiet_customers_wait_at_least_500_times_shorter_than_with_levels() -> None:
    dump = simulated("dump")

    fair, levels = (p99_s(dump, mode, "quiet") for mode in (Discipline.FAIR, Discipline.LEVELS))

    assert len(dump.scenario.members(1)) == 1
    assert group(dump, Discipline.FAIR, "dump").waits.documents == 10_000
    assert levels >= 500 * fair
    assert f"wait {fair:.1f} s where the nine levels alone make them wait {levels:,.0f} s" in WORDS
    assert f"{levels / fair:,.0f} times as long" in WORDS


def test_the_dump_pays_little_for_it() -> None:
    dump = simulated("dump")

    fair, levels = (
        group(dump, mode, "dump").waits.mean_us for mode in (Discipline.FAIR, Discipline.LEVELS)
    )

    assert f"Its documents wait {fair / levels - 1:.0%} longer".replace("%", " %") in WORDS
    ends = {result.ends_at // 1_000_000 for result in dump.results}
    assert len(ends) == 1


@pytest.mark.parametrize("name", ["threes", "threes-overload"])
def test_turns_cost_those_who_send_three_and_help_those_who_send_one(name: str) -> None:
    comparison = simulated(name)

    for of, sign in (("threes", 1), ("ones", -1)):
        fair, fifo = (p99_s(comparison, mode, of) for mode in (Discipline.FAIR, Discipline.FIFO))
        assert sign * (fair - fifo) > 0
        assert f"{fair:.0f} s" in WORDS
        assert f"{fifo:.0f} s" in WORDS


@pytest.mark.parametrize(
    ("name", "of", "gains"),
    [
        ("heavy-known", "light", Discipline.EQUAL),
        ("many-names", "quiet", Discipline.EQUAL),
        ("newcomers", "regular", Discipline.EQUAL),
        ("every-20-minutes", "batches", Discipline.FAIR),
    ],
)
def test_what_levels_cost_and_gain_is_told(name: str, of: str, gains: Discipline) -> None:
    comparison = simulated(name)

    fair, equal = (p99_s(comparison, mode, of) for mode in (Discipline.FAIR, Discipline.EQUAL))

    assert (fair < equal) is (gains is Discipline.FAIR)
    for value in (fair, equal):
        assert f"{value:,.0f} s" in WORDS or f"{value:,.1f} s" in WORDS


@pytest.mark.parametrize(
    ("name", "of", "mode"),
    [
        ("newcomers", "regular", Discipline.FIFO),
        ("heavy-known", "light", Discipline.ROUND_ROBIN),
    ],
)
def test_where_another_order_is_named_the_number_is_its_own(
    name: str, of: str, mode: Discipline
) -> None:
    assert f"{p99_s(simulated(name), mode, of):,.0f} s" in WORDS


def test_patience_bounds_the_gap_that_a_stream_of_new_customers_makes() -> None:
    newcomers = simulated("newcomers")

    fair, levels = (
        group(newcomers, mode, "regular").gap_us or 0
        for mode in (Discipline.FAIR, Discipline.LEVELS)
    )

    assert 10 * fair < levels
    assert f"longest gap at {fair / 1_000_000:,.0f} s" in WORDS
    assert f"for {levels / 1_000_000:,.0f} s" in WORDS


@pytest.mark.parametrize("mode", [Discipline.FAIR, Discipline.EQUAL])
def test_a_flood_in_one_kind_delays_the_others_by_a_document_at_most(mode: Discipline) -> None:
    routed = simulated("routed")
    calm = compare(fairness.without(routed.scenario, fairness.FLOOD), [mode, Discipline.LEVELS])
    document_us = fairness.service_p99_us(routed.scenario)

    for name in ("text", "ocr", "export"):
        alone, beside = (group(of, mode, name).waits.p99_us for of in (calm, routed))
        assert beside <= alone + document_us, name
    text = [p99_s(of, Discipline.LEVELS, "text") for of in (calm, routed)]
    assert text[1] > 100 * text[0]
    assert f"p99 of {p99_s(routed, Discipline.FAIR, 'text'):.1f} s" in WORDS
    assert f"{text[1]:,.0f} s with the levels alone" in WORDS


@pytest.mark.parametrize("mode", [Discipline.FAIR, Discipline.EQUAL])
def test_no_document_dies_in_an_outage_of_half_an_hour(mode: Discipline) -> None:
    outage = simulated("outage")
    result = outage.of(mode)
    (down,), (passed,) = outage.scenario.plan.outages, result.outages

    assert down.back_at - down.at == 30 * 60 * 1_000_000
    scans = group(outage, mode, "scans").waits
    assert (scans.documents, scans.cancelled) == (10_000, 0)
    assert {each.all.dead for each in outage.results} == {0}
    # Before the hold, each of the four workers finds the service unavailable once. Then one probe
    # at a time, at intervals that grow to eight times the first.
    longest_us = 8 * down.retry_after_us
    assert passed.requests <= 4 + 10 + (down.back_at - down.at) // longest_us
    # A probe that fails at the last moment, an interval, a probe that succeeds, and the resumption.
    assert passed.recovery_us <= down.fails_after_us + longest_us + 3_000_000 + RESUME_US
    if mode is Discipline.FAIR:
        assert f"with {passed.requests} requests" in WORDS
        assert f"{passed.recovery_us / 1_000_000:.0f} s after its return" in WORDS
        assert f"p99 of {p99_s(outage, mode, 'texts'):.0f} s" in WORDS


@pytest.mark.skipif(TRACE is None, reason="FAIRTURN_TRACE names no trace")
def test_the_page_has_the_numbers_of_the_real_trace() -> None:
    assert TRACE is not None
    comparison = compare(fairness.trace_scenario(Path(TRACE)), fairness.MODES)

    assert rows_on_the_page("trace") == [
        fairness.line(row)
        for rows in (fairness.mean_rows, fairness.wait_rows, fairness.bound_rows)
        for row in rows(comparison)
    ]
    scenario = comparison.scenario
    load = sum(scenario.trace.cost) / (scenario.trace.at[-1] * scenario.plan.workers)
    assert load == pytest.approx(0.9, abs=0.01)
    for mode in (Discipline.FAIR, Discipline.EQUAL):
        waits = group(comparison, mode, "small").waits
        for us in (waits.mean_us, waits.p50_us, waits.p99_us):
            assert f"{us / 1_000_000:,.0f} s" in WORDS
    shares = Counter(comparison.priorities)
    for priority in (1, 9):
        share = shares[priority] / len(comparison.priorities)
        assert f"{share:.0%} ".replace("%", " %") + f"in level {priority}" in WORDS.replace(
            "are in", "in"
        )
    periodic = compare(scenario, [Discipline.FAIR], rule=Rule(reset=Reset.PERIODIC))
    mean_us = group(periodic, Discipline.FAIR, "small").waits.mean_us
    assert f"becomes {mean_us / 1_000_000:,.0f} s" in WORDS


def test_every_guarantee_of_the_page_has_an_argument() -> None:
    listed = PAGE.split("## The guarantees")[1].split("## What is compared")[0]

    guarantees = re.split(r"\n\d\. ", listed)[1:]
    assert len(guarantees) == 6
    assert all("*Why:*" in guarantee for guarantee in guarantees)
