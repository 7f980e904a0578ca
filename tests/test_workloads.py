"""The named workloads: reproducible from the seed, and as their sentences describe."""

from collections import Counter

import pytest

from fairturn.priority import Rule
from fairturn.scheduling.flows import Costs
from fairturn.simulator import workloads
from fairturn.simulator.plan import Outage, Plan
from fairturn.simulator.replay import check_all
from fairturn.simulator.scenario import Scenario, scenario_of
from fairturn.simulator.workloads import WORKLOADS
from tests.test_simulator import SECOND, trace_of


def rows_of(made: Scenario) -> list[tuple[int, int, int]]:
    return list(zip(made.trace.at, made.trace.customer, made.trace.cost, strict=True))


def documents_of(made: Scenario) -> dict[str, int]:
    sent = Counter(made.trace.customer)
    return {
        group: sum(sent[customer] for customer in made.members(number))
        for number, group in enumerate(made.groups)
    }


def load_of(made: Scenario) -> float:
    return sum(made.trace.cost) / (made.plan.workers * made.trace.at[-1])


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_from_the_same_seed_and_another_from_another(name: str) -> None:
    first, second, other = (workloads.make(name, seed) for seed in (1, 1, 2))

    assert rows_of(first) == rows_of(second)
    assert first.plan == second.plan
    assert rows_of(first) != rows_of(other)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_in_order_and_every_customer_of_it_sends_something(name: str) -> None:
    made = workloads.make(name)

    assert made.name == name
    assert list(made.trace.at) == sorted(made.trace.at)
    assert set(made.trace.customer) == set(range(len(made.trace.names)))
    assert len(made.group_of) == len(made.trace.names)
    assert set(made.group_of) == set(range(len(made.groups)))


def test_quiet_customers_sink_to_the_last_level_although_they_send_little() -> None:
    made = workloads.make("dump")
    priorities = check_all(made.trace, Rule())[1]

    assert documents_of(made)["dump"] == 10_000
    last = {customer: priorities[n] for n, customer in enumerate(made.trace.customer)}
    assert {last[customer] for customer in made.members(0)} == {9}


def test_customers_of_every_20_minutes_never_pause_long_enough_for_a_reset() -> None:
    made = workloads.make("every-20-minutes")
    counts = check_all(made.trace, Rule())[0]

    last = {customer: counts[n] for n, customer in enumerate(made.trace.customer)}
    assert {last[customer] for customer in made.members(0)} == {-35}


def test_one_small_customer_in_ten_sends_three_at_about_the_load_that_is_named() -> None:
    made = workloads.make("threes")

    documents = documents_of(made)
    customers = Counter(made.group_of)
    assert documents["threes"] == 3 * customers[1]
    assert customers[1] / customers[0] == pytest.approx(1 / 9, rel=0.1)
    assert load_of(made) == pytest.approx(0.9, rel=0.001)


def test_the_other_workloads_have_what_they_are_named_after() -> None:
    made = {name: workloads.make(name) for name in WORKLOADS}

    assert documents_of(made["two-dumps"]) == {"late": 60, "dumps": 6_000}
    assert len(made["many-names"].members(1)) == 100
    assert load_of(made["newcomers"]) > 1
    assert load_of(made["threes-overload"]) > 1
    assert rows_of(made["heavy-known"]) == rows_of(made["heavy-unknown"])
    assert made["heavy-known"].costs is Costs.KNOWN
    assert made["heavy-unknown"].costs is Costs.LEARNED
    assert len(made["mass-cancel"].plan.cancels) == 2_000
    assert sorted(made["weights"].trace.weight.values()) == [1_000, 2_000, 4_000]
    assert len(made["retry-storm"].plan.failures) == 1_500
    assert [loss.workers for loss in made["lost-workers"].plan.losses] == [5]


