"""The report: one self-contained HTML file with charts and tables, without scripts."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import pairwise

from fairturn.clock import SECOND_US
from fairturn.simulator import measures
from fairturn.simulator.charts.rows import (
    WAITING,
    Band,
    Bar,
    Spread,
    Timeline,
    bars,
    level_key,
    mark_key,
    spreads,
    strip,
)
from fairturn.simulator.charts.svg import safe
from fairturn.simulator.comparison import IDEALS, Comparison, Result
from fairturn.simulator.replay import Replayed
from fairturn.simulator.scenario import Scenario
from fairturn.simulator.summary import (
    TITLES,
    counted,
    duration,
    headline,
    main_of,
    outage_in_words,
    sentences,
    served_by,
    workers_in_words,
)
from fairturn.simulator.workloads import WORKLOADS

BINS = 300
ROWS_PER_GROUP = 8
ROWS_IN_ALL = 18


def page(comparison: Comparison) -> str:
    """Return the report as HTML."""
    scenario = comparison.scenario
    workload = WORKLOADS.get(scenario.name)
    title = workload.title if workload else scenario.name
    sections = [_summary(comparison)]
    if len(scenario.trace):
        sections += [
            _modes(comparison),
            *_kinds(comparison),
            *_outages(comparison),
            _service(comparison),
            _waits(comparison),
        ]
    sections.append(_settings(comparison))
    style = resources.files("fairturn.simulator").joinpath("report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{safe(scenario.name)}: a simulation by fairturn</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<header>\n<p class="kind">fairturn simulate {safe(scenario.name)}</p>\n'
        f"<h1>{safe(title[:1].upper() + title[1:])}</h1>\n"
        f'<p class="headline">{safe(headline(comparison))}</p>\n</header>\n'
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(name: str, lead: str, *parts: str) -> str:
    inner = "\n".join(parts)
    return f"<section>\n<h2>{safe(name)}</h2>\n<p>{safe(lead)}</p>\n{inner}\n</section>"


def _scrolled(picture: str) -> str:
    """Let a chart scroll on a narrow screen instead of shrinking to illegible text."""
    return f'<div class="picture" tabindex="0">{picture}</div>'


def _figure(caption: str, picture: str, table: str) -> str:
    caption = f"<figcaption>{safe(caption)}</figcaption>"
    return f"<figure>\n{caption}\n{_scrolled(picture)}\n{table}</figure>"


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str, style: str = "numbers"
) -> str:
    """Return a table, collapsed if it is long. The style sheet expands it for printing."""
    rows = list(rows)
    head = "".join(f'<th scope="col">{safe(column)}</th>' for column in columns)
    body = "\n".join(
        f'<tr><th scope="row">{safe(row[0])}</th>'
        + "".join(f"<td>{safe(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f"<details{' open' if len(rows) <= 8 else ''}>\n<summary>{safe(title)}</summary>\n"
        f'<div class="scroll" tabindex="0"><table class="{style}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n</details>\n"
    )


def _summary(comparison: Comparison) -> str:
    items = "\n".join(f"<li>{safe(sentence)}</li>" for sentence in sentences(comparison))
    return f"<section>\n<h2>Summary</h2>\n<ul>\n{items}\n</ul>\n</section>"


def _seconds(us: int | None) -> str:
    return "" if us is None else f"{us / SECOND_US:,.1f}"


# ── Modes ────────────────────────────────────────────────────────────────────────────────────────


_WAIT_COLUMNS = ("mode", "documents", "mean", "p50", "p95", "p99", "max", "longest gap")


def _modes(comparison: Comparison) -> str:
    main, results = main_of(comparison), comparison.results
    max_us = max(g.waits.p99_us for result in results for g in result.groups)
    ideals = [ideal for ideal in IDEALS if any(result.mode is ideal for result in results)]
    columns = (*_WAIT_COLUMNS, *(f"behind {ideal}" for ideal in ideals))
    behind = (
        "; “behind” an ideal is the most documents that a customer of the group was behind it at "
        "any time"
    )
    figures = []
    for number, name in enumerate(comparison.scenario.groups):
        rows, cells = [], []
        for result in results:
            group = result.groups[number]
            waits, p99_us = group.waits, group.waits.p99_us
            rows.append(_bar(comparison, result, p99_us))
            times = (waits.mean_us, waits.p50_us, waits.p95_us, p99_us, waits.max_us, group.gap_us)
            lags = [f"{group.lags[ideal]:,}" if group.lags else "" for ideal in ideals]
            cells.append([result.mode, f"{waits.documents:,}", *map(_seconds, times), *lags])
        caption = f"{name} ({counted(main.groups[number].customers, 'customer')})"
        table = _table(columns, cells, f"{name}: waits in seconds")
        picture = bars(f"p99 waits of {name} in each mode", rows, max_us, _bar_texts(rows))
        figures.append(_figure(caption, picture, table))
    return _section(
        "Modes compared",
        "The p99 wait of each group. The axis is logarithmic: one step to the right is ten times "
        "as long. The longest gap is the longest time that a waiting customer of the group went "
        f"without a claim{behind if ideals else ''}.",
        *figures,
        _evenness(comparison),
    )


def _bar(comparison: Comparison, result: Result, us: int) -> Bar:
    is_main = result is main_of(comparison)
    style = "main" if is_main else "ideal" if result.mode in IDEALS else "other"
    return Bar(result.mode, us, duration(us), style)


def _bar_texts(rows: Iterable[Bar]) -> str:
    return "; ".join(f"{row.name}: {row.text}" for row in rows)


def _evenness(comparison: Comparison) -> str:
    rows = [
        (
            result.mode,
            f"{result.evenness.windows:,}",
            f"{result.evenness.mean:.3f}" if result.evenness.windows else "",
            f"{result.evenness.least:.3f}" if result.evenness.windows else "",
            _seconds(result.idle_us),
        )
        for result in comparison.results
        if result.evenness is not None
    ]
    minutes = measures.WINDOW_US // SECOND_US // 60
    return _table(
        ("mode", "windows", "Jain's index, mean", "least", "idle while work waits, s"),
        rows,
        f"Evenness of service among customers that waited throughout windows of {minutes} minutes",
    )


# ── Kinds of work and outages ────────────────────────────────────────────────────────────────────


def _kinds(comparison: Comparison) -> list[str]:
    main = main_of(comparison)
    if len(main.kinds) < 2:
        return []
    max_us = max(kind.waits.p99_us for result in comparison.results for kind in result.kinds)
    figures = [_kind_figure(comparison, number, max_us) for number in range(len(main.kinds))]
    return [
        _section(
            "Kinds of work",
            "The p99 wait of the documents of each kind, and in the table the waits of each group "
            "of customers in it. A worker takes documents of the kinds that it serves.",
            *figures,
            _workers(comparison),
        )
    ]


def _kind_figure(comparison: Comparison, number: int, max_us: int) -> str:
    rows, cells = [], []
    for result in comparison.results:
        kind = result.kinds[number]
        rows.append(_bar(comparison, result, kind.waits.p99_us))
        for name, waits in zip(comparison.scenario.groups, kind.groups, strict=True):
            if waits.documents or waits.dead:
                times = (waits.mean_us, waits.p50_us, waits.p95_us, waits.p99_us, waits.max_us)
                cells.append([result.mode, name, f"{waits.documents:,}", *map(_seconds, times)])
    waits = main_of(comparison).kinds[number].waits
    name = comparison.scenario.trace.kind_names[number]
    caption = f"{name} ({counted(waits.documents, 'document')})"
    picture = bars(f"p99 waits of kind {name} in each mode", rows, max_us, _bar_texts(rows))
    columns = ("mode", "group", *_WAIT_COLUMNS[1:-1])
    return _figure(caption, picture, _table(columns, cells, f"{name}: waits in seconds"))


def _workers(comparison: Comparison) -> str:
    """Return the table of the groups of workers: how busy they were in each mode."""
    scenario = comparison.scenario
    results = [result for result in comparison.results if result.loads]
    loads = zip(*(result.loads for result in results), strict=True)
    rows = [
        (
            served_by(scenario, of_group[0].group),
            f"{of_group[0].group.workers:,}",
            *(f"{load.busy:.0%}" for load in of_group),
        )
        for of_group in loads
    ]
    columns = ("workers for", "number", *(result.mode for result in results))
    return _table(columns, rows, "Workers: share of the time in which they were busy")


def _outages(comparison: Comparison) -> list[str]:
    scenario = comparison.scenario
    tables = []
    for number, outage in enumerate(scenario.plan.outages):
        rows = [
            (
                result.mode,
                f"{result.outages[number].requests:,}",
                _seconds(result.outages[number].recovery_us),
                f"{sum(result.kinds[kind].waits.dead for kind in outage.kinds):,}",
            )
            for result in comparison.results
        ]
        columns = ("mode", "requests meanwhile", "full rate after, s", "dead documents")
        tables.append(_table(columns, rows, outage_in_words(scenario, outage)))
    if not tables:
        return []
    return [
        _section(
            "Outages",
            "The requests are the attempts that found the service unavailable. The full rate is "
            "back when no worker that serves the kind is idle although its documents wait; it is "
            "given in seconds after the return of the service.",
            *tables,
        )
    ]


# ── Service over time ────────────────────────────────────────────────────────────────────────────


def _shown(scenario: Scenario) -> dict[str, list[int]]:
    """Return the customers of each group with the most documents."""
    sent = Counter(scenario.trace.customer)
    most = max(1, min(ROWS_PER_GROUP, ROWS_IN_ALL // len(scenario.groups)))
    return {
        name: sorted(sorted(scenario.members(number), key=lambda c: -sent[c])[:most])
        for number, name in enumerate(scenario.groups)
    }


def _service(comparison: Comparison) -> str:
    shown = _shown(comparison.scenario)
    outages = comparison.scenario.plan.outages
    results = [result for result in comparison.results if result.mode not in IDEALS]
    ends_at = max((result.ends_at for result in results), default=0)
    figures = [_service_figure(comparison, result, shown, ends_at) for result in results]
    if not figures:
        return ""
    return _section(
        "Service over time",
        "Each row is a customer; time runs from left to right. A block means that a document of "
        "the customer was running; the taller and bluer, the better its level. A thin line means "
        "that the customer waited and was not served. Each group shows its customers with the "
        "most documents." + (" A shaded band is an outage." if outages else ""),
        _scrolled(level_key()),
        *figures,
    )


def _service_figure(
    comparison: Comparison, result: Result, shown: dict[str, list[int]], ends_at: int
) -> str:
    scenario, run = comparison.scenario, result.run
    assert isinstance(run, Replayed)
    bins = _bins(scenario, run, {c for customers in shown.values() for c in customers}, ends_at)
    names = scenario.trace.names
    bands, rows = [], []
    for group in result.groups:
        timelines = [Timeline(names[customer], bins[customer]) for customer in shown[group.name]]
        caption = f"{group.name} ({len(timelines)} of {group.customers:,})"
        bands.append(Band(caption, timelines))
        for name, of_customer in timelines:
            levels = [level for level in of_customer if level not in (0, WAITING)]
            served, waited = len(levels) / BINS, of_customer.count(WAITING) / BINS
            extremes = sorted({min(levels), max(levels)}) if levels else []
            level_range = " to ".join(map(str, extremes))
            rows.append((name, group.name, f"{served:.0%}", f"{waited:.0%}", level_range))
    description = "; ".join(
        f"{name}: served in {served} of the time, waited unserved in {waited}"
        for name, _, served, waited, _ in rows
    )
    title = TITLES[result.mode]
    return _figure(
        title,
        strip(
            f"Service over time, {title}",
            bands,
            ends_at,
            description,
            shaded=[(outage.at, outage.back_at) for outage in scenario.plan.outages],
        ),
        _table(
            ("customer", "group", "served in", "waited unserved in", "levels"),
            rows,
            f"{result.mode}: parts of the time shown",
        ),
    )


def _bins(
    scenario: Scenario, run: Replayed, customers: set[int], ends_at: int
) -> dict[int, list[int]]:
    bins = {customer: [0] * BINS for customer in customers}
    width = max(1, -(-ends_at // BINS))
    spells = measures.waiting_spells(scenario, run)
    for (customer, _), of_customer in spells.items():
        for begin, end in of_customer if customer in customers else ():
            for n in range(begin // width, min(BINS, (end - 1) // width + 1)):
                bins[customer][n] = WAITING
    for attempt in measures.attempts_of(scenario, run):
        customer = scenario.trace.customer[attempt.document]
        if customer not in customers:
            continue
        level = run.priority[attempt.document]
        last = max(attempt.started_at, attempt.ended_at - 1)
        for n in range(attempt.started_at // width, min(BINS, last // width + 1)):
            bins[customer][n] = min(level, bins[customer][n] or WAITING)
    return bins


# ── Waits ────────────────────────────────────────────────────────────────────────────────────────


def _waits(comparison: Comparison) -> str:
    scenario = comparison.scenario
    documents = scenario.documents_by_group()
    max_us = max(g.waits.max_us for result in comparison.results for g in result.groups)
    figures = []
    for number, name in enumerate(scenario.groups):
        rows = []
        for result in comparison.results:
            of = result.groups[number].waits
            waits = measures.waits_of(documents[number], scenario, result.run)
            rows.append(Spread(result.mode, waits, of.p50_us, of.p95_us, of.p99_us, of.max_us))
        table = _table(
            ("mode", *(f"up to {text}" for _, text in _STEPS), "longer"),
            [(row.name, *_shares(row.waits)) for row in rows],
            f"{name}: documents by wait",
        )
        text = "; ".join(f"{row.name}: half below {duration(row.p50_us)}" for row in rows)
        figures.append(
            _figure(name, spreads(f"Waits of {name} in each mode", rows, max_us, text), table)
        )
    return _section(
        "Distribution of waits",
        "The height of a column is the number of documents with that wait. The axis is "
        "logarithmic; waits up to 0.1 s are at its start.",
        _scrolled(mark_key()),
        *figures,
    )


_STEPS = (
    (100_000, "0.1 s"),
    (1 * SECOND_US, "1 s"),
    (10 * SECOND_US, "10 s"),
    (60 * SECOND_US, "1 min"),
    (600 * SECOND_US, "10 min"),
    (3_600 * SECOND_US, "1 h"),
)


def _shares(waits: Sequence[int]) -> list[str]:
    """Return the numbers of documents with waits in each interval, from sorted waits."""
    ends = [0, *(bisect_right(waits, step) for step, _ in _STEPS), len(waits)]
    return [f"{end - begin:,}" for begin, end in pairwise(ends)]


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────


def _settings(comparison: Comparison) -> str:
    scenario, rule = comparison.scenario, comparison.rule
    rows = [
        ("documents", f"{len(scenario.trace):,}"),
        ("customers", f"{len(scenario.trace.names):,}"),
        ("workers", workers_in_words(scenario)),
        *(
            (f"limit of kind {scenario.trace.kind_names[kind]}", f"{limit:,}")
            for kind, limit in scenario.plan.kind_limits.items()
        ),
        *(
            (
                outage_in_words(scenario, outage),
                f"attempts report it after {outage.fails_after_us / SECOND_US:g} s",
            )
            for outage in scenario.plan.outages
        ),
        ("costs", scenario.costs),
        ("reset", f"{rule.reset}, {rule.reset_interval_us / SECOND_US:g} s"),
        ("patience", f"{comparison.patience_us / SECOND_US:g} s"),
    ]
    modes = [(result.mode, TITLES[result.mode].split(": ", 1)[1]) for result in comparison.results]
    return _section(
        "Simulation",
        "The rule and the order of service are those of the queue itself; only the clock is "
        "simulated. The same command produces the same page.",
        _table(("setting", "value"), rows, "Settings", "words"),
        _table(("mode", "order"), modes, "Modes", "words"),
    )
