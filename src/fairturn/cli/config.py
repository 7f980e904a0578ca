"""`fairturn config`: every setting, its value and its origin."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use
from fairturn.cli.options import Flags, refuse_before_subcommand
from fairturn.cli.settings import (
    QUEUE,
    SettingValue,
    known_settings,
    read_queue_setting,
    shown_of,
    worded,
)
from fairturn.cli.target import (
    client_of,
    database_of,
    opened_at,
    place_options,
    reached,
    service_of,
    settings_here,
)
from fairturn.cli.terminal import console, print_line, print_table, printable
from fairturn.errors import NoQueue, NotAllowed
from fairturn.stores.urls import without_password


@click.group("config", invoke_without_command=True)
@place_options
@click.pass_context
def command(ctx: click.Context, *, as_json: bool, flags: Flags) -> None:
    """Show and change settings.

    A setting comes from an option, else from the environment (FAIRTURN_DATABASE=…), else from
    fairturn.toml in this folder (or the file that FAIRTURN_CONFIG names), else from its default.
    The settings of the queue itself are stored in its database and apply to every process.

    \b
    fairturn config
    fairturn config set mode=equal patience_s=60
    """
    if ctx.invoked_subcommand is not None:
        refuse_before_subcommand(ctx)
        return
    settings = settings_here(flags)
    in_force = _in_force(settings)
    shown = list(_shown(settings, in_force))
    if as_json:
        for name, value, origin in shown:
            print_line({"name": name, "value": value, "origin": origin})
        return
    rows = [[name, worded(value), printable(origin)] for name, value, origin in shown]
    print_table(console(), ("setting", "value", "from"), rows, texts=(0, 1, 2))
    for name, found in settings.items():
        if found.given and name in in_force and found.value != in_force[name]:
            click.echo(
                f"\n{name} is {worded(found.value)} in {found.origin}, which is for new queues; "
                f"to change this one: fairturn config set {name}={worded(found.value)}"
            )


@command.command("set")
@click.argument("assignments", metavar="NAME=VALUE...", nargs=-1, required=True)
@place_options
def set_(*, assignments: tuple[str, ...], as_json: bool, flags: Flags) -> None:
    """Change settings of the queue, for every process.

    The settings are mode, costs, patience_s, reset, reset_interval_s, bounds, kinds, attempts_max,
    waiting_max, waiting_per_customer_max, bytes_per_customer_max, and how long ended documents are
    kept: completed_kept_s and its like. `fairturn config` prints them all.
    Running workers apply them at their next claim; existing priorities and counts do not change.

    \b
    fairturn config set mode=levels
    fairturn config set bounds=-2,-4,-6,-8,-10,-12,-14,-20
    """
    changes: dict[str, Any] = {}
    with misuse_is_wrong_use():
        for assignment in assignments:
            name, equals, value = assignment.partition("=")
            if not equals:
                raise ValueError(f"{assignment!r} is not NAME=VALUE, such as mode=equal")
            changes[name] = read_queue_setting(name, value)
    with reached(flags) as queue:
        before = queue.settings
        with misuse_is_wrong_use():
            after = queue.configure(**changes)
    for name in changes:
        old, new = getattr(before, name), getattr(after, name)
        if as_json:
            print_line({"name": name, "value": new, "before": old})
        elif old == new:
            click.echo(f"{name} is {worded(new)}, as before.")
        else:
            click.echo(f"{name} is {worded(new)} now; it was {worded(old)}.")


def _in_force(settings: Mapping[str, SettingValue]) -> dict[str, Any]:
    """Return the settings of the queue; none if it does not exist or the key does not permit it."""
    url = service_of(settings)
    if url is not None:
        try:
            with client_of(url, settings) as client, misuse_is_wrong_use():
                stored = client.settings
        except NotAllowed as error:
            message = f"The settings of the queue are not shown: {error}."
            click.echo(printable(message), err=True)
            return {}
    else:
        path = database_of(settings)
        if isinstance(path, Path) and (not path.is_file() or not path.stat().st_size):
            return {}
        try:
            with opened_at(path, settings, {}) as queue:
                stored = queue.settings
        except NoQueue:
            return {}
    names = (name for name, known in known_settings().items() if known.table == QUEUE)
    return {name: getattr(stored, name) for name in names}


def _shown(
    settings: Mapping[str, SettingValue], in_force: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, value and origin of each setting."""
    place = service_of(settings) or settings["database"].value
    for name, found in settings.items():
        if name in in_force:
            yield name, in_force[name], f"the queue {without_password(place)}"
        else:
            yield name, shown_of(name, found.value), found.origin
