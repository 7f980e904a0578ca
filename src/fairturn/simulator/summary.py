"""A comparison as sentences, and as JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from fairturn.clock import SECOND_US
from fairturn.simulator.comparison import IDEALS, Comparison, Discipline, GroupResult, Result
from fairturn.simulator.measures import WaitSummary
from fairturn.simulator.plan import Outage, WorkerGroup
from fairturn.simulator.readings import Reading
from fairturn.simulator.scenario import Scenario

TITLES = {
    Discipline.FAIR: "fair: levels first, turns inside",
    Discipline.EQUAL: "equal: turns, one level for all",
    Discipline.LEVELS: "levels: the nine levels alone",
    Discipline.FIFO: "fifo: first come, first served",
    Discipline.AGEING: "ageing: levels that rise by waiting",
    Discipline.ROUND_ROBIN: "round-robin: one document each",
    Discipline.IDEAL_LEVELS: "ideal-levels: exact shares in levels",
    Discipline.IDEAL: "ideal: exact shares, no levels",
}


def duration(us: int) -> str:
    """Format a wait in seconds, with one decimal below 1,000 s."""
    seconds = us / SECOND_US
    return f"{seconds:,.1f} s" if seconds < 1_000 else f"{seconds:,.0f} s"


def times(long_us: int, short_us: int) -> str | None:
    """Format a ratio of waits; None if it is below 1.2."""
    short_us = max(short_us, SECOND_US // 10)  # shorter waits are not noticeable
    if long_us < 1.2 * short_us:
        return None
    ratio = long_us / short_us
    return f"{ratio:,.1f} times" if ratio < 10 else f"{ratio:,.0f} times"


def main_of(comparison: Comparison) -> Result:
    """Return the mode that the others are compared with: fair, or else the first."""
    results = comparison.results
    return next((r for r in results if r.mode is Discipline.FAIR), results[0])


def others_of(comparison: Comparison) -> list[Result]:
    """Return the other modes, without the ideals."""
    main = main_of(comparison)
    return [r for r in comparison.results if r is not main and r.mode not in IDEALS]


def headline(comparison: Comparison) -> str:
    """Return the result in one sentence."""
    main = main_of(comparison)
    others = others_of(comparison)
    if not len(comparison.scenario.trace):
        return "There are no documents."
    if not others:
        return f"In {main.mode}, 99 of 100 documents waited at most {duration(main.all.p99_us)}."
    against = next((r for r in others if r.mode is Discipline.LEVELS), others[0])
    pairs = list(zip(main.groups, against.groups, strict=True))
    group, other = max(pairs, key=lambda pair: _ratio(pair[1], pair[0]))
    if _ratio(other, group) < 1.2:
        group, other = max(pairs, key=lambda pair: pair[0].waits.documents)
    factor = times(other.waits.p99_us, group.waits.p99_us)
    return (
        f"{group.name}: 99 of 100 documents waited at most {duration(group.waits.p99_us)} in "
        f"{main.mode}, and {duration(other.waits.p99_us)} in {against.mode}"
        + (f": {factor} as long." if factor else ".")
    )


def sentences(comparison: Comparison) -> list[str]:
    """Return the results as sentences."""
    main, results = main_of(comparison), comparison.results
    lines = [
        f"{group.name} ({counted(group.customers, 'customer')}, "
        f"{counted(group.waits.documents, 'document')}): 99 of 100 waited at most "
        + _in_each((duration(r.groups[number].waits.p99_us), r) for r in results)
        for number, group in enumerate(main.groups)
    ]
    if len(main.kinds) > 1:
        lines += [
            f"Kind {kind.name} ({counted(kind.waits.documents, 'document')}): 99 of 100 waited at "
            f"most " + _in_each((duration(r.kinds[number].waits.p99_us), r) for r in results)
            for number, kind in enumerate(main.kinds)
        ]
    return lines + findings(comparison)


def findings(comparison: Comparison) -> list[str]:
    """Return the results that are not waits of a group or a kind, as sentences."""
    main = main_of(comparison)
    others = others_of(comparison)
    lines = []
    compared = [r for r in others if r.mode in (Discipline.LEVELS, Discipline.FIFO)]
    slower = [
        f"{group.name} by {after - 1:.0%} against {other.mode}"
        for other in compared
        for group, of in zip(main.groups, other.groups, strict=True)
        if of.waits.mean_us > SECOND_US
        and (after := group.waits.mean_us / of.waits.mean_us) > 1.005
    ]
    if slower:
        lines.append(f"Longer mean waits in {main.mode}: {', '.join(slower)}.")
    elif compared:
        modes = " or ".join(r.mode for r in compared)
        lines.append(f"No group waits longer on average in {main.mode} than in {modes}.")
    gaps = [(r, max((g.gap_us or 0) for g in r.groups)) for r in (main, *others) if r.groups]
    if gaps and main.mode not in IDEALS:
        lines.append(
            "Longest time that a waiting customer went without a claim: "
            + _in_each((duration(gap), r) for r, gap in gaps)
        )
    for ideal in IDEALS:
        lags = [
            (r, max(g.lags[ideal] for g in r.groups))
            for r in (main, *others)
            if r.groups and ideal in r.groups[0].lags
        ]
        if lags:
            lines.append(
                f"Furthest behind {ideal}, in documents of one customer: "
                + _in_each((f"{lag:,}", r) for r, lag in lags)
            )
    idle = [(r, r.idle_us) for r in comparison.results if r.idle_us is not None]
    if idle and not any(us for _, us in idle):
        lines.append("No worker was idle while a document waited, in any mode.")
    elif idle:
        cause = "outages or concurrency limits" if main.outages else "concurrency limits"
        lines.append(
            f"Workers were idle while documents waited, because of {cause}: "
            + _in_each((duration(us), r) for r, us in idle)
        )
    return lines + _of_workers(comparison) + _of_outages(comparison)


def _of_workers(comparison: Comparison) -> list[str]:
    loads = main_of(comparison).loads
    if len(loads) < 2:
        return []
    scenario = comparison.scenario
    shares = ", ".join(f"{load.busy:.0%} for {served_by(scenario, load.group)}" for load in loads)
    return [
        f"Share of the time in which workers were busy in {main_of(comparison).mode}: {shares}."
    ]


def _of_outages(comparison: Comparison) -> list[str]:
    results = [result for result in comparison.results if result.mode not in IDEALS]
    lines = []
    for number, outage in enumerate(comparison.scenario.plan.outages):
        found = [(result.outages[number], result) for result in results]
        lines.append(
            f"{outage_in_words(comparison.scenario, outage)}. Requests to the service meanwhile: "
            + _in_each((f"{of.requests:,}", r) for of, r in found)
            + " After its return, the full rate was back after "
            + _in_each((duration(of.recovery_us), r) for of, r in found)
        )
    if lines or any(result.all.dead for result in results):
        lines.append("Dead documents: " + _in_each((f"{r.all.dead:,}", r) for r in results))
    return lines


def workers_in_words(scenario: Scenario) -> str:
    """Return the number of workers, and how many serve which kinds."""
    groups = [group for group in scenario.worker_groups if group.workers]
    total = counted(sum(group.workers for group in groups), "worker")
    if len(groups) == 1 and len(scenario.trace.kind_names) == 1:
        return total
    parts = (f"{group.workers:,} for {served_by(scenario, group)}" for group in groups)
    return f"{total} ({', '.join(parts)})"


def served_by(scenario: Scenario, group: WorkerGroup) -> str:
    """Return the name of the kind that a group of workers serves."""
    return scenario.trace.kind_names[group.kinds[0]] if len(group.kinds) == 1 else "all kinds"


def outage_in_words(scenario: Scenario, outage: Outage) -> str:
    kinds = ", ".join(scenario.trace.kind_names[kind] for kind in outage.kinds)
    begin, end = (f"{at / SECOND_US:,.10g} s" for at in (outage.at, outage.back_at))
    return f"Outage of {kinds} from {begin} to {end}"


def _in_each(values: Iterable[tuple[str, Result]]) -> str:
    return ", ".join(f"{value} in {result.mode}" for value, result in values) + "."


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _ratio(long: GroupResult, short: GroupResult) -> float:
    return long.waits.p99_us / max(short.waits.p99_us, SECOND_US // 10)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def as_plain(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as a value for JSON."""
    rule, scenario = comparison.rule, comparison.scenario
    return {
        **_plain_scenario(scenario),
        "costs": scenario.costs,
        "reset": rule.reset,
        "reset_interval_s": rule.reset_interval_us / SECOND_US,
        "patience_s": comparison.patience_us / SECOND_US,
        "headline": headline(comparison),
        "modes": [_plain_result(scenario, result) for result in comparison.results],
    }


