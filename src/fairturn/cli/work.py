"""`fairturn work`: a worker, and what it does as lines."""

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.endings import misuse_is_wrong_use
from fairturn.cli.opening import opened, queue_options, settings_here
from fairturn.cli.options import Seconds, json_option
from fairturn.cli.terminal import Progress, duration, json_line, number, printable, progress
from fairturn.clock import SECOND_US, microseconds

if TYPE_CHECKING:  # loaded when a worker is started
    from fairturn.model import Document, Outcome
    from fairturn.queue import Queue
    from fairturn.worker.events import DocumentEnded, Event, Idle

WITHOUT_A_HANDLER = "fairturn.handlers:measure"
_OF_THE_WORKER = ("concurrency", "threads", "time_limit_s", "lease_s", "grace_s")


@click.command("work")
@click.argument("handler", required=False, metavar="[MODULE:FUNCTION]")
@click.option("--until-empty", is_flag=True, help="End when nothing waits, is delayed or runs.")
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="Documents at once; 4.")
@click.option("--threads", is_flag=True, default=None, help="Threads instead of processes.")
@click.option("--time-limit", type=Seconds(), help="For one document; none by default.")
@click.option("--memory-limit", metavar="SIZE", help="Of one process, such as 512MiB.")
@click.option("--grace", type=Seconds(), help="To finish in after a SIGTERM; 30.")
@click.option("--lease", type=Seconds(), help="How long a claim lasts without renewal; 30.")
@json_option
@queue_options
def command(
    *,
    handler: str | None,
    until_empty: bool,
    as_json: bool,
    flags: Mapping[str, Any],
    **options: Any,
) -> None:
    """Work on documents: run a handler on each, in the order of service.

    The handler is a function of a module in this folder, or of one that is installed. It gets the
    document and returns its result; docs/worker.md tells all about it. Without one, documents are
    completed without being processed, and only their size is noted: good for a first look.

    A line is printed for each attempt when it has ended; with --concurrency 1 that is the order
    of the claims. Ctrl-C or SIGTERM: finish what runs; a second time: give it back now.

    \b
    fairturn work invoices:extract --concurrency 8 --time-limit 60
    fairturn work --until-empty --concurrency 1 --json
    """
    settings = settings_here(
        {
            **flags,
            "handler": handler,
            "concurrency": options["concurrency"],
            "threads": options["threads"],
            "time_limit_s": options["time_limit"],
            "memory_limit": options["memory_limit"],
            "grace_s": options["grace"],
            "lease_s": options["lease"],
        }
    )
    chosen: str | None = settings["handler"].value
    if chosen is None:
        click.echo(
            "No handler was named: documents are COMPLETED WITHOUT BEING PROCESSED, and only their "
            "size is noted. To process them: fairturn work MODULE:FUNCTION",
            err=True,
        )
    from fairturn.worker import Worker

    wanted = {name: settings[name].value for name in _OF_THE_WORKER}
    wanted["memory_limit_bytes"] = settings["memory_limit"].value
    wanted = {name: value for name, value in wanted.items() if value is not None}
    sys.path.insert(0, str(Path.cwd()))  # where `python -m` would look too
    with opened(flags, make=not until_empty) as queue:
        total = queue.summary().waiting if until_empty else None
        with progress("Working", total, beside_output=True) as advance:
            lines = Lines(queue, advance, as_json=as_json)
            with misuse_is_wrong_use():
                worker = Worker(queue, chosen or WITHOUT_A_HANDLER, on_event=lines.add, **wanted)
            with redirect_stdout(sys.stderr):  # what handlers in threads print is not an outcome
                done = worker.run(until_empty=until_empty)
    if not as_json:
        counts = (f"{n:,} {name}" for name, n in done._asdict().items() if n)
        click.echo(f"Attempts: {', '.join(counts) or 'none'}.", err=True)


class Lines:
    """Turns what happens in a worker into lines: outcomes on standard output, the rest on standard
    error."""

    def __init__(
        self,
        queue: "Queue",
        advance: Progress,
        *,
        as_json: bool,
        outcomes: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._queue = queue
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
                        f" The queue does not answer: {outcomes} not recorded yet, for which it "
                        "waits as long as their leases last; then those documents run again."
                    )
                running = number(event.running, "document")
                self._warn(f"Stopping: {what} what runs ({running}).{more}")

    def _print_ended(self, event: "DocumentEnded") -> None:
        document = event.document
        claim = self._claims.pop(document.id, 0)
        state = self._state_after(event)
        name, error, retry_in_s = _told(event.outcome)
        if state in ("dead", "cancelled"):
            retry_in_s = None
        if self._as_json:
            line = json_line(
                {
                    "claim": claim,
                    "id": document.id,
                    "customer": document.customer,
                    "priority": document.priority,
                    "count": document.count,
                    "submitted_at": document.submitted_at,
                    "claimed_at": document.claimed_at,
                    "attempts": document.attempts,
                    "outcome": name,
                    "state": state,
                    "seconds": round(event.seconds, 6),
                    "error": error,
                    "retry_in_s": retry_in_s,
                }
            )
        elif name == "released" and not event.seconds:
            return  # it was claimed ahead, and nothing has happened to it
        else:
            words = _ending(name, state, retry_in_s)
            line = _for_people(document, words, error, event.seconds)
        self._out.write(f"{line}\n")
        self._out.flush()
        self._ended += 1
        self._advance(self._ended)

    def _state_after(self, event: "DocumentEnded") -> str | None:
        """What the outcome made of the document. The store decides whether a failure was the last
        and whether somebody cancelled it meanwhile; None if it cannot be asked."""
        from fairturn.errors import NotFound, StoreError
        from fairturn.model import Completed, Failed, State, Stopped

        if isinstance(event.outcome, Completed):
            return State.COMPLETED.value
        if isinstance(event.outcome, Stopped):
            return State.CANCELLED.value
        try:
            now = self._queue.get(event.document.id).state
        except (StoreError, NotFound):
            return None
        failed = isinstance(event.outcome, Failed)
        if now is State.CANCELLED or (failed and now is State.DEAD):
            return now.value
        # Others may have it by now; this is where they took it from.
        return (State.DELAYED if failed else State.WAITING).value


def _ending(name: str, state: str | None, retry_in_s: float | None) -> str:
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
    return (
        f"{document.id}  priority {document.priority}  waited {waited}, took {took}"
        f"  {printable(document.customer)}  {ending}{why}"
    )


def _warn(sentence: str) -> None:
    click.echo(printable(sentence), err=True)
