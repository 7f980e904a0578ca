"""`fairturn backup`: a copy of the queue, while it is in use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from fairturn.cli.exit_codes import Ending
from fairturn.cli.options import json_option
from fairturn.cli.target import opened, queue_options
from fairturn.cli.terminal import number, print_line, printable, progress, size


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace an older copy; what it shares is kept.")
@json_option
@queue_options
def command(*, file: Path, force: bool, as_json: bool, flags: Mapping[str, Any]) -> None:
    """Copy the queue while it is in use.

    FILE becomes a queue like any other, with its contents in FILE.contents: name it with
    --database, or put it back with fairturn restore. Workers and submitters go on meanwhile. The
    copy is checked, on stable storage, and complete as of one moment.

    \b
    fairturn backup /backups/documents.db
    fairturn backup /backups/documents.db --force
    """
    from fairturn.config import contents_beside
    from fairturn.maintenance.backup import back_up

    there = [str(path) for path in (file, contents_beside(file)) if path.exists()]
    if there and not force:
        exist = "exists" if len(there) == 1 else "exist"
        raise Ending(f"{' and '.join(there)} {exist} already; --force replaces an older copy")
    with opened(flags) as queue, progress("Copying") as advance:
        made = back_up(queue, file, overwrite=force, progress=advance)
    if as_json:
        print_line({**made._asdict(), "path": str(made.path)})
    else:
        contents = number(made.contents, "content")
        click.echo(f"Copied to {printable(str(made.path))}: {size(made.size_bytes)}, {contents}.")
    for sentence in made.damaged:
        click.echo(printable(sentence), err=True)
    if made.damaged:
        raise Ending(
            f"{number(len(made.damaged), 'content')} could not be copied, being damaged or missing "
            "in the queue itself; everything else is in the copy"
        )
