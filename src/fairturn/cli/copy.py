"""`fairturn copy`: a queue in a file, moved into PostgreSQL."""

from pathlib import Path

import click

from fairturn.cli.exit_codes import wrong_use
from fairturn.cli.options import json_option
from fairturn.cli.terminal import number, print_line, printable, progress
from fairturn.urls import is_address, without_password


@click.command("copy")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("url")
@click.option(
    "--contents",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where large documents go: a folder that all machines share.",
)
@click.option(
    "--contents-shared",
    is_flag=True,
    help="Let the group of that folder use it, not its user alone.",
)
@json_option
def command(
    *, file: Path, url: str, contents: Path | None, contents_shared: bool, as_json: bool
) -> None:
    """Copy a queue in a file into PostgreSQL.

    Everything goes over: customers with their counts and settings, documents in every state,
    results, idempotency keys, and where the turns stand, so that the order goes on as it was and
    every id stays valid. URL must lead to a database without a queue that was used. Nothing may be
    running: stop workers and submitters before, and start them with URL afterwards. If something
    fails, or FILE is changed meanwhile, URL has nothing of it. FILE stays as it is.

    \b
    fairturn copy documents.db postgresql://owner@host/documents
    """
    if not is_address(url):
        wrong_use(f"{printable(str(url))} is no postgresql:// address")
    from fairturn.maintenance.copy import copy_queue

    with progress("Copying") as advance:
        copied = copy_queue(
            file, url, contents=contents, contents_shared=contents_shared, progress=advance
        )
    if as_json:
        print_line(copied._asdict())
        return
    documents, customers = (
        number(copied.documents, "document"),
        number(copied.customers, "customer"),
    )
    with_contents = f", {number(copied.contents, 'content')}" if copied.contents else ""
    click.echo(
        f"Copied {documents} of {customers}{with_contents} to {printable(without_password(url))}.\n"
        f"Start everything with it from now on, and put {printable(str(file))} away."
    )
