"""The list of commands, and how errors become exit codes.

`fairturn --help` loads only this module; a command is imported when it is used. (Not in
`__init__.py`, where importing the command `list` would hide Python's own.)
"""

import sys
from importlib import import_module
from typing import Any

import click

from fairturn.cli.exit_codes import NO_SPACE, CommandExit, code_of, unwritable
from fairturn.cli.terminal import silence_output
from fairturn.errors import FairturnError

# Each sentence is the first of the command's help text.
SECTIONS = {
    "Documents": {
        "submit": "Submit documents.",
        "work": "Process documents: run a handler on each, in the order of service.",
        "list": "List documents, newest first.",
        "show": "Show everything about one document.",
        "explain": "Explain why a document waits, and when it will start.",
        "wait": "Wait until documents have ended.",
        "cancel": "Cancel documents.",
        "retry": "Retry dead documents, and with a new expiry also expired ones.",
    },
    "Customers": {
        "customers": "List customers, set their weights and limits, pause them.",
        "purge": "Delete a customer with all its data.",
    },
    "Kinds of work": {
        "kinds": "List kinds of work, set their limits, pause them.",
        "outages": "List unavailable services, resume the work that needs them.",
    },
    "The service": {
        "up": "Run the service and a worker.",
        "serve": "Serve the queue over HTTP.",
        "keys": "List, create, rotate and revoke access keys.",
    },
    "The queue": {
        "config": "Show and change settings.",
        "doctor": "Check a queue.",
        "migrate": "Create or migrate the schema of a queue in PostgreSQL.",
        "prune": "Delete ended documents past their retention period.",
        "backup": "Back up a queue in a file while it is in use.",
        "restore": "Restore a queue in a file from a backup.",
        "restored": "Begin a new epoch in a queue that was restored.",
        "copy": "Copy a queue into a new one.",
        "export": "Write the completed documents of a queue as CSV, oldest first.",
        "completion": "Print a completion script for a shell.",
    },
    "The rule and the order": {
        "demo": "Run a demo of fair turns, in half a minute.",
        "rule": "Print the priority rule, or the priorities of N documents.",
        "replay": "Serve the documents of FILE on a simulated clock.",
        "simulate": "Serve a workload in several modes and compare them.",
    },
}
COMMANDS = tuple(name for section in SECTIONS.values() for name in section)


class CommandGroup(click.Group):
    """Imports each command from the module of the same name."""

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
            raise CommandExit(str(error), code_of(error)) from error
        except KeyboardInterrupt as error:
            raise CommandExit("interrupted", code_of(error)) from error
        finally:
            # Here a closed pipe is handled; at the end of the interpreter it is not.
            sys.stdout.flush()

    def main(self, *args: Any, **extra: Any) -> Any:
        """Handle a full disk here, because the help is printed before `invoke`."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            silence_output()
            ending = unwritable(error)
            ending.show()
            sys.exit(ending.exit_code)
