"""`fairturn serve`: the queue over HTTP."""

from collections.abc import Mapping
from typing import Any

import click

from fairturn.cli.opening import opened, queue_options, settings_here
from fairturn.cli.serving import address_of, make_server, run_server, service_options


@click.command("serve")
@click.option("--json", "as_json", is_flag=True, help="Log requests as JSON Lines.")
@service_options
@queue_options
def command(*, as_json: bool, flags: Mapping[str, Any], service_flags: Mapping[str, Any]) -> None:
    """Serve the queue over HTTP.

    Without access keys it listens only where this machine alone can reach it. Workers run on their
    own: fairturn work; or both in one command: fairturn up. Ctrl-C or SIGTERM: finish what is being
    answered. docs/http.md tells all about it.

    \b
    fairturn serve
    fairturn serve --host 0.0.0.0 --trusted-proxy 10.0.0.7
    """
    settings = settings_here({**flags, **service_flags})
    with opened(flags, make=True) as queue:
        address = address_of(settings, queue)
        run_server(make_server(queue, settings, address, as_json=as_json))