def test_the_kinds_of_routed_need_their_own_workers_and_more() -> None:
    made = workloads.make("routed")
    trace = made.trace

    assert list(trace.kind_names) == ["text", "ocr", "export"]
    assert made.plan.workers_for == ((0, 1), (1, 1), (2, 1))
    work = Counter[str]()
    for n, customer in enumerate(trace.customer):
        work[made.groups[made.group_of[customer]]] += trace.cost[n]
        kind = trace.kind_names[trace.kind_of(n)]
        assert made.groups[made.group_of[customer]] in (kind, "flood")
    loads = {group: of / (2 * 3_600 * SECOND) for group, of in work.items()}
    assert loads["text"] > 1
    assert loads["ocr"] > 1
    assert loads["flood"] > 2
    assert sum(loads.values()) < 7


def test_the_service_of_10_000_documents_is_unavailable_for_half_an_hour() -> None:
    made = workloads.make("outage")
    (outage,) = made.plan.outages

    assert documents_of(made)["scans"] == 10_000
    assert [made.trace.kind_names[kind] for kind in outage.kinds] == ["ocr"]
    assert outage.back_at - outage.at == 1_800 * SECOND
    waiting = sum(outage.at <= at < outage.back_at for at in made.trace.at)
    assert waiting > 2_000
    another = Outage((1,), SECOND, 2 * SECOND)
    assert made.changed(outages=[another]).plan.outages == (outage, another)


def test_the_day_has_a_peak_above_capacity_and_a_mean_below() -> None:
    made = workloads.make("day")
    hours = [0] * 24
    for at, _, cost in rows_of(made):
        hours[at // (3_600 * SECOND)] += cost

    loads = [work / (made.plan.workers * 3_600 * SECOND) for work in hours]
    assert max(loads) > 1.1
    assert sum(loads) / 24 < 0.8
    assert min(loads) < 0.3


# ── Files and settings ───────────────────────────────────────────────────────────────────────────


def test_of_a_file_few_customers_are_a_group_each_and_many_are_large_or_small() -> None:
    few = scenario_of(trace_of((0, "b", 1), (0, "a", 1)), "few", workers=1)
    rows = [(0, f"c{n}", 1) for n in range(7)] + [(0, "c2", 1)] * 5
    many = scenario_of(trace_of(*rows), "many", workers=1)

    assert few.groups == ("b", "a")
    assert many.groups == ("small", "large")
    assert many.members(1) == [2]


def test_other_settings_make_another_scenario_and_leave_the_first_as_it_was() -> None:
    made = scenario_of(trace_of((0, "a", 1), (0, "b", 1), (1, "b", 1)), "file", workers=1)

    other = made.changed(
        workers=3, costs=Costs.LEARNED, weights=[("b", 2.5)], limits=[(None, 4), ("a", 1)]
    )

    assert (other.plan.workers, other.costs) == (3, Costs.LEARNED)
    assert other.trace.weight == {1: 2_500}
    assert other.plan.limits == {0: 1, 1: 4}
    assert (made.plan.workers, made.trace.weight, made.plan.limits) == (1, {}, {})


def test_workers_limits_and_outages_of_kinds_are_settings_too() -> None:
    trace = trace_of((0, "a", 1), (0, "a", 1), kinds=["ocr", "text"])
    made = scenario_of(trace, "file", workers=4)
    outage = Outage((1,), SECOND, 2 * SECOND)

    other = made.changed(
        workers=0,
        workers_for=[("text", 2), ("ocr", 1)],
        kind_limits=[("text", 3)],
        outages=[outage],
    )

    assert other.plan.workers_for == ((1, 2), (0, 1))
    assert other.plan.kind_limits == {1: 3}
    assert other.plan.outages == (outage,)
    assert [group.workers for group in other.worker_groups] == [2, 1, 0]
    assert made.plan == Plan(workers=4)


def test_every_kind_needs_a_worker() -> None:
    trace = trace_of((0, "a", 1), (0, "a", 1), kinds=["ocr", "text"])

    with pytest.raises(ValueError, match="no worker serves kind 'ocr'"):
        scenario_of(trace, "file", workers=1).changed(workers=0, workers_for=[("text", 1)])


def test_a_setting_for_somebody_who_is_not_there_is_refused_by_name() -> None:
    made = scenario_of(trace_of((0, "a", 1)), "file", workers=1)

    with pytest.raises(ValueError, match="file has no customer 'x'"):
        made.changed(weights=[("x", 2)])
