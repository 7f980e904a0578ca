"""`fairturn keys`: who may ask the service for what."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.options import Seconds, json_option
from fairturn.cli.remote import keys_of, place_options, reached
from fairturn.cli.terminal import age, console, print_line, print_table, printable

if TYPE_CHECKING:
    from fairturn.access.keys import AccessKey
    from fairturn.access.registry import Keys, NewKey
    from fairturn.client.sync_client import ClientKeys

_ROLES = ("customer", "operator", "reader")
_COLUMNS = ("id", "role", "customer", "name", "made", "last use", "state")


@click.group("keys", invoke_without_command=True)
@json_option
@place_options
@click.pass_context
def command(ctx: click.Context, *, as_json: bool, flags: Mapping[str, Any]) -> None:
    """List, make, replace and end access keys.

    A customer's key submits and sees that customer's documents. An operator's does everything, and
    a reader's sees everything. A key is shown once, when it is made; only a hash of it is kept.

    \b
    fairturn keys make --role operator --name "Ada's laptop"
    fairturn keys make --customer acme
    fairturn keys
    """
    if ctx.invoked_subcommand is not None:
        if as_json or any(v is not None for v in flags.values()):
            wrong_use(f"options come last: fairturn keys {ctx.invoked_subcommand} … --OPTION")
        return
    from fairturn.clock import SystemClock

    with reached(flags) as queue:
        keys = _all_keys(keys_of(queue))
    now = SystemClock().now()
    if as_json:
        for key in keys:
            print_line(_fields(key))
    elif not keys:
        click.echo("There are no access keys. The first one: fairturn keys make --role operator")
    else:
        print_table(console(), _COLUMNS, [_row(key, now) for key in keys], texts=(2, 3))


@command.command("make")
@click.option("--role", type=click.Choice(_ROLES), help="What it is for.")
@click.option("--customer", help="Whose documents it is for; the role is then customer.")
@click.option("--name", default="", help="What to call it, for people.")
@json_option
@place_options
def make(
    *, role: str | None, customer: str | None, name: str, as_json: bool, flags: Mapping[str, Any]
) -> None:
    """Make an access key, and show it this once.

    \b
    fairturn keys make --customer acme --name "the scanner at the desk"
    """
    role = role or ("customer" if customer is not None else None)
    if role is None:
        wrong_use("say what the key is for: --customer NAME, or --role operator or reader")
    with reached(flags, make=True) as queue, misuse_is_wrong_use():
        _show(keys_of(queue).make(role, name=name, customer=customer), as_json)


@command.command("rotate")
@click.argument("id")
@click.option("--overlap", type=Seconds(), default=0.0, help="How long the old one still opens; 0.")
@json_option
@place_options
def rotate(*, id: str, overlap: float, as_json: bool, flags: Mapping[str, Any]) -> None:
    """Make a key in place of another one.

    \b
    fairturn keys rotate 3f1c52d09ab4 --overlap 86400
    """
    with reached(flags) as queue, misuse_is_wrong_use():
        _show(keys_of(queue).rotate(id, overlap_s=overlap), as_json)


@command.command("revoke")
@click.argument("id")
@json_option
@place_options
def revoke(*, id: str, as_json: bool, flags: Mapping[str, Any]) -> None:
    """Let a key end now.

    \b
    fairturn keys revoke 3f1c52d09ab4
    """
    with reached(flags) as queue:
        key = keys_of(queue).revoke(id)
    if as_json:
        print_line(_fields(key))
    else:
        click.echo(f"The key {key.id} has ended.")


def _all_keys(keys: "Keys | ClientKeys") -> "list[AccessKey]":
    from fairturn.model import PAGE_MAX

    found: list[AccessKey] = []
    while page := keys.list(after=found[-1].id if found else None, size=PAGE_MAX):
        found += page
    return sorted(found, key=lambda key: (key.made_at, key.id))


def _show(made: "NewKey", as_json: bool) -> None:
    if as_json:
        print_line({**_fields(made.key), "shown": made.shown})
        return
    click.echo("This is the key. It is shown this once; keep it where nobody else reads:", err=True)
    click.echo(made.shown)


def _fields(key: "AccessKey") -> dict[str, Any]:
    fields = key._asdict()
    del fields["digest"]  # of no use to anybody
    return fields


def _row(key: "AccessKey", now: int) -> list[str]:
    return [
        key.id,
        key.role.value,
        printable(key.customer or ""),
        printable(key.name),
        age(now - key.made_at),
        "never" if key.used_at is None else age(now - key.used_at),
        "open" if key.opens(now) else "ended",
    ]
