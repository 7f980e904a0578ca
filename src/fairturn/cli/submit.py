"""`fairturn submit`: submit files, payloads and JSON Lines."""

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import click

from fairturn.cli.batches import BATCH_BYTES, BatchEntry, SubmissionRejected, hand_in
from fairturn.cli.exit_codes import (
    TRY_AGAIN,
    CommandExit,
    code_of,
    misuse_is_wrong_use,
    unwritable,
    wrong_use,
)
from fairturn.cli.ndjson import groups_of
from fairturn.cli.options import DURATION, Flags
from fairturn.cli.options import TIMESTAMP as TIMESTAMP_TYPE
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import (
    console,
    number,
    print_line,
    print_table,
    printable,
    progress,
    silence_output,
)
from fairturn.errors import FairturnError, StoreError, StoreFull, StoreRefused
from fairturn.model import CUSTOMER_BYTES_MAX, Receipt, Submission
from fairturn.validation.text import identity
from fairturn.wire import (
    COST,
    DOCUMENT_ID,
    JSON_ARRAY,
    JSON_OBJECT,
    RECEIPT,
    SECONDS,
    SUBMISSION,
    TIMESTAMP,
    FieldType,
    to_json,
)

RECEIPTS_SHOWN = 20
_STANDARD_INPUT = "-"
_IN_MEMORY_BYTES = 1_048_576


_HELP = f"""Submit documents.

Files are copied into the queue; - is standard input. Exit code 0 means that all documents are
durable. The queue is created if it does not exist.

\b
fairturn submit acme invoice-17.pdf invoice-18.pdf
fairturn submit acme --payload '{{"invoice": 17}}' --key invoice-17
fairturn submit --ndjson documents.ndjson --json

Each line of --ndjson is an object with "customer" and "payload" or "file", and optionally
{", ".join(f'"{field.name}"' for field in SUBMISSION)} and "key". Lines are stored in batches.
After an error, run the command again: a document with a key is stored once.
"""


