"""`fairturn up`: the service and a worker in one command."""

import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.endings import misuse_is_wrong_use, wrong_use
from fairturn.cli.opening import opened, queue_options, settings_here
from fairturn.cli.serving import address_of, make_server, run_server, say, service_options
from fairturn.cli.work import WITHOUT_A_HANDLER, Lines

if TYPE_CHECKING:
    from fairturn.demo.traffic import Pace
    from fairturn.queue import Queue
    from fairturn.worker import Worker

DEMO_S = 3_600.0
# Slower than in a terminal, and again: whoever opens the page is to find it going on.
DEMO_DOCUMENT_S, DEMO_AGAIN_S = 0.33, 1_200.0


@click.command("up")
@click.argument("handler", required=False, metavar="[MODULE:FUNCTION]")
@click.option("--demo", is_flag=True, help="With a dump beside quiet customers, in a new queue.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="Documents at once; 4.")
@click.option("--json", "as_json", is_flag=True, help="Log requests as JSON Lines.")
@service_options
@queue_options
def command(
    *,
    handler: str | None,
    demo: bool,
    open_page: bool,
    concurrency: int | None,
    as_json: bool,
    flags: Mapping[str, Any],
    service_flags: Mapping[str, Any],
) -> None:
    """Serve and work: all that a small installation needs.

    It serves the queue over HTTP, as fairturn serve does, and runs the handler on each document, as
    fairturn work does. Ctrl-C or SIGTERM: finish what is being answered and what runs; a second
    time: end now.

    \b
    fairturn up invoices:extract
    fairturn up --demo
    """
    if demo and (handler is not None or flags["database"] is not None):
        wrong_use("--demo has a handler and a queue of its own; leave the others out")
    with ExitStack() as stack:
        if demo:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fairturn-demo-"))
            flags = {**flags, "database": str(Path(folder) / "demo.db")}
            handler = "fairturn.handlers:rest"
        settings = settings_here(
            {**flags, **service_flags, "handler": handler, "concurrency": concurrency}
        )
        sys.path.insert(0, str(Path.cwd()))  # where `python -m` would look too
        queue = stack.enter_context(opened(flags, make=True))
        address = address_of(settings, queue)
        chosen: str | None = settings["handler"].value
        if chosen is None:
            say(
                "No handler was named: documents are COMPLETED WITHOUT BEING PROCESSED, and only "
                "their size is noted. To process them: fairturn up MODULE:FUNCTION",
                as_json=as_json,
            )
        from fairturn.worker import Worker

        with misuse_is_wrong_use():
            worker = Worker(
                queue,
                chosen or WITHOUT_A_HANDLER,
                concurrency=settings["concurrency"].value,
                grace_s=settings["grace_s"].value,
                lease_s=settings["lease_s"].value,
                on_event=Lines(
                    queue,
                    _no_progress,
                    as_json=as_json,
                    outcomes=as_json,
                    warn=partial(say, as_json=as_json),
                ).add,
            )
        server = make_server(
            queue,
            settings,
            address,
            as_json=as_json,
            open_page=open_page,
            works=True,
            demo=_pace(settings["concurrency"].value) if demo else None,
            on_stopping=lambda now: worker.stop(now=now),
        )
        with _working(worker, server.stop):
            if demo:
                stack.enter_context(_traffic(queue))
            run_server(server)


def _no_progress(done: int, total: int | None = None) -> None:
    """Nobody looks at a bar: the service says how things are."""


@contextmanager
def _working(worker: "Worker", stop_serving: Any) -> Iterator[None]:
    """The worker in a thread of its own; if it ends by an error, so does the whole command."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            worker.run()
        except BaseException as error:
            failed.append(error)
            stop_serving()

    thread = threading.Thread(target=work, name="fairturn-worker")
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()
    if failed:
        raise failed[0]


def _pace(workers: int) -> "Pace":
    """How fast the documents of the demo are worked off."""
    from fairturn.demo.traffic import Pace

    return Pace(DEMO_DOCUMENT_S, workers)


@contextmanager
def _traffic(queue: "Queue") -> Iterator[None]:
    """What the demo sends, while the block runs."""
    from fairturn.demo import traffic

    queue.configure(reset_interval_s=traffic.SHORT_RESET_INTERVAL_S)
    sendings = traffic.schedule(documents=2_000, seconds=DEMO_S, again_s=DEMO_AGAIN_S)
    sender = traffic.Sender(queue, sendings, document_s=DEMO_DOCUMENT_S)
    with sender.sending():
        yield
