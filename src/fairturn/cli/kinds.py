"""`fairturn kinds`: list kinds of work; set limits, attempts and expiry; pause and resume."""

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use
from fairturn.cli.options import (
    DURATION,
    Flags,
    refuse_before_subcommand,
    removable_settings,
)
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import console, duration, number, print_line, print_table, printable
from fairturn.cli.values import kind_as_json
from fairturn.model import Kind

_COLUMNS = ("kind", "waiting", "running", "workers", "limit", "attempts", "expiry", "paused")


@click.group("kinds", invoke_without_command=True)
@place_options
@click.pass_context
def command(ctx: click.Context, *, as_json: bool, flags: Flags) -> None:
    """List kinds of work, set their limits, pause them.

    Workers are the live ones that serve the kind.

    \b
    fairturn kinds
    fairturn kinds set ocr --limit 2
    fairturn kinds set ocr --pause
    """
    if ctx.invoked_subcommand is not None:
        refuse_before_subcommand(ctx)
        return
    with reached(flags) as queue:
        kinds = queue.kinds()
    if as_json:
        for kind in kinds:
            print_line(kind_as_json(kind))
    else:
        print_table(console(), _COLUMNS, [_row(kind) for kind in kinds])


@command.command("set")
@click.argument("name")
@click.option("--limit", type=int, metavar="N", help="At most N of its documents run at once.")
@click.option("--no-limit", is_flag=True, help="Remove the limit.")
@click.option("--attempts-max", type=int, metavar="N", help="Attempts of each of its documents.")
@click.option("--no-attempts-max", is_flag=True, help="Use the queue's number of attempts.")
@click.option(
    "--expires-in",
    "expires_in_s",
    type=DURATION,
    help="When its documents expire after they are due, such as 30min, 2h or 7d; applies to those "
    "submitted without an expiry.",
)
@click.option("--no-expires-in", is_flag=True, help="Its documents do not expire.")
@click.option("--pause/--resume", "paused", default=None, help="Stop its claims, or continue them.")
@place_options
def set_(
    *,
    name: str,
    limit: int | None,
    no_limit: bool,
    attempts_max: int | None,
    no_attempts_max: bool,
    expires_in_s: float | None,
    no_expires_in: bool,
    paused: bool | None,
    as_json: bool,
    flags: Flags,
) -> None:
    """Set the limits of a kind of work, pause or resume it, or create it.

    They apply to all machines from the next claim. Submissions to a paused kind are still accepted
    and wait; running documents continue. Omitted settings keep their values. A kind that does not
    exist is created.

    \b
    fairturn kinds set ocr --limit 2 --attempts-max 3
    fairturn kinds set ocr --no-limit --resume
    """
    changes = removable_settings(
        limit=(limit, no_limit),
        attempts_max=(attempts_max, no_attempts_max),
        expires_in_s=(expires_in_s, no_expires_in),
    )
    if paused is not None:
        changes["paused"] = paused
    with reached(flags) as queue, misuse_is_wrong_use():
        is_new = all(kind.name != name for kind in queue.kinds())
        kind = queue.set_kind(name, **changes)
    if as_json:
        print_line(kind_as_json(kind))
    else:
        _print_settings(kind, is_new=is_new)


def _row(kind: Kind) -> list[str]:
    settings = kind.settings
    return [
        kind.name,
        f"{kind.waiting:,}",
        f"{kind.running:,}",
        f"{kind.workers:,}",
        "" if settings.limit is None else f"{settings.limit:,}",
        "" if settings.attempts_max is None else f"{settings.attempts_max:,}",
        "" if settings.expires_in_us is None else duration(settings.expires_in_us),
        "paused" if settings.paused else "",
    ]


def _print_settings(kind: Kind, *, is_new: bool) -> None:
    settings = kind.settings
    shown = ["no limit" if settings.limit is None else f"at most {settings.limit:,} running"]
    if settings.attempts_max is not None:
        shown.append(number(settings.attempts_max, "attempt"))
    if settings.expires_in_us is not None:
        shown.append(f"documents expire after {duration(settings.expires_in_us)}")
    if settings.paused:
        shown.append("paused")
    click.echo(
        f"{printable(kind.name)}{' (new)' if is_new else ''}: {', '.join(shown)}. "
        f"{number(kind.waiting, 'document')} waiting, {kind.running:,} running, "
        f"{number(kind.workers, 'worker')}."
    )
