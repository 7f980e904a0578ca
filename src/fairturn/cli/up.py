"""`fairturn up`: the service and a worker in one command."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fairturn.cli.exit_codes import wrong_use
from fairturn.cli.options import Flags, setting_options
from fairturn.cli.service_options import SERVICE_OPTIONS, address_of, make_server, run_server, say
from fairturn.cli.target import QUEUE_OPTIONS, opened, settings_here
from fairturn.cli.work import WORKER_OPTIONS, EventPrinter, refuse_no_handler, running, worker_of

if TYPE_CHECKING:
    from fairturn.queue import Queue

DEMO_S = 3_600.0
# Slower than `fairturn demo`, and repeated, so that the page shows it at any time.
DEMO_DOCUMENT_S, DEMO_AGAIN_S = 0.33, 1_200.0


@click.command("up")
@click.option("--demo", is_flag=True, help="Run a demo in a temporary queue.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Log requests as JSON Lines.")
@setting_options(*WORKER_OPTIONS, *QUEUE_OPTIONS, *SERVICE_OPTIONS)
def command(*, demo: bool, open_page: bool, as_json: bool, flags: Flags) -> None:
    """Run the service and a worker.

    It serves the queue over HTTP, as fairturn serve does, and runs the handler on each document, as
    fairturn work does. After Ctrl-C or SIGTERM, requests in flight and running documents finish; a
    second signal ends the command at once.

    \b
    fairturn up invoices:process
    fairturn up --demo
    """
    if demo and (flags["handler"] is not None or flags["database"] is not None):
        wrong_use("--demo has its own handler and queue; leave out MODULE:FUNCTION and --database")
    with ExitStack() as stack:
        if demo:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fairturn-demo-"))
            file = str(Path(folder) / "demo.db")
            flags = {**flags, "database": file, "handler": "fairturn.simulator.demo.handler:rest"}
        settings = settings_here(flags)
        refuse_no_handler(settings)
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        queue = stack.enter_context(opened(flags, make=True))
        address = address_of(settings, queue)
        warn = partial(say, as_json=as_json)
        lines = EventPrinter(
            lambda done, total=None: None, as_json=as_json, outcomes=as_json, warn=warn
        )
        worker = worker_of(queue, settings, lines.add, warn)
        pace = None
        if demo:
            from fairturn.simulator.demo.traffic import DemoPace

            pace = DemoPace(DEMO_DOCUMENT_S, settings["concurrency"].value)
        server = make_server(
            queue,
            settings,
            address,
            as_json=as_json,
            open_page=open_page,
            works=True,
            demo=pace,
            grace_s=settings["grace_s"].value,
            on_stopping=lambda now: worker.stop(now=now),
        )
        # Handlers in threads must not print among the outcomes. The server stops the worker: a
        # second stop would end running handlers at once.
        with redirect_stdout(sys.stderr), running(worker, server.stop):
            if demo:
                stack.enter_context(_traffic(queue))
            run_server(server)


@contextmanager
def _traffic(queue: "Queue") -> Iterator[None]:
    """Send the traffic of the demo while the block runs."""
    from fairturn.simulator.demo import traffic

    queue.configure(reset_interval_s=traffic.SHORT_RESET_INTERVAL_S)
    sendings = traffic.schedule(documents=2_000, seconds=DEMO_S, again_s=DEMO_AGAIN_S)
    sender = traffic.TrafficSender(queue, sendings, document_s=DEMO_DOCUMENT_S)
    with sender.sending():
        yield
