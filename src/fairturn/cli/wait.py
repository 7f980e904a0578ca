"""`fairturn wait`: wait until documents have ended."""

import sys

import click

from fairturn.cli.exit_codes import FAILED, TRY_AGAIN, CommandExit
from fairturn.cli.options import SECONDS, Flags
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import number, print_line, printable, progress
from fairturn.cli.values import document_as_json
from fairturn.clock import stopwatch


@click.command("wait")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", type=SECONDS, help="Time out after this; never by default.")
@place_options
def command(*, ids: tuple[str, ...], timeout: float | None, as_json: bool, flags: Flags) -> None:
    """Wait until documents have ended.

    The exit code is 0 if all are completed, 1 if one has ended otherwise, and 75 after the
    timeout. Documents are reported in the order given, one line each, once they have ended or the
    timeout has passed.

    \b
    fairturn wait 0c2f1d4b5a69788 --timeout 60
    """
    failed, unfinished = 0, 0
    until = None if timeout is None else stopwatch() + timeout
    with reached(flags) as queue:
        for id in ids:
            queue.get(id)  # report a wrong id before waiting for the others
        with progress("Waiting", len(ids), beside_output=True) as advance:
            for n, id in enumerate(ids):
                try:
                    left = None if until is None else max(0.0, until - stopwatch())
                    document = queue.wait(id, timeout_s=left)
                except TimeoutError:
                    document = queue.get(id)
                unfinished += not document.ended
                failed += document.ended and document.state != "completed"
                if as_json:
                    print_line(document_as_json(document))
                else:
                    why = f": {printable(document.error)}" if document.error else ""
                    click.echo(f"{printable(id)}  {document.state}{why}")
                sys.stdout.flush()
                advance(n + 1)
    if failed:
        raise CommandExit(f"{number(failed, 'document')} ended without being completed", FAILED)
    if unfinished:
        raise CommandExit(
            f"{number(unfinished, 'document')} had not ended after {timeout:g} s", TRY_AGAIN
        )
