"""What `serve` and `up` have in common: the options of the service, and what must not be open."""

import errno
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import Ending, wrong_use
from fairturn.cli.settings import SERVICE, Found, names_of, values_of
from fairturn.cli.terminal import json_line, printable
from fairturn.clock import SystemClock

if TYPE_CHECKING:  # loaded when a service is started
    from fairturn.demo.traffic import Pace
    from fairturn.queue import Queue
    from fairturn.service.server import Address, Server

SERVICE_OPTIONS = names_of(SERVICE)
GRACE_S = 30.0  # to finish requests in after a signal
# The parameters of the service that differ in name from their settings.
_PARAMETERS = {
    "trusted_proxy": "trusted_proxies",
    "size_limit": "size_bytes_max",
    "positions": "show_positions",
}


def say(sentence: str, *, as_json: bool) -> None:
    """Tell whoever runs the service, in the form of everything else that it says."""
    line = {"event": "said", "at": SystemClock().now(), "message": sentence}
    click.echo(json_line(line) if as_json else printable(sentence), err=True)


def address_of(settings: Mapping[str, Found], queue: "Queue") -> "Address":
    """Where to listen, unless others could do there what only an operator may do."""
    from fairturn.access.registry import Keys
    from fairturn.service.server import Address

    given = _parameters(settings)
    address = Address(**{field.name: given[field.name] for field in fields(Address)})
    _refuse_certificate(address)
    if not address.is_local and not Keys(queue.store).are_asked_for():
        wrong_use(
            f"without access keys everybody at {address.host} could do everything; make one "
            "first: fairturn keys make --role operator. Or listen at 127.0.0.1"
        )
    return address


def _parameters(settings: Mapping[str, Found]) -> dict[str, Any]:
    """Every setting of the service, by the name of its parameter there."""
    values = values_of(SERVICE, settings)
    return {_PARAMETERS.get(name, name): value for name, value in values.items()}


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
    grace_s: float,
    on_stopping: Callable[[bool], None],
    open_page: bool = False,
    works: bool = False,
    demo: "Pace | None" = None,
) -> "Server":
    """The server of a queue. It listens already, so that a port that is taken ends the command
    before a worker starts. While it starts it does not ask the store: a database that goes away
    then must not end it."""
    try:
        from fairturn.dashboard.routes import install
        from fairturn.service.app import make_app
        from fairturn.service.logs import JsonFormatter, json_lines
        from fairturn.service.options import Plan
        from fairturn.service.server import Server
    except ModuleNotFoundError as error:
        raise Ending(
            f"the service needs the package {error.name}: python -m pip install 'fairturn[service]'"
        ) from error
    from fairturn.access.registry import Keys

    of_the_address = {field.name for field in fields(address)}
    given = _parameters(settings).items()
    plan = Plan(**{name: value for name, value in given if name not in of_the_address})
    if as_json:
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(JsonFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[lines])
    keyed = Keys(queue.store).are_asked_for()
    app = make_app(queue, plan, on_served=json_lines(sys.stderr) if as_json else None)
    install(app, works=works, demo=demo)

    def started(url: str) -> None:
        say(f"Serving at {url} (the API: {url}/docs). Ctrl-C ends it.", as_json=as_json)
        if open_page:
            _open(url)
        if not keyed:
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

    server = Server(app, address, grace_s=grace_s, on_started=started, on_stopping=on_stopping)
    try:
        server.listen()
    except OSError as error:
        raise _not_listening(address, error) from None
    return server


def _not_listening(address: "Address", error: OSError) -> Exception:
    """What is wrong with an address where the service cannot listen, and what to do."""
    host, port = address.host, address.port
    if error.errno == errno.EADDRINUSE:
        return Ending(
            f"port {port} at {host} is in use; stop the program that listens there, or choose "
            "another port with --port (0 for any that is free)"
        )
    if error.errno == errno.EACCES:
        return Ending(
            f"this user may not listen at port {port}; choose one from 1024 on with --port"
        )
    why = (error.strerror or str(error)).lower()
    return click.UsageError(
        printable(f"{host} is no address of this machine ({why}); correct --host")
    )


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
    except SystemExit:  # uvicorn has logged why
        raise Ending("the service could not start") from None
