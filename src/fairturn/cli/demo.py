"""`fairturn demo`: a bulk upload beside quiet customers, with a real queue and real workers."""

import signal
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fairturn.cli.exit_codes import CommandExit
from fairturn.cli.options import json_option
from fairturn.cli.terminal import console, duration, number, print_line, print_table
from fairturn.cli.work import running
from fairturn.clock import SystemClock, microseconds

if TYPE_CHECKING:  # loaded when the demo runs
    from fairturn.cli.lanes import WorkerProgress
    from fairturn.queue import Queue
    from fairturn.simulator.demo.traffic import TrafficSender
    from fairturn.worker.worker import Worker

WORKERS = 2
_FRAME_S, _LINE_S = 0.125, 5.0
_PERCENTS = (50, 99)
_FIFO, _LEVELS, _FAIR = "first come first served", "nine levels alone", "fair"


@click.command("demo")
@click.option(
    "--documents",
    type=click.IntRange(1, 100_000),
    default=2_000,
    metavar="N",
    help="The size of the bulk upload.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3_600),
    default=26.0,
    metavar="S",
    help="How long the quiet customers send.",
)
@json_option
def command(*, documents: int, seconds: float, as_json: bool) -> None:
    """Run a demo of fair turns, in half a minute.

    One customer submits 2,000 documents of 20 ms at once, and ten quiet customers send about one a
    second, with a real queue in a temporary file and two real workers. At the end the demo compares
    the waits of the quiet customers with simulations of the same arrivals in two other orders.

    The reset interval is 10 s instead of 25 minutes; the customer pine pauses for longer than that,
    and its count is reset.

    \b
    fairturn demo
    """
    from fairturn.cli.lanes import WorkerProgress
    from fairturn.queue import Queue
    from fairturn.simulator.demo import traffic
    from fairturn.worker.worker import Worker

    sendings = traffic.schedule(documents=documents, seconds=seconds)
    with _interruptible(), tempfile.TemporaryDirectory(prefix="fairturn-demo-") as folder:
        file = Path(folder) / "demo.db"
        with Queue(file, reset_interval_s=traffic.RESET_INTERVAL_S) as queue:
            watched = WorkerProgress()
            worker = Worker(
                queue,
                "fairturn.simulator.demo.handler:rest",
                concurrency=WORKERS,
                on_event=watched.add,
            )
            sender = traffic.TrafficSender(queue, sendings)
            total = sum(sending.documents for sending in sendings)
            with _display(queue, watched, total, as_json=as_json) as show:
                _run(worker, sender, lambda: watched.completed == total, show)
            _report(queue, watched, as_json=as_json)


# ── While it runs ────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the block on Ctrl-C, SIGTERM and SIGHUP. Further signals are
    ignored, so that the worker ends and the temporary folder is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    worker: "Worker",
    sender: "TrafficSender",
    all_done: Callable[[], bool],
    show: Callable[[float], None],
) -> None:
    """Run the worker and the sender until both are done."""
    failed = threading.Event()
    with running(worker, failed.set):
        try:
            with sender.sending() as passed_s:
                while not failed.is_set() and not (sender.done and all_done()):
                    if sender.error is not None:
                        raise sender.error
                    show(passed_s())
                    failed.wait(_FRAME_S)
                if not failed.is_set():
                    show(passed_s())
        finally:
            worker.stop(now=True)


