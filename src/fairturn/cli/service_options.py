"""The options of the service and its server, for `serve` and `up`."""

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import CommandExit, wrong_use
from fairturn.cli.settings import SERVICE, SettingValue, names_of, values_of
from fairturn.cli.terminal import json_line, printable
from fairturn.clock import SystemClock

if TYPE_CHECKING:
    from fairturn.queue import Queue
    from fairturn.service.server import ListenAddress, Server
    from fairturn.simulator.demo.traffic import DemoPace

SERVICE_OPTIONS = names_of(SERVICE)
GRACE_S = 30.0  # for requests in flight, after a signal
# Parameters of the service whose names differ from their settings.
_PARAMETERS = {
    "trusted_proxy": "trusted_proxies",
    "size_limit": "size_bytes_max",
    "positions": "show_positions",
}


def say(sentence: str, *, as_json: bool) -> None:
    """Print a message on standard error, as a JSON line if requests are logged as JSON."""
    line = {"event": "said", "at": SystemClock().now(), "message": sentence}
    click.echo(json_line(line) if as_json else printable(sentence), err=True)


def address_of(settings: Mapping[str, SettingValue], queue: "Queue") -> "ListenAddress":
    """Return the address to listen on. Without access keys, every address but a loopback one is a
    usage error: all clients would have an operator's permissions."""
    from fairturn.service.server import ListenAddress

    given = _parameters(settings)
    address = ListenAddress(**{field.name: given[field.name] for field in fields(ListenAddress)})
    _refuse_certificate(address)
    if not address.is_local and not queue.keys.are_required():
        wrong_use(
            "without access keys every client would have operator permissions on "
            f"{address.host}; create one first: fairturn keys make --role operator. "
            "Or listen on 127.0.0.1"
        )
    return address


def _parameters(settings: Mapping[str, SettingValue]) -> dict[str, Any]:
    """Return every setting of the service by the name of its parameter."""
    values = values_of(SERVICE, settings)
    return {_PARAMETERS.get(name, name): value for name, value in values.items()}


def _refuse_certificate(address: "ListenAddress") -> None:
    """Check the certificate before the server loads it, because the server would exit with a
    traceback."""
    import ssl

    certificate, private_key = address.certificate, address.private_key
    if certificate is None and private_key is None:
        return
    if certificate is None or private_key is None:
        wrong_use("https needs both --certificate and --private-key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key)
    except OSError as error:
        wrong_use(
            f"the certificate {certificate} cannot be used with the private key {private_key}: "
            f"{error.strerror or error}"
        )


def make_server(
    queue: "Queue",
    settings: Mapping[str, SettingValue],
    address: "ListenAddress",
    *,
    as_json: bool,
    grace_s: float,
    on_stopping: Callable[[bool], None],
    open_page: bool = False,
    works: bool = False,
    demo: "DemoPace | None" = None,
) -> "Server":
    """Return the server of a queue, already listening: if the port is in use, the command ends
    before a worker starts. The server itself starts without a call to the store, so that an outage
    of the database does not end it."""
    from fairturn.access.registry import random_key

    try:
        from fairturn.dashboard.routes import install
        from fairturn.service.app import make_app
        from fairturn.service.logs import LogFormatter, json_lines
        from fairturn.service.options import ServiceLimits
        from fairturn.service.server import Server, tune_interpreter
    except ModuleNotFoundError as error:
        raise CommandExit(
            f"the service needs the package {error.name}; install it with: python -m pip install "
            "'fairturn[service]'"
        ) from error

    of_the_address = {field.name for field in fields(address)}
    given = _parameters(settings).items()
    limits = ServiceLimits(**{name: value for name, value in given if name not in of_the_address})
    if as_json:
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(LogFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[lines])
    token = None if queue.keys.are_required() else random_key()
    on_served = json_lines(sys.stderr) if as_json else None
    app = make_app(queue, limits, on_served=on_served, token=token)
    install(app, works=works, demo=demo)

    def started(url: str) -> None:
        tune_interpreter()
        page = url if token is None else f"{url}/login?token={token}"
        say(f"Serving at {page} (API: {url}/docs). Press Ctrl-C to stop.", as_json=as_json)
        if open_page:
            _open(page)
        if token is not None:
            first = "" if demo else " Create one: fairturn keys make --role operator"
            say(
                "There are no access keys: the service listens only on this machine and requires "
                f"the token in that URL, which changes with every start.{first}",
                as_json=as_json,
            )
        elif not address.is_local and not address.is_private:
            say(
                "Access keys from other machines are rejected, because they would be sent "
                "unencrypted; pass --certificate and --private-key, or --trusted-proxy.",
                as_json=as_json,
            )

    server = Server(app, address, grace_s=grace_s, on_started=started, on_stopping=on_stopping)
    try:
        server.listen()
    except OSError as error:
        raise _not_listening(address, error) from None
    return server


def _not_listening(address: "ListenAddress", error: OSError) -> Exception:
    """Return the error for an address that the service cannot listen on."""
    host, port = address.host, address.port
    if error.errno == errno.EADDRINUSE:
        return CommandExit(
            f"port {port} at {host} is in use; stop the program that listens there, or choose "
            "another port with --port (0 for a free one)"
        )
    if error.errno == errno.EACCES:
        return CommandExit(
            f"this user may not listen on port {port}; choose one from 1024 on with --port"
        )
    why = error.strerror or str(error)
    # For these, `socket.create_server` adds the address to `strerror`.
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        why = os.strerror(error.errno)
    return click.UsageError(
        printable(f"{host} is not an address of this machine ({why.lower()}); correct --host")
    )


def _open(url: str) -> None:
    """Open the page in a browser if there is a display; never in a text browser."""
    import webbrowser

    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def run_server(server: "Server") -> None:
    try:
        server.run()
    except SystemExit:  # uvicorn has logged why
        raise CommandExit("the service could not start") from None
