"""`fairturn work`: a worker, and what it does as lines."""

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.deadline import Deadline
from fairturn.cli.exit_codes import misuse_is_wrong_use
from fairturn.cli.options import json_option, setting_options
from fairturn.cli.settings import WORKER, Found, names_of, values_of
from fairturn.cli.target import QUEUE_OPTIONS, opened, settings_here
from fairturn.cli.terminal import Progress, duration, json_line, number, printable, progress
from fairturn.clock import SECOND_US, microseconds

if TYPE_CHECKING:  # loaded when a worker is started
    from fairturn.model import Document, Outcome
    from fairturn.queue import Queue
    from fairturn.worker import Worker
    from fairturn.worker.events import DocumentEnded, Event, Idle

WORKER_OPTIONS = names_of(WORKER)
_PARAMETERS = {"memory_limit": "memory_limit_bytes"}  # of `Worker`, where the name differs
_DELAYS = ("retry_first_s", "retry_factor", "retry_most_s")  # in the order of `Delays`
_NO_HANDLER = """\
no handler: name the function that processes each document.
For example, write invoices.py in this folder:

    def process(document):
        if document.is_payload:
            return {{"received": document.payload}}
        return {{"bytes": len(document.read())}}

and run:

    fairturn {command} invoices:process

FAIRTURN_HANDLER, or handler in [worker] of fairturn.toml, can name it too."""


@click.command("work")
@click.option("--until-empty", is_flag=True, help="End when nothing waits, is delayed or runs.")
@json_option
@setting_options(*WORKER_OPTIONS, *QUEUE_OPTIONS)
def command(*, until_empty: bool, as_json: bool, flags: Mapping[str, Any]) -> None:
    """Work on documents: run a handler on each, in the order of service.

    The handler is a function of a module in this folder, or of one that is installed. It gets the
    document and returns its result; docs/worker.md tells all about it.

    A line is printed for each attempt when it has ended; with --concurrency 1 that is the order
    of the claims. Ctrl-C or SIGTERM: finish what runs; a second time: give it back now.

    \b
    fairturn work invoices:process --concurrency 8 --time-limit 60
    fairturn work invoices:process --until-empty --concurrency 1 --json
    """
    settings = settings_here(flags)
    refuse_no_handler(settings)
    sys.path.insert(0, str(Path.cwd()))  # where `python -m` would look too
    with opened(flags, make=not until_empty) as queue:
        total = queue.summary().waiting if until_empty else None
        with progress("Working", total, beside_output=True) as advance:
            lines = Lines(advance, as_json=as_json)
            deadline = Deadline(settings["grace_s"].value, _warn)
            worker = worker_of(queue, settings, lines.add, deadline)
            with redirect_stdout(sys.stderr):  # what handlers in threads print is not an outcome
                done = worker.run(until_empty=until_empty)
    if not as_json:
        counts = (f"{n:,} {name}" for name, n in done._asdict().items() if n)
        click.echo(f"Attempts: {', '.join(counts) or 'none'}.", err=True)


def refuse_no_handler(settings: Mapping[str, Found]) -> None:
    """End with an example if no handler is named: without one, documents would be completed
    without being processed."""
    if settings["handler"].value is None:
        name = click.get_current_context().info_name
        raise click.UsageError(_NO_HANDLER.format(command=name))


def worker_of(
    queue: "Queue",
    settings: Mapping[str, Found],
    on_event: "Callable[[Event], None]",
    deadline: Deadline,
) -> "Worker":
    """A worker to which every setting of the worker applies. The deadline begins when the worker
    is asked to stop, by a signal for example."""
    from fairturn.worker import Worker
    from fairturn.worker.backoff import Delays

    class Stoppable(Worker):
        def stop(self, *, now: bool = False) -> None:
            deadline.begin(now=now)
            super().stop(now=now)

    values = values_of(WORKER, settings)
    values["retry"] = Delays(*(values.pop(name) for name in _DELAYS))
    given = {_PARAMETERS.get(name, name): value for name, value in values.items()}
    with misuse_is_wrong_use():
        return Stoppable(queue, on_event=on_event, **given)


