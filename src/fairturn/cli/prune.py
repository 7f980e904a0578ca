"""`fairturn prune`: deletion of ended documents past their retention period."""

import click

from fairturn.cli.options import Flags
from fairturn.cli.target import opened, queue_options
from fairturn.cli.terminal import number, print_line, progress


@click.command("prune")
@queue_options
def command(*, as_json: bool, flags: Flags) -> None:
    """Delete ended documents past their retention period.

    The periods are completed_kept_s and its like in `fairturn config`, one per ended state. It also
    deletes old idempotency keys, idle customers, and contents that a crash left behind. It works in
    small batches and the queue can be in use: run it daily.

    \b
    fairturn prune
    """
    with opened(flags) as queue, progress("Deleting") as advance:
        pruned = queue.prune(advance)
    if as_json:
        print_line(pruned._asdict())
    else:
        documents = number(pruned.documents, "document")
        click.echo(f"Deleted {documents} and {number(pruned.contents, 'stored file')}.")
