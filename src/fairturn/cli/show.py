"""`fairturn show`: everything about one document."""

import json
import os
import shutil
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import click

from fairturn.cli.exit_codes import WRONG_USE, CommandExit, wrong_use
from fairturn.cli.options import Flags
from fairturn.cli.target import QueueOrClient, place_options, reached
from fairturn.cli.terminal import duration, number, print_line, printable, size, timestamp
from fairturn.cli.timeline import print_attempts
from fairturn.cli.values import document_as_json, stopping
from fairturn.clock import SystemClock
from fairturn.errors import NotAllowed
from fairturn.model import DEFAULT_KIND_NAME, Document
from fairturn.wire import ATTEMPT, SUBMISSION, to_json

PREVIEW_CHARACTERS = 1_000
_STANDARD_OUTPUT = "-"


@click.command("show")
@click.argument("id")
@click.option("--result", "of_result", is_flag=True, help="Print only its result.")
@click.option("--content", "of_content", is_flag=True, help="Print only its payload or content.")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="FILE",
    help="Write the result or content to FILE; - is standard output.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--details", is_flag=True, help="Print the end of the traceback and output of each attempt."
)
@place_options
def command(
    *,
    id: str,
    of_result: bool,
    of_content: bool,
    output: str | None,
    force: bool,
    details: bool,
    as_json: bool,
    flags: Flags,
) -> None:
    """Show everything about one document.

    Attempts that failed, lost their lease or ended a step are in a table. Payload and result are
    shortened; --content and --result print them in full. With --json all of them are in the line,
    except bytes.

    \b
    fairturn show 0c2f1d4b5a69788
    fairturn show 0c2f1d4b5a69788 --content -o invoice.pdf
    fairturn show 0c2f1d4b5a69788 --result
    """
    if of_result and of_content:
        wrong_use("--result and --content cannot be combined; pass one of them")
    if output is not None and not (of_result or of_content):
        wrong_use("--output needs --result or --content")
    if as_json and (of_result or of_content):
        wrong_use("--json cannot be combined with --result or --content; leave it out")
    with reached(flags) as queue:
        document = queue.get(id)
        if of_result or of_content:
            with (_result if of_result else _content)(queue, document) as source:
                _write(source, output, force=force)
        elif as_json:
            print_line(_as_json(queue, document))
        else:
            _print(queue, document, SystemClock().now())
            print_attempts(document, queue.attempts(document.id), details=details)


# ── Contents and results ─────────────────────────────────────────────────────────────────────────


def _content(queue: QueueOrClient, document: Document) -> BinaryIO:
    if document.body_type == "content":
        return queue.open(document.id)
    return _json_stream(queue.payload(document.id))


def _result(queue: QueueOrClient, document: Document) -> BinaryIO:
    result = queue.result(document.id)  # refuses a document that is not completed
    if queue.result_file_bytes(document.id) is not None:
        return queue.open_result(document.id)
    return _json_stream(result)


def _json_stream(value: Any) -> BinaryIO:
    return BytesIO(json.dumps(value).encode() + b"\n")