def readings_as_plain(scenario: Scenario, results: Mapping[Reading, Result]) -> dict[str, Any]:
    """Return a comparison of readings of the rule as a value for JSON."""
    readings = [
        {"reading": reading, **_plain_result(scenario, result)}
        for reading, result in results.items()
    ]
    return {**_plain_scenario(scenario), "readings": readings}


def _plain_scenario(scenario: Scenario) -> dict[str, Any]:
    names = scenario.trace.kind_names
    return {
        "name": scenario.name,
        "documents": len(scenario.trace),
        "customers": len(scenario.trace.names),
        "workers": sum(group.workers for group in scenario.worker_groups),
        "worker_groups": [_plain_group(scenario, group) for group in scenario.worker_groups],
        "kind_limits": {names[kind]: limit for kind, limit in scenario.plan.kind_limits.items()},
        "outages": [
            {
                "kinds": [names[kind] for kind in outage.kinds],
                "from_s": outage.at / SECOND_US,
                "to_s": outage.back_at / SECOND_US,
                "fails_after_s": outage.fails_after_us / SECOND_US,
                "retry_after_s": outage.retry_after_us / SECOND_US,
            }
            for outage in scenario.plan.outages
        ],
    }


def _plain_group(scenario: Scenario, group: WorkerGroup) -> dict[str, Any]:
    return {
        "kinds": [scenario.trace.kind_names[kind] for kind in group.kinds],
        "workers": group.workers,
    }


