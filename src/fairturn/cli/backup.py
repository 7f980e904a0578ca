"""`fairturn backup`: an online backup of a queue in a file."""

from pathlib import Path

import click

from fairturn.cli.exit_codes import CommandExit
from fairturn.cli.options import Flags
from fairturn.cli.target import opened, queue_options
from fairturn.cli.terminal import number, print_line, printable, progress, size


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace an older copy, reusing its contents.")
@queue_options
def command(*, file: Path, force: bool, as_json: bool, flags: Flags) -> None:
    """Back up a queue in a file while it is in use.

    FILE becomes a queue like any other, with its contents in FILE.contents: open it with
    --database, or restore it with fairturn restore. The copy is a snapshot, verified and durable.

    \b
    fairturn backup /backups/documents.db
    fairturn backup /backups/documents.db --force
    """
    from fairturn.config import contents_beside
    from fairturn.maintenance.backup import back_up

    present = [str(path) for path in (file, contents_beside(file)) if path.exists()]
    if present and not force:
        exist = "exists" if len(present) == 1 else "exist"
        raise CommandExit(
            f"{' and '.join(present)} {exist} already; --force replaces an older copy"
        )
    with opened(flags) as queue, progress("Copying") as advance:
        made = back_up(queue, file, overwrite=force, progress=advance)
    if as_json:
        print_line({**made._asdict(), "path": str(made.path)})
    else:
        contents = number(made.contents, "stored file")
        click.echo(f"Copied to {printable(str(made.path))}: {size(made.size_bytes)}, {contents}.")
    for sentence in made.damaged:
        click.echo(printable(sentence), err=True)
    if made.damaged:
        raise CommandExit(
            f"{number(len(made.damaged), 'stored file')} could not be copied: damaged or missing "
            "in the queue itself; the rest of the copy is complete"
        )
