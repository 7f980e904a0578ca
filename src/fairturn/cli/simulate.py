"""`fairturn simulate`: compare orders and settings on a workload or a trace."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fairturn.cli.exit_codes import CommandExit, misuse_is_wrong_use, wrong_use
from fairturn.cli.options import SECONDS, ReaderType, choice, rule_of, rule_options, seconds_of
from fairturn.cli.replay import WORKERS_MAX, patience_option, per_kind, workers_for_option
from fairturn.cli.terminal import (
    console,
    number,
    print_line,
    print_table,
    printable,
    progress,
    short_seconds,
)
from fairturn.clock import microseconds
from fairturn.priority import Rule
from fairturn.scheduling.flows import Costs
from fairturn.validation.text import kind_name

if TYPE_CHECKING:
    from fairturn.simulator.comparison import Comparison, Discipline, Result
    from fairturn.simulator.measures import WaitSummary
    from fairturn.simulator.plan import Outage
    from fairturn.simulator.readings import Reading
    from fairturn.simulator.scenario import Scenario
    from fairturn.simulator.trace import Trace

# The values of `comparison.Discipline`, which is not loaded for the help; a test compares them.
MODES = (*("fair", "equal", "levels", "fifo", "ageing", "round-robin"), *("ideal-levels", "ideal"))
DEFAULT_MODES = ("fair", "equal", "levels", "fifo", "ideal-levels", "ideal")
FILE_WORKERS = 4
# Shorter simulations end before a progress bar could be read.
DOCUMENTS_WITH_PROGRESS = 20_000
WAIT_COLUMNS = ("mode", "n", "mean", "p50", "p95", "p99", "max")
COLUMNS = (*WAIT_COLUMNS, "gap", "lag")
Named = tuple[tuple[str | None, float], ...]


class OutageTimes(NamedTuple):
    """The value of `--outage`."""

    kinds: tuple[str, ...]
    from_s: float
    to_s: float


def _per_customer(value: str, *, for_all: bool = False) -> Named:
    """Read numbers for customers, such as a=2,b=4; with `for_all`, also one number for all."""
    found: list[tuple[str | None, float]] = []
    for part in value.split(","):
        name, equals, number = part.rpartition("=")
        if not equals and not for_all:
            raise ValueError(f"{part!r} is not a customer and a number, such as a=2")
        try:
            found.append((name if equals else None, float(number)))
        except ValueError:
            raise ValueError(f"{number!r} in {part!r} is not a number") from None
    return tuple(found)


def _outage_of(value: str) -> OutageTimes:
    """Parse an outage, such as ocr=600..2400, or ocr,text=600..2400."""
    kinds, equals, times = value.rpartition("=")
    begin, dots, end = times.partition("..")
    if not equals or not dots:
        raise ValueError(f"{value!r} is not KIND=FROM..TO in seconds, such as ocr=600..2400")
    names = tuple(kind_name(kind) for kind in kinds.split(","))
    return OutageTimes(names, seconds_of(begin), seconds_of(end))


@click.command("simulate")
@click.argument("target", metavar="WORKLOAD|FILE", required=False)
@click.option("--list", "list_them", is_flag=True, help="List the named workloads.")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    multiple=True,
    help="A mode to compare; may be given several times. By default fair, equal, levels, fifo and "
    "both ideals.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, WORKERS_MAX),
    metavar="N",
    help="Documents that run at the same time, in workers that serve all kinds; by default the "
    f"workload's, or {FILE_WORKERS} for a file.",
)
@workers_for_option
@click.option(
    "--readings",
    "with_readings",
    is_flag=True,
    help="Compare four readings of the rule, in one mode (levels by default).",
)
@rule_options
@click.option(
    "--weights",
    type=ReaderType("a=n,b=n", _per_customer),
    help="Weights of customers; 1 by default.",
)
@click.option(
    "--limit",
    "limits",
    type=ReaderType("a=n,b=n", partial(_per_customer, for_all=True)),
    help="Maximum of running documents of each customer (4) or of some (a=4,b=2).",
)
@click.option(
    "--kind-limit",
    "kind_limits",
    type=ReaderType("KIND=N", partial(per_kind, of="documents")),
    multiple=True,
    metavar="KIND=N",
    help="Maximum of running documents of a kind; may be repeated.",
)
@click.option(
    "--outage",
    "outages",
    type=ReaderType("KIND=FROM..TO", _outage_of),
    multiple=True,
    metavar="KIND=FROM..TO",
    help="Seconds from the start in which the service that a kind needs is unavailable; may be "
    "repeated.",
)
@click.option(
    "--fails-after",
    type=SECONDS,
    help="With --outage: the time after which an attempt reports it; 1 by default.",
)
@click.option(
    "--retry-after",
    type=SECONDS,
    help="With --outage: the first interval of probes that a report asks for; 5 by default.",
)
@click.option("--costs", type=choice(Costs), help="The cost of a document in turns.")
@patience_option
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", help="For a workload; 1993 by default."
)
@click.option(
    "--time-scale",
    type=float,
    metavar="X",
    help="Scale arrival times of a file; 0.5 doubles the rate.",
)
@click.option("--max-cost", type=SECONDS, help="For a file: cap the run times.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write charts and tables to this HTML file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    target: str | None,
    list_them: bool,
    modes: tuple[str, ...],
    with_readings: bool,
    rule_given: Mapping[str, Any],
    patience: float,
    report: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Serve a workload in several modes and compare them.

    The rule and the order are those of the queue; only the clock is simulated.

    WORKLOAD is a name of --list. FILE is the CSV of `fairturn replay` and `fairturn export`, or a
    trace in the Standard Workload Format (.swf); either may be compressed (.gz).

    With --readings and no target, all named workloads are simulated.

    \b
    fairturn simulate dump --report dump.html
    fairturn simulate dump --mode fair --mode levels --reset periodic
    fairturn simulate yesterday.csv --workers 8 --limit 4
    fairturn simulate yesterday.csv --workers-for ocr=2 --outage ocr=3600..5400
    fairturn simulate --readings --mode fair
    """
    if list_them:
        _print_list()
        return
    rule = rule_of(rule_given)
    if with_readings:
        for option, value in (("--reset", rule_given.get("reset")), ("--report", report)):
            if value is not None:
                wrong_use(f"{option} cannot be combined with --readings; leave it out")
        mode = _reading_mode(modes)
        _print_readings(target, mode, settings, rule, microseconds(patience), as_json=as_json)
        return
    if target is None:
        wrong_use("no target; pass a workload of --list, or a file")
    scenario = _scenario(target, settings)
    comparison = _compare(scenario, modes, rule=rule, patience_us=microseconds(patience))
    if report is not None:
        from fairturn.simulator.report import page

        try:
            report.write_text(page(comparison), encoding="utf-8")
        except OSError as error:
            raise CommandExit(f"{report} cannot be written: {error.strerror}") from error
    if as_json:
        from fairturn.simulator.summary import as_plain

        print_line(as_plain(comparison))
    else:
        _print_tables(comparison)


