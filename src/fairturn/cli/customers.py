"""`fairturn customers`: list customers; set weights and limits; pause and resume."""

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.options import (
    Flags,
    entities,
    page_options,
    refuse_before_subcommand,
    removable_settings,
)
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import console, number, plain_number, print_line, print_table, printable
from fairturn.cli.values import customer_as_json
from fairturn.model import Customer

LIMIT = 100
_COLUMNS = ("customer", "count", "waiting", "running", "delayed", "weight", "limit", "paused")


@click.group("customers", invoke_without_command=True)
@page_options(LIMIT, "customers", "NAME")
@place_options
@click.pass_context
def command(
    ctx: click.Context, *, after: str | None, wanted: int | None, as_json: bool, flags: Flags
) -> None:
    """List customers, set their weights and limits, pause them.

    The count is the counter of the priority rule; waiting is the number of waiting documents.

    \b
    fairturn customers
    fairturn customers set acme --weight 2 --limit 4
    fairturn customers pause acme
    """
    if ctx.invoked_subcommand is not None:
        refuse_before_subcommand(ctx)
        return
    with reached(flags) as queue, misuse_is_wrong_use():
        customers = entities(queue.customers, after, wanted)
        if as_json:
            for customer in customers:
                print_line(customer_as_json(customer))
        else:
            _print(list(customers), wanted)


@command.command("set")
@click.argument("name")
@click.option("--weight", type=float, metavar="W", help="Its share of the turns, 0.01 to 100.")
@click.option("--limit", type=int, metavar="N", help="At most N of its documents run at once.")
@click.option("--no-limit", is_flag=True, help="Remove the limit.")
@click.option(
    "--bytes-max", type=int, metavar="N", help="Maximum size of its stored documents, in bytes."
)
@click.option("--no-bytes-max", is_flag=True, help="Use the queue's default limit.")
@place_options
def set_(
    *,
    name: str,
    weight: float | None,
    limit: int | None,
    no_limit: bool,
    bytes_max: int | None,
    no_bytes_max: bool,
    as_json: bool,
    flags: Flags,
) -> None:
    """Set a customer's weight and limits.

    A customer of weight 2 gets twice the turns of one of weight 1. Omitted settings keep their
    values. A customer that does not exist is created.

    \b
    fairturn customers set acme --weight 2 --limit 4
    fairturn customers set acme --no-limit
    fairturn customers set acme --bytes-max 50000000000
    """
    changes = removable_settings(
        weight=(weight, False), limit=(limit, no_limit), bytes_max=(bytes_max, no_bytes_max)
    )
    if not changes:
        wrong_use(
            "nothing to set; pass --weight, --limit, --no-limit, --bytes-max or --no-bytes-max"
        )
    with reached(flags) as queue, misuse_is_wrong_use():
        _print_settings(queue.set_customer(name, **changes), as_json)


@command.command("pause")
@click.argument("name")
@place_options
def pause(*, name: str, as_json: bool, flags: Flags) -> None:
    """Stop claiming documents of a customer.

    Its submissions are still accepted and wait; running documents continue.

    \b
    fairturn customers pause acme
    """
    _pause(flags, name, as_json, paused=True)


@command.command("resume")
@click.argument("name")
@place_options
def resume(*, name: str, as_json: bool, flags: Flags) -> None:
    """End a customer's pause.

    \b
    fairturn customers resume acme
    """
    _pause(flags, name, as_json, paused=False)


def _pause(flags: Flags, name: str, as_json: bool, *, paused: bool) -> None:
    with reached(flags) as queue, misuse_is_wrong_use():
        queue.customer(name)  # a mistyped name must not create a customer
        _print_settings(queue.set_customer(name, paused=paused), as_json)


def _print(customers: list[Customer], wanted: int | None) -> None:
    if not customers:
        click.echo("There are no such customers.")
        return
    print_table(console(), _COLUMNS, [_row(customer) for customer in customers])
    if len(customers) == wanted:
        last = printable(customers[-1].name)
        click.echo(f"\nFor the next page, if there is one, add: --after '{last}'")


def _row(customer: Customer) -> list[str]:
    settings = customer.settings
    return [
        printable(customer.name),
        str(customer.count),
        f"{customer.waiting:,}",
        f"{customer.running:,}",
        f"{customer.delayed:,}",
        plain_number(settings.weight),
        "" if settings.limit is None else f"{settings.limit:,}",
        "paused" if settings.paused else "",
    ]


def _print_settings(customer: Customer, as_json: bool) -> None:
    if as_json:
        print_line(customer_as_json(customer))
        return
    settings = customer.settings
    limit = "no limit" if settings.limit is None else f"at most {settings.limit:,} running"
    if settings.bytes_max is not None:
        limit += f", at most {settings.bytes_max:,} bytes"
    paused = ", paused" if settings.paused else ""
    click.echo(
        f"{printable(customer.name)}: weight {plain_number(settings.weight)}, {limit}{paused}. "
        f"{number(customer.waiting, 'document')} waiting, {customer.running:,} running."
    )