def _field_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `SUBMISSION`."""
    types: dict[FieldType, dict[str, Any]] = {
        JSON_OBJECT: {"multiple": True, "metavar": "KEY=VALUE"},
        JSON_ARRAY: {"multiple": True},
        COST: {"type": float},
        TIMESTAMP: {"type": TIMESTAMP_TYPE},
        SECONDS: {"type": DURATION},
        DOCUMENT_ID: {"metavar": "ID"},
    }
    notes = {
        JSON_OBJECT: "; may be given several times",
        JSON_ARRAY: "; may be given several times",
        TIMESTAMP: ", such as 2030-01-31T08:00Z",
        SECONDS: ", such as 30min, 2h or 7d",
    }
    for each in reversed(SUBMISSION):
        about = f"{each.description}{notes.get(each.type, '')}."
        add = click.option(_flag(each.name), each.name, help=about, **types.get(each.type, {}))
        command = add(command)
    return command


def _flag(field: str) -> str:
    """Return the option of a field."""
    options = {each.name: each.option for each in SUBMISSION if each.option}
    return f"--{options.get(field, field).replace('_', '-')}"


@click.command("submit", help=_HELP)
@click.argument("customer", required=False)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path())
@click.option("--payload", metavar="JSON", help="A document that is a JSON value, not a file.")
@click.option(
    "--ndjson",
    type=click.Path(),
    metavar="FILE",
    help="A document for each line of FILE; - is standard input.",
)
@_field_options
@click.option("--key", help="Idempotency key: the document is stored once in 24 hours.")
@click.option("--wait-for-room", is_flag=True, help="Wait while the queue is full.")
@place_options
def command(
    *,
    customer: str | None,
    files: tuple[str, ...],
    ndjson: str | None,
    wait_for_room: bool,
    as_json: bool,
    flags: Flags,
    **fields: Any,
) -> None:
    _refuse_contradictions(customer, files, ndjson, fields)
    with ExitStack() as stack:
        groups, total = _groups(stack, customer, files, ndjson, fields, wait_for_room=wait_for_room)
        printed = _ReceiptPrinter(as_json)
        all_keyed = True

        def watched() -> Iterator[list[BatchEntry]]:
            nonlocal all_keyed
            for group in chain([first], groups):
                all_keyed = all_keyed and all(entry.submission.key for entry in group)
                yield group

        try:  # before the queue is opened, so that wrong input does not create one
            first = next(filter(None, groups), [])
        except SubmissionRejected as error:
            _stopped(error, 0, all_keyed)
        queue = stack.enter_context(reached(flags, make=True))
        # The progress of a single document is measured in bytes sent.
        beside = as_json or total != 1
        advance = stack.enter_context(progress("Submitting", total, beside_output=beside))
        sending = advance if total == 1 else None
        try:
            for receipts in hand_in(queue, watched(), wait_for_room=wait_for_room, sending=sending):
                printed.add(receipts)
                if sending is None:
                    advance(printed.stored)
        except (SubmissionRejected, FairturnError, KeyboardInterrupt) as error:
            _stopped(error, printed.stored, all_keyed)
    printed.end()
    if printed.unprinted is not None:
        _report_unprinted(printed.unprinted, printed.stored, all_keyed)


# ── Input ────────────────────────────────────────────────────────────────────────────────────────


def _refuse_contradictions(
    customer: str | None, files: tuple[str, ...], ndjson: str | None, fields: Mapping[str, Any]
) -> None:
    if ndjson is not None:
        given = [name for name, value in fields.items() if value not in (None, ())]
        if files or given:
            what = "files" if files else _flag(given[0])
            wrong_use(f"with --ndjson all fields are in the lines; leave out {what}")
        return
    if customer is None:
        wrong_use("CUSTOMER is missing, such as in: fairturn submit acme invoice.pdf")
    with misuse_is_wrong_use():
        identity(customer, "CUSTOMER", CUSTOMER_BYTES_MAX)
    if fields["payload"] is not None and files:
        wrong_use("files and --payload cannot be combined; pass one of them")
    if fields["payload"] is None and not files:
        wrong_use("no document; pass a FILE (- is standard input), --payload or --ndjson")
    for name in ("name", "key"):
        if fields[name] is not None and len(files) > 1:
            wrong_use(f"--{name} is for one document, and {len(files)} files were given")
    if files.count(_STANDARD_INPUT) > 1:
        wrong_use("- was given several times; standard input can be read only once")


def _groups(
    stack: ExitStack,
    customer: str | None,
    files: tuple[str, ...],
    ndjson: str | None,
    fields: dict[str, Any],
    *,
    wait_for_room: bool,
) -> tuple[Iterator[list[BatchEntry]], int | None]:
    """Return groups of documents, and their number if it is known."""
    if ndjson is not None:
        if ndjson == _STANDARD_INPUT:
            return groups_of(sys.stdin.buffer, "standard input", customer), None
        return groups_of(stack.enter_context(_opened(ndjson)), ndjson, customer), None
    assert customer is not None
    described = {**fields, "metadata": _metadata(fields["metadata"])}
    described = {name: None if value == () else value for name, value in described.items()}
    payload = described.pop("payload")
    if payload is not None:
        return iter([_of_payload(customer, payload, described)]), 1
    for file in files:
        if file != _STANDARD_INPUT and not Path(file).is_file():
            what = "is not a regular file" if Path(file).exists() else "does not exist"
            wrong_use(f"{file} {what}; nothing was stored")
    spool = None
    if wait_for_room and _STANDARD_INPUT in files:  # a rejected document is submitted again
        spooled = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        spool = stack.enter_context(spooled)
        try:
            shutil.copyfileobj(sys.stdin.buffer, spool)
        except OSError as error:
            raise CommandExit(
                f"standard input cannot be buffered: {error.strerror}", TRY_AGAIN
            ) from error
    return iter([_of_files(customer, files, described, spool or sys.stdin.buffer)]), len(files)


def _opened(file: str) -> BinaryIO:
    try:
        return Path(file).open("rb")
    except OSError as error:
        wrong_use(f"{file} cannot be read: {error.strerror}")


def _of_payload(customer: str, payload: str, described: dict[str, Any]) -> list[BatchEntry]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        wrong_use(f"--payload is not JSON: {error}; quote a string twice: '\"text\"'")
    return [BatchEntry("", Submission(customer=customer, payload=value, **described))]


def _of_files(
    customer: str, files: tuple[str, ...], described: dict[str, Any], stdin: Any
) -> list[BatchEntry]:
    group = []
    for file in files:
        if file == _STANDARD_INPUT:
            submission = Submission(customer=customer, content=stdin, **described)
            # Its size is unknown, so it is a batch of its own.
            group.append(BatchEntry("standard input", submission, BATCH_BYTES))
        else:
            submission = Submission(customer=customer, file=file, **described)
            group.append(BatchEntry(file, submission, Path(file).stat().st_size))
    return group


def _metadata(pairs: tuple[str, ...]) -> dict[str, str] | None:
    metadata = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            wrong_use(f"--metadata is {pair!r}; it must be KEY=VALUE")
        metadata[key] = value
    return metadata or None


# ── Output ───────────────────────────────────────────────────────────────────────────────────────


class _ReceiptPrinter:
    """Prints receipts: a JSON line for each at once, or at the end a table or a summary.

    If standard output cannot be written, for example because it is piped to `head`, the
    remaining documents are still stored.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: list[Receipt] = []
        self._priorities: Counter[int] = Counter()
        self._customers: set[str] = set()
        self.stored = 0
        self._replayed = 0
        self.unprinted: OSError | None = None  # the error that ended printing

    def add(self, receipts: list[Receipt]) -> None:
        self.stored += len(receipts)
        if self._as_json:
            with self._printing():
                for receipt in receipts:
                    print_line({**to_json(RECEIPT, receipt), "replayed": receipt.replayed})
                sys.stdout.flush()
            return
        self._shown += receipts[: RECEIPTS_SHOWN + 1 - len(self._shown)]
        self._priorities.update(receipt.priority for receipt in receipts)
        self._customers.update(receipt.customer for receipt in receipts)
        self._replayed += sum(receipt.replayed for receipt in receipts)

    def end(self) -> None:
        if not self._as_json:
            with self._printing():
                self._sum_up()
                sys.stdout.flush()

    @contextmanager
    def _printing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.unprinted = error
            silence_output()

    def _sum_up(self) -> None:
        if 0 < len(self._shown) <= RECEIPTS_SHOWN:
            columns = ("id", "customer", "pending documents count", "priority")
            rows = [
                [receipt.id, printable(receipt.customer), str(receipt.count), str(receipt.priority)]
                for receipt in self._shown
            ]
            print_table(console(), columns, rows, texts=(1,), words=(0,))
        else:
            by_priority = ", ".join(
                f"{n:,} of priority {priority}" for priority, n in sorted(self._priorities.items())
            )
            click.echo(
                f"{number(self.stored, 'document')} of "
                f"{number(len(self._customers), 'customer')} accepted"
                + (f": {by_priority}." if by_priority else ".")
            )
        if self._replayed:
            was = "was" if self._replayed == 1 else "were"
            which = "It" if self.stored == 1 else f"{self._replayed:,} of them"
            click.echo(f"{which} {was} stored before, with the same key.")


