"""`fairturn work`: a worker that prints its outcomes."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.deadline import begin_deadline
from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.options import Flags, json_option, setting_options
from fairturn.cli.settings import WORKER, SettingValue, names_of, values_of
from fairturn.cli.target import QUEUE_OPTIONS, opened, settings_here
from fairturn.cli.terminal import ProgressCallback, duration, json_line, number, printable, progress
from fairturn.clock import SECOND_US, microseconds
from fairturn.model import (
    DEFAULT_KIND_NAME,
    FAILED,
    Advanced,
    Document,
    Failed,
    OutageReport,
    Outcome,
    Snoozed,
    State,
)

if TYPE_CHECKING:
    from fairturn.queue import Queue
    from fairturn.worker.events import DocumentEnded, Event, WorkerIdle
    from fairturn.worker.outcomes import WorkerTotals
    from fairturn.worker.worker import Worker

WORKER_OPTIONS = names_of(WORKER)
# Parameters of `Worker` whose names differ from their settings.
_PARAMETERS = {
    "memory_limit": "memory_limit_bytes",
    "file_limit": "file_limit_bytes",
    "kind": "kinds",
}
_BACKOFF = ("retry_first_s", "retry_factor", "retry_most_s")  # in the order of `Backoff`
_NO_HANDLER = """\
no handler: pass the function that processes each document.
For example, write invoices.py in this folder:

    def process(document):
        if document.is_payload:
            return {{"received": document.payload}}
        return {{"bytes": len(document.read())}}

and run:

    fairturn {command} invoices:process

Or set it with FAIRTURN_HANDLER, or with handler in [worker] of fairturn.toml."""


@click.command("work")
@click.option("--until-empty", is_flag=True, help="End when all documents have ended.")
@json_option
@setting_options(*WORKER_OPTIONS, *QUEUE_OPTIONS)
def command(*, until_empty: bool, as_json: bool, flags: Flags) -> None:
    """Process documents: run a handler on each, in the order of service.

    The handler is a function of a module in this folder, or of an installed one. It gets the
    document and returns its result; see docs/worker.md. The name of a registry (Handlers) runs the
    handler of each document's kind of work; see docs/pipelines.md.

    A line is printed for each attempt when it ends; with --concurrency 1 in the order of the
    claims. After Ctrl-C or SIGTERM, running documents finish; a second signal releases them.

    \b
    fairturn work invoices:process --concurrency 8 --time-limit 60
    fairturn work invoices:process --until-empty --concurrency 1 --json
    fairturn work pipeline:handlers --kind ocr
    """
    settings = settings_here(flags)
    refuse_no_handler(settings)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    with opened(flags, make=not until_empty) as queue:
        total = queue.summary().waiting if until_empty else None
        with progress("Working", total, beside_output=True) as advance:
            lines = EventPrinter(advance, as_json=as_json)
            worker = worker_of(queue, settings, lines.add, _warn)
            with redirect_stdout(sys.stderr):  # handlers in threads must not print among outcomes
                done = run_worker(worker, until_empty=until_empty)
    if not as_json:
        counts = (f"{n:,} {name}" for name, n in done._asdict().items() if n)
        click.echo(f"Attempts: {', '.join(counts) or 'none'}.", err=True)


def refuse_no_handler(settings: Mapping[str, SettingValue]) -> None:
    """End with an example if there is no handler: documents would complete unprocessed."""
    if settings["handler"].value is None:
        name = click.get_current_context().info_name
        raise click.UsageError(_NO_HANDLER.format(command=name))


def worker_of(
    queue: "Queue",
    settings: Mapping[str, SettingValue],
    on_event: "Callable[[Event], None]",
    warn: Callable[[str], None],
) -> "Worker":
    """Return a worker with the settings of [worker]. Stopping it starts the deadline."""
    from fairturn.worker.backoff import Backoff
    from fairturn.worker.worker import Worker

    values = values_of(WORKER, settings)

    class InterruptibleWorker(Worker):
        def stop(self, *, now: bool = False) -> None:
            begin_deadline(values["grace_s"], warn, now=now)
            super().stop(now=now)

    values["kind"] = values["kind"] or None
    values["retry"] = Backoff(*(values.pop(name) for name in _BACKOFF))
    given = {_PARAMETERS.get(name, name): value for name, value in values.items()}
    with misuse_is_wrong_use():
        return InterruptibleWorker(queue, on_event=on_event, **given)


def run_worker(worker: "Worker", *, until_empty: bool = False) -> "WorkerTotals":
    """Run the worker. A kind that the handlers do not register, which is found when a child has
    loaded them, is wrong use."""
    from fairturn.worker.kinds import InvalidKinds

    try:
        return worker.run(until_empty=until_empty)
    except InvalidKinds as error:
        wrong_use(str(error))


@contextmanager
def running(worker: "Worker", on_failure: Callable[[], None]) -> Iterator[None]:
    """Run the worker in a thread while the block runs. The block must stop the worker; if the block
    raises, the worker is stopped. If the worker fails, call `on_failure`, and raise its error after
    the block."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run_worker(worker)
        except BaseException as error:
            failed.append(error)
            on_failure()

    thread = threading.Thread(target=work, name="fairturn-worker")
    thread.start()
    try:
        yield
    except BaseException:
        worker.stop()
        raise
    finally:
        thread.join()
    if failed:
        raise failed[0]


