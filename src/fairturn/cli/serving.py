"""What `serve` and `up` have in common: the options of the service, and what must not be open."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.endings import Ending, wrong_use
from fairturn.cli.settings import Found
from fairturn.cli.terminal import json_line, printable
from fairturn.clock import SystemClock

if TYPE_CHECKING:  # loaded when a service is started
    from fairturn.demo.traffic import Pace
    from fairturn.queue import Queue
    from fairturn.service.running import Address, Server

NAMES = (
    "host",
    "port",
    "certificate",
    "private_key",
    "trusted_proxy",
    "size_limit",
    "rate",
    "positions",
    "customers_in_metrics",
)


def service_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of the service; the command gets them as one `service_flags`."""

    @wraps(command)
    def with_flags(*args: Any, **options: Any) -> Any:
        flags = {name: options.pop(name) for name in NAMES}
        flags["trusted_proxy"] = flags["trusted_proxy"] or None
        return command(*args, service_flags=flags, **options)

    for option in (
        click.option(
            "--customers-in-metrics", type=int, metavar="N", help="With numbers of their own; 0."
        ),
        click.option("--positions/--no-positions", default=None, help="Tell customers theirs."),
        click.option("--rate", metavar="RATE", help="Requests of one key; 6000/minute."),
        click.option("--size-limit", metavar="SIZE", help="Of one document; 8GiB."),
        click.option(
            "--trusted-proxy",
            multiple=True,
            metavar="ADDRESS",
            help="A proxy that speaks https; may be given several times.",
        ),
        click.option(
            "--private-key", type=click.Path(), metavar="FILE", help="Of the certificate."
        ),
        click.option("--certificate", type=click.Path(), metavar="FILE", help="To speak https."),
        click.option("--port", type=int, metavar="PORT", help="8750; 0 for any that is free."),
        click.option("--host", metavar="ADDRESS", help="Where to listen; 127.0.0.1."),
    ):
        with_flags = option(with_flags)
    return with_flags


def say(sentence: str, *, as_json: bool) -> None:
    """Tell whoever runs the service, in the form of everything else that it says."""
    line = {"event": "said", "at": SystemClock().now(), "message": sentence}
    click.echo(json_line(line) if as_json else printable(sentence), err=True)


def address_of(settings: Mapping[str, Found], queue: "Queue") -> "Address":
    """Where to listen, unless others could do there what only an operator may do."""
    from fairturn.keys import Keys
    from fairturn.service.running import Address

    address = Address(
        host=settings["host"].value,
        port=settings["port"].value,
        certificate=settings["certificate"].value,
        private_key=settings["private_key"].value,
        trusted_proxies=settings["trusted_proxy"].value,
    )
    _refuse_certificate(address)
    if not address.is_local and not Keys(queue.store).are_asked_for():
        wrong_use(
            f"without access keys everybody at {address.host} could do everything; make one "
            "first: fairturn keys make --role operator. Or listen at 127.0.0.1"
        )
    return address


def _refuse_certificate(address: "Address") -> None:
    """Before anything listens: the server itself would say it with a traceback."""
    import ssl

    certificate, private_key = address.certificate, address.private_key
    if certificate is None and private_key is None:
        return
    if certificate is None or private_key is None:
        wrong_use("to speak https, give both --certificate and --private-key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key)
    except OSError as error:
        wrong_use(
            f"the certificate {certificate} cannot be used with the private key {private_key}: "
            f"{error.strerror or error}"
        )


def make_server(
    queue: "Queue",
    settings: Mapping[str, Found],
    address: "Address",
    *,
    as_json: bool,
    open_page: bool = False,
    works: bool = False,
    demo: "Pace | None" = None,
    on_stopping: Callable[[bool], None] | None = None,
) -> "Server":
    """The server of a queue, which says where it listens."""
    try:
        from fairturn.page.mounting import install
        from fairturn.service.app import make_app
        from fairturn.service.logs import JsonFormatter, json_lines
        from fairturn.service.plan import Plan
        from fairturn.service.running import Server
    except ModuleNotFoundError as error:
        raise Ending(
            f"the service needs the package {error.name}: python -m pip install 'fairturn[service]'"
        ) from error
    from fairturn.keys import Keys

    plan = Plan(
        size_bytes_max=settings["size_limit"].value,
        rate=settings["rate"].value,
        show_positions=settings["positions"].value,
        customers_in_metrics=settings["customers_in_metrics"].value,
    )
    if as_json:
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(JsonFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[lines])
    app = make_app(queue, plan, on_served=json_lines(sys.stderr) if as_json else None)
    install(app, works=works, demo=demo)

    def started(url: str) -> None:
        say(f"Serving at {url} (the API: {url}/docs). Ctrl-C ends it.", as_json=as_json)
        if open_page:
            _open(url)
        if not Keys(queue.store).are_asked_for():
            first = "" if demo else " The first key: fairturn keys make --role operator"
            say(
                "There are no access keys: it listens at this machine alone, and whoever sits "
                f"there is the operator.{first}",
                as_json=as_json,
            )
        elif not address.is_local and not address.is_private:
            say(
                "Keys from other machines are refused here, because they would travel "
                "unencrypted: give --certificate and --private-key, or --trusted-proxy.",
                as_json=as_json,
            )

    return Server(app, address, on_started=started, on_stopping=on_stopping)


def _open(url: str) -> None:
    """Open the page, where there is a screen; a browser of a terminal is not meant."""
    import os
    import webbrowser

    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def run_server(server: "Server") -> None:
    """Serve until a signal."""
    try:
        server.run()
    except SystemExit:
        raise Ending(f"cannot listen at {server.config.host}:{server.config.port}") from None
    if not server.listening.is_set():
        raise Ending(f"cannot listen at {server.config.host}:{server.config.port}")
