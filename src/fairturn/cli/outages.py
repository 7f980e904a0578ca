"""`fairturn outages`: list services that hold kinds of work; end a hold."""

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use
from fairturn.cli.options import Flags, refuse_before_subcommand
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import (
    console,
    duration,
    print_line,
    print_table,
    printable,
    timestamp,
)
from fairturn.clock import SystemClock
from fairturn.model import ServiceOutage
from fairturn.wire import OUTAGE, to_json

_COLUMNS = ("service", "kinds", "unavailable since", "next attempt", "probes", "error")
_TEXTS, _WORDS = (0, 1, 5), (2, 3)


@click.group("outages", invoke_without_command=True)
@place_options
@click.pass_context
def command(ctx: click.Context, *, as_json: bool, flags: Flags) -> None:
    """List unavailable services, resume the work that needs them.

    A service is held after reports of two documents. Then one document at a time tries it; its
    success resumes the work of all kinds that need the service.

    \b
    fairturn outages
    fairturn outages resume azure-ocr
    """
    if ctx.invoked_subcommand is not None:
        refuse_before_subcommand(ctx)
        return
    with reached(flags) as queue:
        outages = queue.outages()
    if as_json:
        for outage in outages:
            print_line(to_json(OUTAGE, outage))
    elif outages:
        now = SystemClock().now()
        rows = [_row(outage, now) for outage in outages]
        print_table(console(), _COLUMNS, rows, texts=_TEXTS, words=_WORDS)
    else:
        click.echo("No service is held.")


@command.command("resume")
@click.argument("service")
@place_options
def resume(*, service: str, as_json: bool, flags: Flags) -> None:
    """Resume the work of all kinds that need a service, without waiting for the next attempt.

    The number of running documents rises over some seconds. If the service is still unavailable,
    it is held again. A hold of one kind alone has the name kind:NAME.

    \b
    fairturn outages resume azure-ocr
    fairturn outages resume kind:export
    """
    with reached(flags) as queue, misuse_is_wrong_use():
        queue.resume(service)
    if as_json:
        print_line({"service": service, "resumed": True})
    else:
        click.echo(f"{printable(service)}: work resumes.")


def _row(outage: ServiceOutage, now: int) -> list[str]:
    return [
        outage.service,
        ", ".join(outage.kinds),
        timestamp(outage.began_at_us),
        _next_attempt(outage, now),
        f"{outage.probes:,}",
        outage.error,
    ]


def _next_attempt(outage: ServiceOutage, now: int) -> str:
    if outage.resumed_at_us is not None:
        return "work resumes"
    left = outage.probe_at_us - now
    return f"in {duration(left)}" if left > 0 else "now"
