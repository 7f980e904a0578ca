"""`fairturn keys`: the access keys of the service."""

from typing import TYPE_CHECKING

import click

from fairturn.access.keys import AccessKey
from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.options import SECONDS, Flags, refuse_before_subcommand
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import age, console, print_line, print_table, printable
from fairturn.clock import SystemClock
from fairturn.model import PAGE_MAX
from fairturn.wire import ACCESS_KEY, to_json

if TYPE_CHECKING:
    from fairturn.access.registry import KeyRegistry, NewKey
    from fairturn.client.sync_client import ClientKeys

_ROLES = ("customer", "operator", "reader")
_COLUMNS = ("id", "role", "customer", "name", "made", "last use", "state")


@click.group("keys", invoke_without_command=True)
@place_options
@click.pass_context
def command(ctx: click.Context, *, as_json: bool, flags: Flags) -> None:
    """List, create, rotate and revoke access keys.

    With a customer's key a client can submit and read that customer's documents, with an operator's
    do everything, with a reader's read everything. A key is shown once, when it is created; only
    its hash is stored.

    \b
    fairturn keys make --role operator --name "Ada's laptop"
    fairturn keys make --customer acme
    fairturn keys
    """
    if ctx.invoked_subcommand is not None:
        refuse_before_subcommand(ctx)
        return
    with reached(flags) as queue:
        keys = _all_keys(queue.keys)
    now = SystemClock().now()
    if as_json:
        for key in keys:
            print_line(to_json(ACCESS_KEY, key))
    elif not keys:
        click.echo("There are no access keys. Create one: fairturn keys make --role operator")
    else:
        print_table(console(), _COLUMNS, [_row(key, now) for key in keys], texts=(2, 3))


@command.command("make")
@click.option("--role", type=click.Choice(_ROLES), help="The permissions of the key.")
@click.option("--customer", help="The customer of the key; implies the role customer.")
@click.option("--name", default="", help="A label.")
@place_options
def make(*, role: str | None, customer: str | None, name: str, as_json: bool, flags: Flags) -> None:
    """Create an access key, and show it this once.

    \b
    fairturn keys make --customer acme --name "the scanner at the desk"
    """
    role = role or ("customer" if customer is not None else None)
    if role is None:
        wrong_use("the key needs a role; pass --customer NAME, --role operator or --role reader")
    with reached(flags, make=True) as queue, misuse_is_wrong_use():
        _show(queue.keys.make(role, name=name, customer=customer), as_json)


@command.command("rotate")
@click.argument("id")
@click.option(
    "--overlap", type=SECONDS, default=0.0, help="Until the old key expires; 0 by default."
)
@place_options
def rotate(*, id: str, overlap: float, as_json: bool, flags: Flags) -> None:
    """Create a key that replaces another.

    \b
    fairturn keys rotate 3f1c52d09ab4 --overlap 86400
    """
    with reached(flags) as queue, misuse_is_wrong_use():
        _show(queue.keys.rotate(id, overlap_s=overlap), as_json)


@command.command("revoke")
@click.argument("id")
@place_options
def revoke(*, id: str, as_json: bool, flags: Flags) -> None:
    """Revoke a key now.

    \b
    fairturn keys revoke 3f1c52d09ab4
    """
    with reached(flags) as queue:
        key = queue.keys.revoke(id)
    if as_json:
        print_line(to_json(ACCESS_KEY, key))
    else:
        click.echo(f"The key {printable(key.id)} has been revoked.")


def _all_keys(keys: "KeyRegistry | ClientKeys") -> list[AccessKey]:
    found: list[AccessKey] = []
    while page := keys.list(after=found[-1].id if found else None, size=PAGE_MAX):
        found += page
    return sorted(found, key=lambda key: (key.made_at_us, key.id))


def _show(made: "NewKey", as_json: bool) -> None:
    if as_json:
        print_line({**to_json(ACCESS_KEY, made.key), "shown": made.shown})
        return
    click.echo("This key is shown only once; store it in a safe place:", err=True)
    click.echo(printable(made.shown))


def _row(key: AccessKey, now: int) -> list[str]:
    return [
        key.id,
        key.role.value,
        printable(key.customer or ""),
        printable(key.name),
        age(now - key.made_at_us),
        "never" if key.used_at_us is None else age(now - key.used_at_us),
        "active" if key.opens(now) else "ended",
    ]
