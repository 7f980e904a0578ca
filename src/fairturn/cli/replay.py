"""`fairturn replay`: start and end of each document of a trace, on a simulated clock."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from importlib import resources
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import wrong_use
from fairturn.cli.options import SECONDS, ReaderType, choice, rule_of, rule_options
from fairturn.cli.terminal import console, number, print_table, printable, progress, seconds
from fairturn.clock import SECOND_US, microseconds
from fairturn.scheduling.flows import PATIENCE_US, Costs, Mode
from fairturn.validation.text import kind_name

if TYPE_CHECKING:
    from fairturn.simulator.measures import Waits
    from fairturn.simulator.plan import Plan
    from fairturn.simulator.replay import Replayed
    from fairturn.simulator.trace import Trace

WORKERS_MAX = 100_000
CUSTOMERS_SHOWN = 20
DOCUMENTS_SHOWN = 5  # at the start and at the end
LINES_AT_ONCE = 10_000
# Shorter replays end before a progress bar could be read.
DOCUMENTS_WITH_PROGRESS = 50_000
EXAMPLE = "example.csv"
BY_CUSTOMER = ("customer", "documents", "priorities", "wait p50", "wait p99", "wait max")
BY_DOCUMENT = ("customer", "n", "at", "count", "priority", "started", "finished")


patience_option = click.option(
    "--patience",
    type=SECONDS,
    default=PATIENCE_US / SECOND_US,
    show_default=True,
    help="Wait after which one claim in ten goes to the customer that has waited longest.",
)


def per_kind(text: str, *, of: str) -> tuple[str, int]:
    """Parse a kind and a number of something, such as ocr=2."""
    kind, separator, n = text.partition("=")
    if not separator or not n.isascii() or not n.isdigit():
        raise ValueError(f"{text!r} is not KIND=N, such as ocr=2")
    if not 1 <= int(n) <= WORKERS_MAX:
        raise ValueError(f"{n} {of} are not from 1 to {WORKERS_MAX:,}")
    return kind_name(kind), int(n)


workers_for_option = click.option(
    "--workers-for",
    type=ReaderType("KIND=N", partial(per_kind, of="workers")),
    multiple=True,
    metavar="KIND=N",
    help="Workers that serve one kind, asked before the others; may be repeated.",
)


@click.command("replay")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--mode", type=choice(Mode), default="fair", show_default=True, help="The order.")
@click.option(
    "--workers",
    type=click.IntRange(0, WORKERS_MAX),
    default=1,
    show_default=True,
    metavar="N",
    help="Documents that run at the same time, in workers that serve all kinds.",
)
@workers_for_option
@rule_options
@click.option(
    "--costs",
    type=choice(Costs),
    default="equal",
    show_default=True,
    help="The cost of a document in turns.",
)
@patience_option
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each document.")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    file: Path | None,
    mode: str,
    workers: int,
    workers_for: tuple[tuple[str, int], ...],
    rule_given: Mapping[str, Any],
    costs: str,
    patience: float,
    as_json: bool,
) -> None:
    """Serve the documents of FILE on a simulated clock.

    FILE is CSV with the columns at_s,customer,cost_s and optionally weight (it applies to the
    customer from that row on) and kind (of work); - is standard input. Without FILE an example is
    replayed.

    \b
    fairturn replay arrivals.csv --workers 4
    fairturn replay arrivals.csv --mode levels --json
    fairturn replay arrivals.csv --workers 2 --workers-for ocr=1
    """
    rule = rule_of(rule_given)
    trace = _read(file)
    options: dict[str, Any] = {
        "rule": rule,
        "plan": _plan(trace, workers, workers_for),
        "costs": Costs(costs),
        "patience_us": microseconds(patience),
    }
    chosen = ctx.get_parameter_source("mode") is not click.core.ParameterSource.DEFAULT
    if file is None and not as_json and not chosen:
        _print_example(trace, workers, options)
        return
    replayed = _replay(trace, mode=Mode(mode), **options)
    if as_json:
        _print_json(trace, replayed)
    else:
        _print_tables(trace, replayed, mode, workers + sum(n for _, n in workers_for))


def _read(file: Path | None) -> "Trace":
    from fairturn.simulator import trace

    if file is None:
        example = resources.files("fairturn.simulator") / EXAMPLE
        with example.open("rb") as stream:
            return trace.read_stream(stream, EXAMPLE)
    if str(file) == "-":
        return trace.read_stream(sys.stdin.buffer, "standard input")
    return trace.read(file)


def _plan(trace: "Trace", workers: int, workers_for: tuple[tuple[str, int], ...]) -> "Plan":
    from fairturn.simulator.plan import plan_of

    try:
        return plan_of(trace, workers, workers_for)
    except ValueError as error:
        hint = "; see --workers-for" if workers_for or trace.kinds else ""
        wrong_use(f"{error}{hint}")


def _replay(trace: "Trace", **options: Any) -> "Replayed":
    from fairturn.simulator.replay import replay

    if len(trace) < DOCUMENTS_WITH_PROGRESS:
        return replay(trace, **options)
    with progress("Replaying", len(trace)) as advance:
        return replay(trace, **options, progress=advance)


def _print_json(trace: "Trace", replayed: "Replayed") -> None:
    names = [json.dumps(name) for name in trace.names]
    kinds = [f',"kind":{json.dumps(kind)}' for kind in trace.kinds] or [""]
    columns = (
        trace.customer,
        trace.kind or bytes(len(trace)),
        trace.at,
        replayed.count,
        replayed.priority,
        replayed.started_at,
        replayed.finished_at,
    )
    out = sys.stdout.buffer
    for first in range(0, len(trace), LINES_AT_ONCE):
        some = slice(first, first + LINES_AT_ONCE)
        lines = [
            f'{{"n":{n},"customer":{names[customer]}{kinds[kind]},"at_s":{at / SECOND_US}'
            f',"count":{count_},"priority":{priority},"started_at_s":{started / SECOND_US}'
            f',"finished_at_s":{finished / SECOND_US}}}\n'
            for n, customer, kind, at, count_, priority, started, finished in zip(
                count(first), *(column[some] for column in columns), strict=False
            )
        ]
        out.write("".join(lines).encode())
    out.flush()


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────


def _print_tables(trace: "Trace", replayed: "Replayed", mode: str, workers: int) -> None:
    from fairturn.simulator.measures import waits_by_customer, waits_in_all

    out = console()
    if not len(trace):
        out.print("The trace has no documents.")
        return
    waits = waits_by_customer(trace, replayed)
    largest_first = sorted(waits.items(), key=lambda item: -item[1].documents)
    rows: list[list[str] | None] = [
        [printable(name), *_cells(of_customer)]
        for name, of_customer in largest_first[:CUSTOMERS_SHOWN]
    ]
    if len(waits) > CUSTOMERS_SHOWN:
        rows.append([f"and {len(waits) - CUSTOMERS_SHOWN:,} more"])
    rows += [None, ["all", *_cells(waits_in_all(trace, replayed))]]
    out.print(
        f"{number(len(trace), 'document')} of {number(len(waits), 'customer')}, mode {mode}, "
        f"{number(workers, 'worker')}. The last one finishes after "
        f"{seconds(max(replayed.finished_at))} s. All times are in seconds.\n"
    )
    print_table(out, BY_CUSTOMER, rows)
    out.print()
    print_table(out, BY_DOCUMENT, _documents(trace, replayed))


def _cells(waits: "Waits") -> list[str]:
    best, worst = waits.best_priority, waits.worst_priority
    return [
        f"{waits.documents:,}",
        str(best) if best == worst else f"{best} to {worst}",
        seconds(waits.p50_us),
        seconds(waits.p99_us),
        seconds(waits.max_us),
    ]


def _documents(trace: "Trace", replayed: "Replayed") -> list[list[str] | None]:
    shown: list[int | None] = list(range(len(trace)))
    if len(shown) > 2 * DOCUMENTS_SHOWN:
        shown[DOCUMENTS_SHOWN:-DOCUMENTS_SHOWN] = [None]
    return [
        None
        if n is None
        else [
            printable(trace.names[trace.customer[n]]),
            str(n),
            seconds(trace.at[n]),
            str(replayed.count[n]),
            str(replayed.priority[n]),
            seconds(replayed.started_at[n]),
            seconds(replayed.finished_at[n]),
        ]
        for n in shown
    ]


def _print_example(trace: "Trace", workers: int, options: dict[str, Any]) -> None:
    from fairturn.simulator.measures import waits_by_customer

    levels = waits_by_customer(trace, _replay(trace, mode=Mode.LEVELS, **options))
    fair = waits_by_customer(trace, _replay(trace, mode=Mode.FAIR, **options))
    bulk = max(levels, key=lambda name: levels[name].documents)
    rows = {
        name: [
            name,
            str(levels[name].documents),
            *(seconds(us) for of in (levels, fair) for us in (of[name].p50_us, of[name].max_us)),
        ]
        for name in levels
    }
    quiet = [rows[name] for name in levels if name != bulk]
    out = console()
    out.print(
        f"Without FILE, this is the built-in example: {bulk} submits "
        f"{levels[bulk].documents} documents at once, and {len(quiet)} other customers submit one "
        f"now and then. {number(workers, 'worker').capitalize()}, on a simulated clock; the waits "
        "are in seconds.\n"
    )
    columns = ("customer", "documents", "levels: p50", "max", "fair: p50", "max")
    print_table(out, columns, [*quiet, None, rows[bulk]])
    out.print(
        "\nBoth modes give every document the same pending documents count and the same priority. "
        "With the levels alone, a customer that sinks to priority 9 waits behind the bulk upload. "
        "In mode fair, the default, customers of one level take turns.\n\n"
        "  fairturn replay FILE.csv    replays your own trace\n"
        "  fairturn rule               prints the priority rule"
    )
