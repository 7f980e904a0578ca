"""`fairturn wait`: until documents have ended."""

import sys
from collections.abc import Mapping
from typing import Any

import click

from fairturn.cli.exit_codes import FAILED, TRY_AGAIN, Ending
from fairturn.cli.options import Seconds, json_option
from fairturn.cli.remote import place_options, reached
from fairturn.cli.terminal import number, print_line, printable, progress
from fairturn.cli.values import document_as_json
from fairturn.clock import stopwatch


@click.command("wait")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", type=Seconds(), help="Give up after this; never by default.")
@json_option
@place_options
def command(
    *, ids: tuple[str, ...], timeout: float | None, as_json: bool, flags: Mapping[str, Any]
) -> None:
    """Wait until documents have ended.

    Ends with 0 if all are completed, with 1 if one is dead or cancelled, and with 75 if one has
    not ended when the time is over. A line is printed for each as it ends, in the order given.

    \b
    fairturn wait 0c2f1d4b5a69788 --timeout 60
    """
    failed, unfinished = 0, 0
    until = None if timeout is None else stopwatch() + timeout
    with reached(flags) as queue:
        for id in ids:
            queue.get(id)  # a wrong id is told at once, not after the wait for another
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
                    click.echo(f"{id}  {document.state}{why}")
                sys.stdout.flush()
                advance(n + 1)
    if failed:
        raise Ending(f"{number(failed, 'document')} ended without being completed", FAILED)
    if unfinished:
        raise Ending(
            f"{number(unfinished, 'document')} had not ended after {timeout:g} s", TRY_AGAIN
        )
