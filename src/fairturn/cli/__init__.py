"""The command line: one command per file, imported on use."""

import click

from fairturn.cli.commands import COMMANDS, CommandGroup

__all__ = ["COMMANDS", "main"]


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fairturn", message="%(prog)s %(version)s")
def main() -> None:
    """A document queue that gives every customer a fair turn.

    \b
    fairturn submit acme invoice.pdf    submit a document of the customer acme
    fairturn list                       list waiting, running and ended documents
    fairturn show ID                    show everything about one document

    The default queue is the file documents.db in this folder; choose another with --database, or a
    service with --url. For details of a command: fairturn submit --help.
    """
