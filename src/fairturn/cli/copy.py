"""`fairturn copy`: copy a queue into PostgreSQL, or a queue of 0.1 into a new one."""

from pathlib import Path

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use
from fairturn.cli.options import json_option
from fairturn.cli.terminal import number, print_line, printable, progress
from fairturn.stores.urls import without_password


@click.command("copy")
@click.argument("source")
@click.argument("target")
@click.option(
    "--contents",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder for large documents of a file, shared by all machines.",
)
@click.option(
    "--contents-shared",
    is_flag=True,
    help="Make the folder accessible to its group.",
)
@click.option("--schema", metavar="NAME", help="Schema of TARGET; fairturn by default.")
@click.option("--source-schema", metavar="NAME", help="Schema of SOURCE; fairturn by default.")
@json_option
def command(
    *,
    source: str,
    target: str,
    contents: Path | None,
    contents_shared: bool,
    schema: str | None,
    source_schema: str | None,
    as_json: bool,
) -> None:
    """Copy a queue into a new one.

    SOURCE is a file or a postgresql:// URL. TARGET is a postgresql:// URL whose schema has no used
    queue; a file of fairturn 0.1 can also be copied to a new file. The copy has all customers with
    counts and settings, documents in every state, results, idempotency keys, access keys and the
    scheduler state: the order of service continues, and every id stays valid. Stop workers and
    submitters first, and start them with TARGET afterwards. If the copy fails, or SOURCE changes
    meanwhile, TARGET stays empty. SOURCE is never changed.

    \b
    fairturn copy documents.db postgresql://owner@host/documents
    fairturn copy old-0.1.db documents.db
    fairturn copy postgresql://host/old postgresql://host/new --schema invoices
    """
    from fairturn.maintenance.copy import copy_queue

    with progress("Copying") as advance, misuse_is_wrong_use():
        copied = copy_queue(
            source,
            target,
            contents=contents,
            contents_shared=contents_shared,
            schema=schema,
            source_schema=source_schema,
            progress=advance,
        )
    if as_json:
        print_line(copied._asdict())
        return
    documents, customers = (
        number(copied.documents, "document"),
        number(copied.customers, "customer"),
    )
    with_contents = f", {number(copied.contents, 'stored file')}" if copied.contents else ""
    old, new = (printable(without_password(name)) for name in (source, target))
    click.echo(
        f"Copied {documents} of {customers}{with_contents} to {new}.\n"
        f"Start workers and submitters with it from now on, and keep {old} as a backup."
    )
