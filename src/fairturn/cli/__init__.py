"""The command line: one command a file, imported only when it is named or listed."""

from importlib import import_module
from typing import Any

import click

from fairturn.cli.terminal import printable
from fairturn.errors import FairturnError, TraceError

COMMANDS = ("replay", "rule")


class Failed(click.ClickException):
    """The world did not allow it. One sentence on standard error."""

    exit_code = 1


class WrongUse(Failed):
    """What was handed in is not right."""

    exit_code = 2


class Commands(click.Group):
    """Finds a command in the file of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"fairturn.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TraceError as error:
            raise WrongUse(printable(str(error))) from error
        except FairturnError as error:
            raise Failed(printable(str(error))) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fairturn", message="%(prog)s %(version)s")
def main() -> None:
    """A document queue that gives every customer a fair turn."""