@contextmanager
def _display(
    queue: "Queue", watched: "WorkerProgress", total: int, *, as_json: bool
) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the current state: a picture on a terminal, otherwise lines."""
    from fairturn.cli.lanes import LanesPicture
    from fairturn.simulator.demo.traffic import BULK, QUIET

    if as_json or not sys.stdout.isatty():
        next_s = 0.0

        def line(passed_s: float) -> None:
            nonlocal next_s
            if passed_s >= next_s and not as_json:
                next_s = passed_s + _LINE_S
                waiting = queue.summary().waiting
                click.echo(f"{passed_s:4.0f} s: {waiting:,} waiting, {watched.completed:,} done")

        yield line
        return
    from rich.live import Live

    out = console()
    clock = SystemClock()
    picture = LanesPicture(QUIET, BULK)
    with Live(console=out, auto_refresh=False) as live:

        def frame(passed_s: float) -> None:
            customers = {customer.name: customer for customer in queue.customers().customers}
            title = (
                f"{passed_s:4.0f} s: {watched.completed:,} of {total:,} documents done by "
                f"{WORKERS} workers (reset interval: 10 s)"
            )
            now, width = clock.now(), out.width
            drawn = picture.draw(title, customers, watched, now=now, width=width)
            live.update(drawn, refresh=True)

        yield frame


# ── At the end ───────────────────────────────────────────────────────────────────────────────────


def _report(queue: "Queue", watched: "WorkerProgress", *, as_json: bool) -> None:
    """Print the waits of the quiet customers in three orders."""
    waits = {
        _FIFO: _simulated(queue, watched, fifo=True),
        _LEVELS: _simulated(queue, watched, fifo=False),
        _FAIR: _served(watched),
    }
    found = {name: {p: _percentile(us, p) for p in _PERCENTS} for name, us in waits.items()}
    if as_json:
        for name, percentiles in found.items():
            of = {f"wait_s_p{p}": us / 1_000_000 for p, us in percentiles.items()}
            print_line({"order": name, "simulated": name != _FAIR, **of})
        return
    out = console()
    out.print(
        f"\nWaits of the quiet customers "
        f"({number(len(waits[_FAIR]), 'document')}, the same arrivals in each column):\n"
    )
    columns = ("", f"{_FIFO} (simulated)", f"{_LEVELS} (simulated)", f"{_FAIR} (measured)")
    rows = [[f"p{p}", *(duration(found[name][p]) for name in found)] for p in _PERCENTS]
    print_table(out, columns, rows)
    out.print(f"\n{closing_words(found)}")


def closing_words(found: Mapping[str, Mapping[int, int]]) -> str:
    """Return the conclusions that the percentiles of the three orders support."""
    from fairturn.simulator.demo.traffic import DOCUMENT_S, QUIET

    fifo, levels, fair = found[_FIFO], found[_LEVELS], found[_FAIR]
    one_of_each_us = microseconds(DOCUMENT_S) * (len(QUIET) + 1)
    sentences = []
    if fifo[50] > 10 * one_of_each_us:
        sentences.append("First come, first served: every customer waits for the whole upload.")
    if fifo[99] > levels[99] > 2 * fair[99]:
        sentences.append(
            "The nine levels help only until a quiet customer has sent 20 documents and sinks to "
            "level 9 too."
        )
    if fair[99] <= one_of_each_us < fifo[99]:
        sentences.append(
            "In turns, no customer waits for more than one document of each of the others."
        )
    return " ".join(sentences) or (
        "The orders differ little: the upload was too small, or the time too short, for the order "
        "to matter. Run the demo without --documents and --seconds."
    )


def _served(watched: "WorkerProgress") -> list[int]:
    from fairturn.simulator.demo.traffic import QUIET

    return sorted(us for name in QUIET for us in watched.waits.get(name, []))


def _simulated(queue: "Queue", watched: "WorkerProgress", *, fifo: bool) -> list[int]:
    """Return the simulated waits of the quiet customers for the same documents in another order.
    Run times are those measured; the overhead of a queue is left out, in favour of that order."""
    from fairturn.scheduling.flows import Mode
    from fairturn.simulator.baselines import Line, first_come
    from fairturn.simulator.demo.traffic import QUIET
    from fairturn.simulator.history import trace_of
    from fairturn.simulator.orders import Order, RealOrder
    from fairturn.simulator.plan import Plan
    from fairturn.simulator.replay import serve

    newest_first = list(queue.iterate(states=["completed"]))
    trace = trace_of(newest_first)
    trace.cost = array("q", (watched.took_us[document.id] for document in newest_first[::-1]))
    order: Order = Line(first_come) if fifo else RealOrder(mode=Mode.LEVELS)
    run = serve(trace, order, rule=queue.settings.rule, plan=Plan(workers=WORKERS))
    quiet = {number for number, name in enumerate(trace.names) if name in QUIET}
    documents = (n for n, customer in enumerate(trace.customer) if customer in quiet)
    return sorted(run.started_at[n] - trace.at[n] for n in documents)


def _percentile(ordered: list[int], percent: int) -> int:
    from fairturn.simulator.measures import percentile

    if not ordered:
        raise CommandExit(
            "no quiet customer sent a document; run the demo for longer: --seconds 10"
        )
    return percentile(ordered, percent)