def _plain_result(scenario: Scenario, result: Result) -> dict[str, Any]:
    even = result.evenness
    return {
        "mode": result.mode,
        "ends_at_s": result.ends_at / SECOND_US,
        "all": _plain_waits(result.all),
        "groups": [
            {
                "name": group.name,
                "customers": group.customers,
                **_plain_waits(group.waits),
                "gap_s": None if group.gap_us is None else group.gap_us / SECOND_US,
                "lag_documents": {ideal.value: lag for ideal, lag in group.lags.items()},
            }
            for group in result.groups
        ],
        "kinds": [
            {
                "name": kind.name,
                **_plain_waits(kind.waits),
                "groups": [
                    {"name": name, **_plain_waits(waits)}
                    for name, waits in zip(scenario.groups, kind.groups, strict=True)
                ],
            }
            for kind in result.kinds
        ],
        "workers": [
            {**_plain_group(scenario, load.group), "busy": round(load.busy, 6)}
            for load in result.loads
        ],
        "outages": [
            {"requests": of.requests, "recovery_s": of.recovery_us / SECOND_US}
            for of in result.outages
        ],
        "jain": None
        if even is None
        else {
            "windows": even.windows,
            "mean": round(even.mean, 6),
            "least": round(even.least, 6),
        },
        "idle_while_waiting_s": None if result.idle_us is None else result.idle_us / SECOND_US,
    }


def _plain_waits(waits: WaitSummary) -> dict[str, Any]:
    documents, cancelled, dead, *times = waits
    wait_s = zip(("mean", "p50", "p95", "p99", "max"), times, strict=True)
    return {
        "documents": documents,
        "cancelled": cancelled,
        "dead": dead,
        "wait_s": {name: us / SECOND_US for name, us in wait_s},
    }
