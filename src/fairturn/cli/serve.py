"""`fairturn serve`: the queue over HTTP."""

from functools import partial

import click

from fairturn.cli.deadline import begin_deadline
from fairturn.cli.options import Flags, setting_options
from fairturn.cli.service_options import (
    GRACE_S,
    SERVICE_OPTIONS,
    address_of,
    make_server,
    run_server,
    say,
)
from fairturn.cli.target import QUEUE_OPTIONS, opened, settings_here


@click.command("serve")
@click.option("--json", "as_json", is_flag=True, help="Log requests as JSON Lines.")
@setting_options(*QUEUE_OPTIONS, *SERVICE_OPTIONS)
def command(*, as_json: bool, flags: Flags) -> None:
    """Serve the queue over HTTP.

    Without access keys it listens only on a loopback address, and the URL that it prints contains
    a token, which every request needs. Start workers with fairturn work, or run both in one
    command: fairturn up. After Ctrl-C or SIGTERM, requests in flight finish. See docs/http.md.

    \b
    fairturn serve
    fairturn serve --host 0.0.0.0 --trusted-proxy 10.0.0.7
    """
    settings = settings_here(flags)
    with opened(flags, make=True) as queue:
        address = address_of(settings, queue)
        server = make_server(
            queue,
            settings,
            address,
            as_json=as_json,
            grace_s=GRACE_S,
            on_stopping=lambda now: begin_deadline(GRACE_S, partial(say, as_json=as_json), now=now),
        )
        run_server(server)
