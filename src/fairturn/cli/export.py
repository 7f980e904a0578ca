"""`fairturn export`: the history of a queue as CSV, for simulations."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TextIO

import click

from fairturn.cli.exit_codes import WRONG_USE, CommandExit, misuse_is_wrong_use
from fairturn.cli.options import TIMESTAMP, Flags, entities, setting_options
from fairturn.cli.target import QUEUE_OPTIONS, reached
from fairturn.cli.terminal import number, printable, progress
from fairturn.model import weight_in_thousandths

_LINE_END = "\n"


@click.command("export")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to FILE; standard output by default.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--submitted-from", type=TIMESTAMP, help="Only submitted at or after this time.")
@click.option("--submitted-before", type=TIMESTAMP, help="Only submitted before this time.")
@click.option(
    "--kind", multiple=True, help="Only of this kind of work; may be given several times."
)
@click.option("--anonymous", is_flag=True, help="Write numbers instead of customers' names.")
@setting_options(*QUEUE_OPTIONS, "url", "key_file")
def command(
    *,
    output: Path | None,
    force: bool,
    submitted_from: int | None,
    submitted_before: int | None,
    kind: tuple[str, ...],
    anonymous: bool,
    flags: Flags,
) -> None:
    """Write the completed documents of a queue as CSV, oldest first.

    The columns are those that `fairturn replay` and `fairturn simulate` read: at_s (seconds since
    the first document), customer, cost_s (run time), weight if a customer has one, and kind if a
    document has another than the default kind.

    \b
    fairturn export --submitted-from 2030-01-31T00:00Z --output yesterday.csv
    fairturn simulate yesterday.csv --workers 8 --mode fair --mode equal
    """
    from fairturn.simulator import history

    if output is not None and output.exists() and not force:
        raise CommandExit(f"{output} exists already; --force replaces it", WRONG_USE)
    with reached(flags) as queue:
        with misuse_is_wrong_use(), progress("Reading") as advance:
            documents = queue.iterate(
                states="completed",
                submitted_from=submitted_from,
                submitted_before=submitted_before,
                kinds=kind or None,
            )
            trace = history.trace_of(documents, progress=advance)
        customers = entities(queue.customers, None, None)
        weights = {each.name: weight_in_thousandths(each.settings.weight) for each in customers}
        history.set_weights(trace, weights)
    if anonymous:
        history.anonymous(trace)
    with _writing(output) as file, progress("Writing", len(trace), beside_output=True) as advance:
        history.write(trace, file, progress=advance)
    if output is not None:
        documents_of = f"{number(len(trace), 'document')} of {number(len(trace.names), 'customer')}"
        click.echo(f"Wrote {documents_of}.", err=True)


class _TerminalLines(StringIO):
    """Prints each line that is written to it, with control characters escaped."""

    def write(self, line: str) -> int:
        return sys.stdout.write(f"{printable(line.removesuffix(_LINE_END))}{_LINE_END}")


@contextmanager
def _writing(output: Path | None) -> Iterator[TextIO]:
    """Open a file, or standard output, in UTF-8 and with line feeds on every platform. A terminal
    gets the lines with control characters escaped."""
    if output is None and sys.stdout.isatty():
        yield _TerminalLines()
        return
    if output is None:
        out = TextIOWrapper(sys.stdout.buffer, "utf-8", newline="", write_through=True)
        yield out
        out.detach()
        return
    try:
        with output.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise CommandExit(f"{output} cannot be written: {error.strerror}") from error