def _print_list() -> None:
    from fairturn.simulator.workloads import WORKLOADS

    width = max(map(len, WORKLOADS))
    for workload in WORKLOADS.values():
        click.echo(f"{workload.name:{width}}  {workload.title}")


def _scenario(target: str, settings: dict[str, Any]) -> "Scenario":
    from fairturn.simulator import workloads

    with misuse_is_wrong_use():
        if target in workloads.WORKLOADS:
            for option in ("time_scale", "max_cost"):
                if settings[option] is not None:
                    wrong_use(f"--{option.replace('_', '-')} is for files; {target} is a workload")
            seed = workloads.SEED if settings["seed"] is None else settings["seed"]
            made = workloads.make(target, seed)
        else:
            if settings["seed"] is not None:
                wrong_use(f"--seed is for workloads; {target} is a file")
            made = _read(Path(target), settings)
        return made.changed(
            workers=settings["workers"],
            workers_for=settings["workers_for"],
            costs=None if settings["costs"] is None else Costs(settings["costs"]),
            weights=[(name or "", weight) for name, weight in settings["weights"] or ()],
            limits=[(name, _whole(limit)) for name, limit in settings["limits"] or ()],
            kind_limits=settings["kind_limits"],
            outages=_outages(made.trace, settings),
        )


def _outages(trace: "Trace", settings: dict[str, Any]) -> "list[Outage]":
    from fairturn.scheduling.outages import PROBE_US
    from fairturn.simulator.plan import FAILS_AFTER_US, Outage

    fails_after_s, retry_after_s = settings["fails_after"], settings["retry_after"]
    for option in ("fails_after", "retry_after"):
        if settings[option] is not None and not settings["outages"]:
            wrong_use(f"--{option.replace('_', '-')} has no effect without --outage; add it")
    return [
        Outage(
            kinds=tuple(sorted({trace.kind_number(kind) for kind in times.kinds})),
            at=microseconds(times.from_s),
            back_at=microseconds(times.to_s),
            fails_after_us=FAILS_AFTER_US if fails_after_s is None else microseconds(fails_after_s),
            retry_after_us=PROBE_US if retry_after_s is None else microseconds(retry_after_s),
        )
        for times in settings["outages"]
    ]


def _read(path: Path, settings: dict[str, Any]) -> "Scenario":
    from fairturn.simulator import trace_files
    from fairturn.simulator.scenario import scenario_of
    from fairturn.simulator.workloads import WORKLOADS

    if not path.exists():
        wrong_use(
            f"there is no file {path}, and no workload of this name; "
            f"the workloads are {', '.join(WORKLOADS)}"
        )
    trace, left_out = trace_files.read(path)
    if left_out:
        click.echo(f"Skipped, without a run time or a user: {left_out:,}.", err=True)
    max_cost, scale = settings["max_cost"], settings["time_scale"]
    trace = trace_files.scaled(
        trace,
        time_scale=1.0 if scale is None else scale,
        cost_us_max=None if max_cost is None else microseconds(max_cost),
    )
    return scenario_of(trace, path.name, workers=settings["workers"] or FILE_WORKERS)


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(f"a limit is {number:g}; it must be a whole number")
    return int(number)


