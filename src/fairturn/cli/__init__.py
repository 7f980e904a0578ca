"""The command line: one command a file, imported only when it is named."""

import click

from fairturn.cli.commands import COMMANDS, Commands

__all__ = ["COMMANDS", "main"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fairturn", message="%(prog)s %(version)s")
def main() -> None:
    """A document queue that gives every customer a fair turn.

    \b
    fairturn submit acme invoice.pdf    hand in a document of the customer acme
    fairturn list                       see what waits, runs and has ended
    fairturn show ID                    see everything about one document

    The queue is the file documents.db in this folder; --database names another, and --url one at a
    service. Every command explains itself: fairturn submit --help.
    """