class EventPrinter:
    """Prints the events of a worker: outcomes on standard output, the rest on standard error."""

    def __init__(
        self,
        advance: ProgressCallback,
        *,
        as_json: bool,
        outcomes: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._out = sys.stdout
        self._advance = advance
        self._as_json = as_json
        self._outcomes = outcomes
        self._warn = warn or _warn
        self._ended = 0
        self._claims: dict[str, int] = {}  # the claim numbers of running documents
        self._claimed = 0
        self._trouble: str | None = None  # the store's error that was printed last

    def add(self, event: "Event") -> None:
        from fairturn.worker import events

        match event:
            case events.DocumentClaimed():
                self._claimed += 1
                self._claims[event.document.id] = self._claimed
            case events.DocumentEnded() if self._outcomes:
                self._print_ended(event)
            case events.DocumentCancelled() if self._outcomes:
                self._print_cancelled(event.document)
            case events.DocumentLost():
                self._claims.pop(event.document.id, None)
                self._warn(f"{event.document.id}: the lease was lost; this attempt is discarded")
            case events.LinePrinted():
                self._warn(f"{event.document}: {event.line}" if event.document else event.line)
            case events.StoreFailed():
                if event.error != self._trouble:
                    self._trouble = event.error
                    error = event.error.removesuffix("; try again later")
                    self._warn(f"{error}. The worker keeps retrying.")
            case events.StoreRecovered():
                self._trouble = None
                away = duration(microseconds(event.away_s))
                self._warn(f"The queue answers again, after {away}.")
            case events.WorkerIdle():
                self._warn(_idle(event))
            case events.WorkerStopping():
                what = "releasing" if event.now else "finishing"
                more = ""
                if self._trouble and event.unrecorded:
                    outcomes = number(event.unrecorded, "outcome")
                    more = (
                        f" The queue does not answer: {outcomes} not recorded yet. The worker "
                        "retries until the grace period ends; then those documents run again."
                    )
                running = number(event.running, "document")
                self._warn(f"Stopping: {what} {running}.{more}")

    def _print_ended(self, event: "DocumentEnded") -> None:
        document, outcome = event.document, event.outcome
        claim = self._claims.pop(document.id, 0)
        if self._as_json:
            line = _json(
                document,
                claim=claim,
                outcome=_name_of(outcome),
                seconds=round(event.seconds, 6),
                error=_error_of(document, outcome),
                retry_in_s=_retry_s(document, outcome),
                next_kind=outcome.kind if isinstance(outcome, Advanced) else None,
            )
        elif _name_of(outcome) == "released" and not event.seconds:
            return  # it was prefetched and never started
        else:
            assert document.claimed_at_us is not None
            waited = duration(document.claimed_at_us - document.submitted_at_us)
            took = duration(microseconds(event.seconds))
            line = _line(document, f"waited {waited}, took {took}", _ending(document, outcome))
        self._print(line)
        self._ended += 1
        self._advance(self._ended)

    def _print_cancelled(self, document: Document) -> None:
        if self._as_json:
            self._print(_json(document))
        else:
            assert document.ended_at_us is not None
            waited = duration(document.ended_at_us - document.submitted_at_us)
            self._print(_line(document, f"waited {waited}", "cancelled"))

    def _print(self, line: str) -> None:
        self._out.write(f"{line}\n")
        self._out.flush()


def _name_of(outcome: Outcome) -> str:
    return "unavailable" if isinstance(outcome, OutageReport) else type(outcome).__name__.lower()


def _error_of(document: Document, outcome: Outcome) -> str | None:
    """Return the error of an attempt, or why the store refused its outcome."""
    if isinstance(outcome, Failed | OutageReport):
        return outcome.error
    return document.error if document.state is State.DEAD else None


def _retry_s(document: Document, outcome: Outcome) -> float | None:
    """Return after which delay the document waits again; None if it does not, or if the delay
    depends on an outage."""
    delay_us = None
    if isinstance(outcome, Failed):
        delay_us = outcome.retry_in_us
    elif isinstance(outcome, Snoozed):
        delay_us = outcome.delay_us
    return None if delay_us is None or document.ended else delay_us / SECOND_US


def _ending(document: Document, outcome: Outcome) -> str:
    """Return how an attempt ended, for people."""
    if document.state in FAILED:
        ending = document.state.value
    elif isinstance(outcome, Advanced):
        ending = f"advanced to {outcome.kind}"
    elif isinstance(outcome, OutageReport):
        ending = f"{printable(outcome.service or document.kind)} unavailable"
    else:
        ending = _name_of(outcome)
    retry_s = _retry_s(document, outcome)
    if retry_s is not None:
        ending += f", retry in {duration(microseconds(retry_s))}"
    error = _error_of(document, outcome)
    return f"{ending}: {printable(error)}" if error else ending


def _idle(event: "WorkerIdle") -> str:
    parts = (
        (event.waiting, "of customers or kinds that are paused, held or at their limit"),
        (event.delayed, "delayed"),
        (event.running, "running in other workers"),
    )
    left = ", ".join(f"{n:,} {what}" for n, what in parts if n)
    return f"No document can start now; waiting for: {left}. Press Ctrl-C to stop."


def _line(document: Document, times: str, ending: str) -> str:
    customer = printable(document.customer)
    kind = "" if document.kind == DEFAULT_KIND_NAME else f", {document.kind}"
    return f"{document.id}  priority {document.priority}{kind}  {times}  {customer}  {ending}"


def _json(document: Document, **attempt: Any) -> str:
    """Format an ended attempt; without its fields, a document cancelled before it started."""
    line = {
        "claim": None,
        "id": document.id,
        "customer": document.customer,
        "kind": document.kind,
        "step": document.step,
        "priority": document.priority,
        "count": document.count,
        "submitted_at": document.submitted_at_us,
        "claimed_at": document.claimed_at_us,
        "attempts": document.attempts,
        "outcome": None,
        "state": document.state.value,
        "seconds": None,
        "error": None,
        "retry_in_s": None,
        "next_kind": None,
    }
    return json_line(line | attempt)


def _warn(sentence: str) -> None:
    click.echo(printable(sentence), err=True)