def _write(source: BinaryIO, output: str | None, *, force: bool) -> None:
    if output is None and sys.stdout.isatty() and not isinstance(source, BytesIO):
        wrong_use("binary output is not printed on a terminal; write it to a file with -o FILE")
    if output is None or output == _STANDARD_OUTPUT:
        sys.stdout.flush()
        shutil.copyfileobj(source, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    # Written under another name first, so that FILE is never incomplete.
    unfinished = f"{output}.part"
    if not force and Path(output).exists():
        raise CommandExit(f"{output} exists already; --force replaces it", WRONG_USE)
    try:
        with Path(unfinished).open("xb") as target:
            shutil.copyfileobj(source, target)
            os.fsync(target.fileno())
        Path(unfinished).replace(output)
    except FileExistsError as error:
        raise CommandExit(
            f"{unfinished} exists: another process is writing it, or was killed; delete it"
        ) from error
    except OSError as error:
        with suppress(OSError):
            Path(unfinished).unlink(missing_ok=True)
        raise CommandExit(f"{output} cannot be written: {error.strerror}") from error


# ── Output ───────────────────────────────────────────────────────────────────────────────────────


def _as_json(queue: QueueOrClient, document: Document) -> dict[str, Any]:
    line = document_as_json(document)
    line["timeline"] = [to_json(ATTEMPT, each) for each in queue.attempts(document.id)]
    if document.body_type == "payload":
        line["payload"] = queue.payload(document.id)
    if document.state == "completed":
        line["result"] = queue.result(document.id)
        size_bytes = queue.result_file_bytes(document.id)
        if size_bytes is not None:
            line["result_size_bytes"] = size_bytes
    return line


def _print(queue: QueueOrClient, document: Document, now: int) -> None:
    ahead = document.due_at_us is not None and document.due_at_us > now
    lines = {
        "id": document.id,
        "customer": document.customer,
        "name": document.name,
        "state": f"{document.state}, stopping" if stopping(document) else document.state.value,
        "priority": f"{document.priority} (pending documents count {document.count})",
        "attempts": _attempts(queue, document),
        "finished steps": str(document.step) if document.step else None,
        "progress": _progress(document),
        "error": document.error,
        # The store keeps the last worker, which a waiting document no longer has.
        "worker": None if document.state in ("waiting", "delayed") else document.worker,
        "parent": document.parent,
        "submitted": timestamp(document.submitted_at_us),
        "retry at" if document.attempts else "due": timestamp(document.due_at_us)
        if ahead
        else None,
        "expired" if document.state == "expired" else "expires": timestamp(_expiry(document)),
        "claimed": timestamp(document.claimed_at_us),
        "ended": timestamp(document.ended_at_us),
        "took": None if document.real_cost is None else duration(document.real_cost),
        **_described(document),
        "body": f"{document.body_type}, {size(document.size_bytes)}",
        "sha256": None if document.sha256 is None else document.sha256.hex(),
        "payload": _preview(queue.payload(document.id))
        if document.body_type == "payload"
        else None,
        "result": _shown_result(queue, document),
    }
    shown = {name: value for name, value in lines.items() if value}
    width = max(map(len, shown))
    for name, value in shown.items():
        click.echo(f"{name:{width}}  {printable(value)}")


def _described(document: Document) -> dict[str, str | None]:
    """Return the fields of the submission that have no line of their own elsewhere. The default
    kind is omitted."""
    elsewhere = {"name", "due_at", "expires_at", "parent"}
    if document.kind == DEFAULT_KIND_NAME:
        elsewhere.add("kind")
    values = document_as_json(document)
    shown = values.keys() - elsewhere  # a document states its expiry as a timestamp alone
    return {each.name: _text(values[each.name]) for each in SUBMISSION if each.name in shown}


def _expiry(document: Document) -> int | None:
    """Return when the document expires or expired; None if its expiry does not apply."""
    return document.expires_at_us if document.state == "expired" else document.expiry


def _text(value: Any) -> str | None:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return json.dumps(value) if value else None
    return ", ".join(value) if isinstance(value, list) else value


def _progress(document: Document) -> str | None:
    if document.state != "running" or document.progress is None:
        return None
    done, total = document.progress
    if not total:
        return f"{done:g}"
    return f"{done:g} of {total:g} ({done / total:.0%})"


def _shown_result(queue: QueueOrClient, document: Document) -> str | None:
    if document.state != "completed":
        return None
    size_bytes = queue.result_file_bytes(document.id)
    if size_bytes is not None:
        return f"a file of {size(size_bytes)} (--result -o FILE writes it)"
    result = queue.result(document.id)
    return None if result is None else _preview(result)


def _attempts(queue: QueueOrClient, document: Document) -> str:
    try:
        return f"{document.attempts} of {queue.settings.attempts_max}"
    except NotAllowed:  # the key is a customer's
        return str(document.attempts)


def _preview(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= PREVIEW_CHARACTERS:
        return text
    left = number(len(text) - PREVIEW_CHARACTERS, "character")
    return f"{text[:PREVIEW_CHARACTERS]}… and {left} more"
