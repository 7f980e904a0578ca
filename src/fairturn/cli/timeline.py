"""The attempts of a document, as `fairturn show` prints them."""

from collections.abc import Sequence

import click

from fairturn.cli.terminal import console, duration, print_table, printable, timestamp
from fairturn.model import AttemptRecord, Document, State

_TEXTS, _WORDS = ("kind", "worker", "error"), ("began", "outcome")


def print_attempts(
    document: Document, attempts: Sequence[AttemptRecord], *, details: bool = False
) -> None:
    """Print the stored attempts and the one in the document's row, and with `details` the end of
    their tracebacks and output. A document without stored attempts has no table."""
    if not attempts:
        return
    rows = [_cells(attempt) for attempt in attempts]
    if document.state in (State.RUNNING, State.COMPLETED):
        rows.append(_last_cells(document))
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    click.echo()
    print_table(
        console(),
        columns,
        [[row[name] for name in columns] for row in rows],
        texts=[n for n, name in enumerate(columns) if name in _TEXTS],
        words=[n for n, name in enumerate(columns) if name in _WORDS],
    )
    for attempt in attempts:
        if details and attempt.details:
            click.echo(f"\nstep {attempt.step}, attempt {attempt.attempt}:")
            for line in attempt.details.split("\n"):
                click.echo(f"    {printable(line)}")


def _cells(attempt: AttemptRecord) -> dict[str, str]:
    """Return the cells of an attempt by column; a column without any value is not printed."""
    return {
        "began": timestamp(attempt.claimed_at_us),
        "took": duration(attempt.ended_at_us - attempt.claimed_at_us),
        "step": str(attempt.step),
        "kind": attempt.kind,
        "attempt": str(attempt.attempt),
        "worker": attempt.worker,
        "outcome": attempt.outcome.value,
        "error": attempt.error or "",
    }


def _last_cells(document: Document) -> dict[str, str]:
    """Return the same of the attempt that runs or has completed the document."""
    began, ended = document.claimed_at_us, document.ended_at_us
    return {
        "began": timestamp(began),
        "took": "" if began is None or ended is None else duration(ended - began),
        "step": str(document.step),
        "kind": document.kind,
        "attempt": str(document.attempts),
        "worker": document.worker or "",
        "outcome": document.state.value,
        "error": "",
    }