class Lines:
    """Turns what happens in a worker into lines: outcomes on standard output, the rest on standard
    error."""

    def __init__(
        self,
        advance: Progress,
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
        self._claims: dict[str, int] = {}  # of what runs: the number of its claim here
        self._claimed = 0
        self._trouble: str | None = None  # why the queue did not answer, as it was told last

    def add(self, event: "Event") -> None:
        """Print what is worth a line."""
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
                self._warn(
                    f"{event.document.id}: the lease was lost; nothing of this attempt counts"
                )
            case events.LinePrinted():
                self._warn(f"{event.document}: {event.line}" if event.document else event.line)
            case events.StoreFailed():
                if event.error != self._trouble:
                    self._trouble = event.error
                    said = event.error.removesuffix("; try again later")
                    self._warn(f"{said}. The worker goes on by itself when it can.")
            case events.StoreAnswers():
                self._trouble = None
                away = duration(microseconds(event.away_s))
                self._warn(f"The queue answers again, after {away}.")
            case events.Idle():
                self._warn(_idle(event))
            case events.Stopping():
                what = "ending" if event.now else "finishing"
                more = ""
                if self._trouble and event.unrecorded:
                    outcomes = number(event.unrecorded, "outcome")
                    more = (
                        f" The queue does not answer: {outcomes} not recorded yet. The worker "
                        "retries until the grace period is over; then those documents run again."
                    )
                running = number(event.running, "document")
                self._warn(f"Stopping: {what} what runs ({running}).{more}")

    def _print_ended(self, event: "DocumentEnded") -> None:
        document = event.document
        claim = self._claims.pop(document.id, 0)
        state = document.state.value
        name, error, retry_in_s = _told(event.outcome)
        if state in ("dead", "cancelled"):
            retry_in_s = None
        if self._as_json:
            line = _for_programs(
                document,
                claim=claim,
                outcome=name,
                seconds=round(event.seconds, 6),
                error=error,
                retry_in_s=retry_in_s,
            )
        elif name == "released" and not event.seconds:
            return  # it was claimed ahead, and nothing has happened to it
        else:
            words = _ending(name, state, retry_in_s)
            line = _for_people(document, words, error, event.seconds)
        self._print(line)
        self._ended += 1
        self._advance(self._ended)

    def _print_cancelled(self, document: "Document") -> None:
        if self._as_json:
            self._print(_for_programs(document))
        else:
            assert document.ended_at is not None
            waited = duration(document.ended_at - document.submitted_at)
            self._print(_line(document, f"waited {waited}", "cancelled"))

    def _print(self, line: str) -> None:
        self._out.write(f"{line}\n")
        self._out.flush()


def _ending(name: str, state: str, retry_in_s: float | None) -> str:
    """How an attempt ended, in the words that matter to who looks on."""
    if state in ("dead", "cancelled"):
        return state
    if retry_in_s is not None:
        return f"{name}, again in {duration(microseconds(retry_in_s))}"
    return name


def _idle(event: "Idle") -> str:
    parts = (
        (event.waiting, "of customers that are paused or at their limit"),
        (event.delayed, "delayed"),
        (event.running, "running in other workers"),
    )
    left = ", ".join(f"{n:,} {what}" for n, what in parts if n)
    return f"Nothing can start now; waiting for documents: {left}. Ctrl-C ends the wait."


def _told(outcome: "Outcome") -> tuple[str, str | None, float | None]:
    """An outcome in a word; and why and for how long, if it failed."""
    from fairturn.model import Failed

    if isinstance(outcome, Failed):
        retry = outcome.retry_in_us
        return "failed", outcome.error, None if retry is None else retry / SECOND_US
    return type(outcome).__name__.lower(), None, None


def _for_people(document: "Document", ending: str, error: str | None, seconds: float) -> str:
    assert document.claimed_at is not None
    waited = duration(document.claimed_at - document.submitted_at)
    took = duration(microseconds(seconds))
    why = f": {printable(error)}" if error else ""
    return _line(document, f"waited {waited}, took {took}", f"{ending}{why}")


def _line(document: "Document", times: str, ending: str) -> str:
    customer = printable(document.customer)
    return f"{document.id}  priority {document.priority}  {times}  {customer}  {ending}"


def _for_programs(
    document: "Document",
    *,
    claim: int | None = None,
    outcome: str | None = None,
    seconds: float | None = None,
    error: str | None = None,
    retry_in_s: float | None = None,
) -> str:
    """An attempt that has ended; without an outcome, a document that was cancelled before one."""
    return json_line(
        {
            "claim": claim,
            "id": document.id,
            "customer": document.customer,
            "priority": document.priority,
            "count": document.count,
            "submitted_at": document.submitted_at,
            "claimed_at": document.claimed_at,
            "attempts": document.attempts,
            "outcome": outcome,
            "state": document.state.value,
            "seconds": seconds,
            "error": error,
            "retry_in_s": retry_in_s,
        }
    )


def _warn(sentence: str) -> None:
    click.echo(printable(sentence), err=True)