def _stopped(error: BaseException, stored: int, all_keyed: bool) -> NoReturn:
    """End with the error, the number of stored documents, and whether a repetition is safe."""
    cause = getattr(error, "cause", error)
    unsure = isinstance(cause, StoreError | KeyboardInterrupt) and not isinstance(
        cause, StoreFull | StoreRefused
    )
    if stored:
        state = (
            f"the {number(stored, 'document')} before it {'is' if stored == 1 else 'are'} stored"
        )
        state += ", and possibly the batch after them" if unsure else ""
    else:
        state = "possibly the first batch is stored" if unsure else "nothing was stored"
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    more = f"; {_repetition(all_keyed)}" if stored or unsure else ""
    raise CommandExit(f"{message}; {state}{more}", code_of(cause)) from error


def _report_unprinted(error: OSError, stored: int, all_keyed: bool) -> None:
    """A closed pipe is not a failure; a full disk is one."""
    are = "is" if stored == 1 else "are"
    state = f"{number(stored, 'document')} {are} stored, without a receipt for each"
    if isinstance(error, BrokenPipeError):
        click.echo(f"The reader has closed standard output; {state}.", err=True)
        return
    raise unwritable(error, f"; {state}; {_repetition(all_keyed)}") from error


def _repetition(all_keyed: bool) -> str:
    if all_keyed:
        return "every document had a key, so running it again is safe"
    return "running it again is safe only if every document has a key"
