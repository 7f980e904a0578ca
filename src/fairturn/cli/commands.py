"""The commands by what one does first, and how each of them ends.

What stands here is all that `fairturn --help` loads: the commands themselves are imported when they
are named. (It is not in `__init__.py`, where the command `list` would hide Python's own.)
"""

import sys
from importlib import import_module
from typing import Any

import click

from fairturn.cli.exit_codes import NO_SPACE, Interrupted, ending_of, unwritable
from fairturn.cli.terminal import silence_output
from fairturn.errors import FairturnError

# The sentence is the first of the command's own help.
SECTIONS = {
    "Documents": {
        "submit": "Hand in documents.",
        "work": "Work on documents: run a handler on each, in the order of service.",
        "list": "List documents, the newest first.",
        "show": "Show everything about one document.",
        "explain": "Say why a document waits, and when it will start.",
        "wait": "Wait until documents have ended.",
        "cancel": "Cancel documents.",
        "retry": "Try dead documents again.",
    },
    "Customers": {
        "customers": "List customers, set their share, pause them.",
        "purge": "Delete a customer with everything.",
    },
    "The service": {
        "up": "Serve and work: all that a small installation needs.",
        "serve": "Serve the queue over HTTP.",
        "keys": "List, make, replace and end access keys.",
    },
    "The queue": {
        "config": "Show and change settings.",
        "doctor": "Check that all is well.",
        "migrate": "Make or bring up the schema of a queue in PostgreSQL.",
        "prune": "Forget what is past its age.",
        "backup": "Copy the queue while it is in use.",
        "restore": "Restore a queue in a file from a backup.",
        "restored": "Begin a new epoch in a queue that was restored.",
        "copy": "Copy a queue in a file into PostgreSQL.",
        "export": "Write the completed documents of a queue as CSV, oldest first.",
        "completion": "Print the script that completes commands in a shell.",
    },
    "The rule and the order": {
        "demo": "Show what a fair turn is, in half a minute.",
        "rule": "Print the priority rule, or what it makes of N documents.",
        "replay": "Serve the documents of FILE on a simulated clock.",
        "simulate": "Serve a workload in several modes and compare them.",
    },
}
COMMANDS = tuple(name for section in SECTIONS.values() for name in section)


class Commands(click.Group):
    """Finds a command in the file of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"fairturn.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", help) for name, help in commands.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in ("--url", "--key-file", "--database", "-d", "--json"):
                name = error.option_name
                ctx.fail(f"options come after the command: fairturn list {name} …")
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(name, COMMANDS, n=1)
            ctx.fail(
                f"there is no command {name!r}" + (f"; did you mean {close[0]}?" if close else "")
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FairturnError as error:
            raise ending_of(error) from error
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
        finally:
            # Here, where a closed pipe is still handled, and not when the interpreter ends.
            sys.stdout.flush()

    def main(self, *args: Any, **extra: Any) -> Any:
        """Also the help, which is printed before anything is invoked, may find a full disk."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            silence_output()
            ending = unwritable(error)
            ending.show()
            sys.exit(ending.exit_code)
