"""`fairturn restored`: a new epoch in a restored queue."""

import click

from fairturn.cli.options import Flags
from fairturn.cli.target import opened, queue_options
from fairturn.cli.terminal import print_line


@click.command("restored")
@click.argument("queue", required=False, type=click.Path())
@queue_options
def command(*, queue: str | None, as_json: bool, flags: Flags) -> None:
    """Begin a new epoch in a queue that was restored.

    Run it once after restoring a queue from anything but a `fairturn backup`, such as a disk
    snapshot, before the first document is submitted or claimed. It is not needed after `fairturn
    restore`, nor on PostgreSQL after pg_restore or a promotion, which begin a new epoch.

    In a new epoch, ids and fences issued after the backup are never issued again. Otherwise a
    receipt could name the document of another customer, and a worker could record an outcome for
    an attempt that is not its own. Running it twice does no harm.

    \b
    fairturn restored documents.db
    fairturn restored --database postgresql://owner@host/documents
    """
    chosen = flags if queue is None else {**flags, "database": queue}
    with opened(chosen) as restored:
        restored.begin_epoch()
    if as_json:
        print_line({"restored": True})
    else:
        click.echo("A new epoch has begun: no earlier id or fence will be issued again.")