def _compare(scenario: "Scenario", modes: tuple[str, ...], **options: Any) -> "Comparison":
    from fairturn.simulator.comparison import Discipline, compare, modes_of

    wanted = [Discipline(mode) for mode in dict.fromkeys(modes or DEFAULT_MODES)]
    if not modes:
        wanted = modes_of(scenario, wanted)
    total = len(wanted) * len(scenario.trace)
    if total < DOCUMENTS_WITH_PROGRESS:
        with misuse_is_wrong_use():
            return compare(scenario, wanted, **options)
    with progress("Simulating", total) as advance:

        def report(mode: "Discipline", done: int) -> None:
            advance(wanted.index(mode) * len(scenario.trace) + done)

        with misuse_is_wrong_use():
            return compare(scenario, wanted, progress=report, **options)


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────


def _print_tables(comparison: "Comparison") -> None:
    from fairturn.simulator.summary import findings, headline, workers_in_words

    out = console()
    scenario = comparison.scenario
    lag = "; lag: maximum number of documents behind the two ideals, with levels/without"
    out.print(
        f"{printable(scenario.name)}: {number(len(scenario.trace), 'document')} of "
        f"{number(len(scenario.trace.names), 'customer')}, {workers_in_words(scenario)}, costs "
        f"{scenario.costs}. n: documents; waits in seconds; gap: the longest time without a claim "
        f"while waiting{lag if scenario.has_ideal else ''}.\n"
    )
    if not len(scenario.trace):
        return
    for group, name in enumerate(scenario.groups):
        out.print(f"{printable(name)} ({number(len(scenario.members(group)), 'customer')})")
        columns = COLUMNS if scenario.has_ideal else COLUMNS[:-1]
        rows = [_cells(result, group)[: len(columns)] for result in comparison.results]
        print_table(out, columns, rows)
        out.print()
    kinds = scenario.trace.kind_names
    for kind, name in enumerate(kinds if len(kinds) > 1 else ()):
        out.print(f"Documents of kind {name}")
        rows = [_wait_cells(result.mode, result.kinds[kind].waits) for result in comparison.results]
        print_table(out, WAIT_COLUMNS, rows)
        out.print()
    out.print(printable(headline(comparison)))
    for sentence in findings(comparison):
        out.print(printable(sentence))


def _cells(result: "Result", group_number: int) -> list[str]:
    group = result.groups[group_number]
    gap = "" if group.gap_us is None else short_seconds(group.gap_us)
    lags = "/".join(f"{lag}" for lag in group.lags.values())
    return [*_wait_cells(result.mode, group.waits), gap, lags]


def _wait_cells(mode: str, waits: "WaitSummary") -> list[str]:
    times = (waits.mean_us, waits.p50_us, waits.p95_us, waits.p99_us, waits.max_us)
    return [mode, f"{waits.documents:,}", *(short_seconds(us) for us in times)]


# ── Readings of the rule ─────────────────────────────────────────────────────────────────────────


def _reading_mode(modes: tuple[str, ...]) -> "Discipline":
    from fairturn.simulator.comparison import IDEALS, Discipline

    if len(modes) > 1:
        wrong_use("--readings compares in one mode; pass --mode once")
    mode = Discipline(modes[0]) if modes else Discipline.LEVELS
    if mode in IDEALS:
        wrong_use(
            f"--readings cannot be combined with --mode {mode}, whose priorities are fixed; pass "
            "another mode"
        )
    return mode


def _print_readings(
    target: str | None,
    mode: "Discipline",
    settings: dict[str, Any],
    rule: Rule,
    patience_us: int,
    *,
    as_json: bool,
) -> None:
    from fairturn.simulator.readings import compare_readings
    from fairturn.simulator.summary import readings_as_plain
    from fairturn.simulator.workloads import WORKLOADS

    targets = list(WORKLOADS) if target is None else [target]
    found = []
    with progress("Simulating", len(targets)) as advance:
        for done, name in enumerate(targets):
            advance(done)
            scenario = _scenario(name, settings)
            results = compare_readings(scenario, mode, rule=rule, patience_us=patience_us)
            found.append((scenario, results))
    if as_json:
        workloads = [readings_as_plain(scenario, results) for scenario, results in found]
        print_line({"mode": mode, "workloads": workloads})
        return
    out = console()
    out.print(f"Mode {mode}. Waits in seconds: p50 / p99.\n")
    rows: list[list[str] | None] = []
    for scenario, results in found:
        rows += [[printable(scenario.name)], *_reading_rows(scenario, results), None]
    print_table(out, ("", *found[0][1]), rows[:-1])


def _reading_rows(scenario: "Scenario", results: "dict[Reading, Result]") -> list[list[str]]:
    rows = []
    for group, name in enumerate(scenario.groups):
        waits = [result.groups[group].waits for result in results.values()]
        cells = [f"{short_seconds(of.p50_us)} / {short_seconds(of.p99_us)}" for of in waits]
        rows.append([f"  {printable(name)}", *cells])
    return rows
