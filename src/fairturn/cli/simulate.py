"""`fairturn simulate`: compare orders and settings on a workload or a trace."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import CommandExit, misuse_is_wrong_use, wrong_use
from fairturn.cli.options import SECONDS, ReaderType, choice, rule_of, rule_options
from fairturn.cli.replay import WORKERS_MAX, patience_option
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

if TYPE_CHECKING:
    from fairturn.simulator.comparison import Comparison, Discipline, Result
    from fairturn.simulator.readings import Reading
    from fairturn.simulator.scenario import Scenario

# The values of `comparison.Discipline`, which is not loaded for the help; a test compares them.
MODES = (*("fair", "equal", "levels", "fifo", "ageing", "round-robin"), *("ideal-levels", "ideal"))
DEFAULT_MODES = ("fair", "equal", "levels", "fifo", "ideal-levels", "ideal")
FILE_WORKERS = 4
# Shorter simulations end before a progress bar could be read.
DOCUMENTS_WITH_PROGRESS = 20_000
COLUMNS = ("mode", "n", "mean", "p50", "p95", "p99", "max", "gap", "lag")
Named = tuple[tuple[str | None, float], ...]


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
    type=click.IntRange(1, WORKERS_MAX),
    metavar="N",
    help="Documents that run at the same time; by default the workload's, or "
    f"{FILE_WORKERS} for a file.",
)
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
    comparison = _compare(
        scenario, modes or DEFAULT_MODES, rule=rule, patience_us=microseconds(patience)
    )
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
            costs=None if settings["costs"] is None else Costs(settings["costs"]),
            weights=[(name or "", weight) for name, weight in settings["weights"] or ()],
            limits=[(name, _whole(limit)) for name, limit in settings["limits"] or ()],
        )


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
    from fairturn.simulator.comparison import Discipline, compare

    wanted = [Discipline(mode) for mode in dict.fromkeys(modes)]
    total = len(wanted) * len(scenario.trace)
    if total < DOCUMENTS_WITH_PROGRESS:
        return compare(scenario, wanted, **options)
    with progress("Simulating", total) as advance:

        def report(mode: "Discipline", done: int) -> None:
            advance(wanted.index(mode) * len(scenario.trace) + done)

        return compare(scenario, wanted, progress=report, **options)


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────


def _print_tables(comparison: "Comparison") -> None:
    from fairturn.simulator.summary import headline, sentences

    out = console()
    scenario = comparison.scenario
    out.print(
        f"{printable(scenario.name)}: {number(len(scenario.trace), 'document')} of "
        f"{number(len(scenario.trace.names), 'customer')}, "
        f"{number(scenario.plan.workers, 'worker')}, costs {scenario.costs}. n: documents; waits "
        "in seconds; gap: the longest time without a claim while waiting; lag: maximum number of "
        "documents behind the two ideals, with levels/without.\n"
    )
    if not len(scenario.trace):
        return
    for group, name in enumerate(scenario.groups):
        out.print(f"{printable(name)} ({number(len(scenario.members(group)), 'customer')})")
        print_table(out, COLUMNS, [_cells(result, group) for result in comparison.results])
        out.print()
    out.print(printable(headline(comparison)))
    for sentence in sentences(comparison)[len(scenario.groups) :]:  # the first repeat the tables
        out.print(printable(sentence))


def _cells(result: "Result", group_number: int) -> list[str]:
    group = result.groups[group_number]
    waits = group.waits
    times = (waits.mean_us, waits.p50_us, waits.p95_us, waits.p99_us, waits.max_us)
    lags = "/".join(f"{lag}" for lag in group.lags.values())
    return [
        result.mode,
        f"{waits.documents:,}",
        *(short_seconds(us) for us in times),
        "" if group.gap_us is None else short_seconds(group.gap_us),
        lags,
    ]


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
