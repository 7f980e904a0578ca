"""`fairturn submit`: documents into the queue."""

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import click

from fairturn.cli.exit_codes import (
    TRY_AGAIN,
    Ending,
    code_of,
    misuse_is_wrong_use,
    unwritable,
    wrong_use,
)
from fairturn.cli.options import Moment, json_option
from fairturn.cli.remote import place_options, reached
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
from fairturn.validation.text import identity

if TYPE_CHECKING:
    from fairturn.cli.batches import Given
    from fairturn.model import Receipt

RECEIPTS_SHOWN = 20
_STANDARD_INPUT = "-"
_IN_MEMORY_BYTES = 1_048_576


@click.command("submit")
@click.argument("customer", required=False)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path())
@click.option("--payload", metavar="JSON", help="A document that is a JSON value, and no file.")
@click.option(
    "--ndjson",
    type=click.Path(),
    metavar="FILE",
    help="A document for each line of FILE; - is stdin.",
)
@click.option("--name", help="Of the document; that of the file by default.")
@click.option("--metadata", metavar="KEY=VALUE", multiple=True, help="May be given several times.")
@click.option("--key", help="Idempotency: with the same key a document is stored once in 24 h.")
@click.option("--cost", type=float, help="What it counts for, if the queue's costs are known.")
@click.option("--due-at", type=Moment(), help="Not before, such as 2030-01-31T08:00Z.")
@click.option("--parent", metavar="ID", help="The document that made this one.")
@click.option("--wait-for-room", is_flag=True, help="If the queue is full, wait until it is not.")
@json_option
@place_options
def command(
    *,
    customer: str | None,
    files: tuple[str, ...],
    ndjson: str | None,
    wait_for_room: bool,
    as_json: bool,
    flags: Mapping[str, Any],
    **fields: Any,
) -> None:
    """Hand in documents.

    Files are copied into the queue; - is standard input. When the command ends with 0, all are on
    stable storage. The queue is made if it is not there.

    \b
    fairturn submit acme invoice-17.pdf invoice-18.pdf
    fairturn submit acme --payload '{"invoice": 17}' --key invoice-17
    fairturn submit --ndjson documents.ndjson --json

    Each line of --ndjson is an object with "customer" and "payload" or "file", and optionally
    "name", "metadata", "key", "cost", "due_at" and "parent". It is stored in batches. If it stops
    in between, run it again: a document that has a key is stored once.
    """
    _refuse_contradictions(customer, files, ndjson, fields)
    with ExitStack() as stack:
        groups, total = _given(stack, customer, files, ndjson, fields, wait_for_room=wait_for_room)
        printed = _Receipts(as_json)
        from fairturn.cli.batches import Stopped, hand_in

        keyed = _Keyed(groups)
        try:
            keyed.begin()
        except Stopped as error:
            _stopped(error, 0, keyed.all)
        queue = stack.enter_context(reached(flags, make=True))
        # One alone is told by its bytes, where they are sent: it may be large, and the way long.
        beside = as_json or total != 1
        advance = stack.enter_context(progress("Submitting", total, beside_output=beside))
        sending = advance if total == 1 else None
        try:
            for receipts in hand_in(queue, keyed, wait_for_room=wait_for_room, sending=sending):
                printed.add(receipts)
                if sending is None:
                    advance(printed.stored)
        except (Stopped, FairturnError, KeyboardInterrupt) as error:
            _stopped(error, printed.stored, keyed.all)
    printed.end()
    if printed.unprinted is not None:
        _tell_unprinted(printed.unprinted, printed.stored, keyed.all)


# ── What is handed in ────────────────────────────────────────────────────────────────────────────


def _refuse_contradictions(
    customer: str | None, files: tuple[str, ...], ndjson: str | None, fields: Mapping[str, Any]
) -> None:
    if ndjson is not None:
        given = [name for name, value in fields.items() if value not in (None, ())]
        if files or given:
            what = "files" if files else f"--{given[0].replace('_', '-')}"
            wrong_use(f"with --ndjson the lines say everything; leave out {what}")
        return
    if customer is None:
        wrong_use("name the CUSTOMER, then what to hand in: fairturn submit acme invoice.pdf")
    from fairturn.model import CUSTOMER_BYTES_MAX

    with misuse_is_wrong_use():
        identity(customer, "CUSTOMER", CUSTOMER_BYTES_MAX)
    if fields["payload"] is not None and files:
        wrong_use("a document is a file or a --payload, not both")
    if fields["payload"] is None and not files:
        wrong_use("name a FILE (- is standard input), --payload or --ndjson")
    for name in ("name", "key"):
        if fields[name] is not None and len(files) > 1:
            wrong_use(f"--{name} is for one document, and {len(files)} files were named")
    if files.count(_STANDARD_INPUT) > 1:
        wrong_use("- was given several times; standard input can be read once")


def _given(
    stack: ExitStack,
    customer: str | None,
    files: tuple[str, ...],
    ndjson: str | None,
    fields: dict[str, Any],
    *,
    wait_for_room: bool,
) -> "tuple[Iterator[list[Given]], int | None]":
    """Groups of documents, and how many there are if that is known."""
    if ndjson is not None:
        from fairturn.cli.ndjson import groups_of

        if ndjson == _STANDARD_INPUT:
            return groups_of(sys.stdin.buffer, "standard input", customer), None
        return groups_of(stack.enter_context(_opened(ndjson)), ndjson, customer), None
    assert customer is not None
    described = {**fields, "metadata": _metadata(fields["metadata"])}
    payload = described.pop("payload")
    if payload is not None:
        return iter([_of_payload(customer, payload, described)]), 1
    for file in files:
        if file != _STANDARD_INPUT and not Path(file).is_file():
            what = "is not a regular file" if Path(file).exists() else "does not exist"
            wrong_use(f"{file} {what}; nothing was stored")
    spool = None
    if wait_for_room and _STANDARD_INPUT in files:  # what is refused now is handed in again
        spooled = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        spool = stack.enter_context(spooled)
        try:
            shutil.copyfileobj(sys.stdin.buffer, spool)
        except OSError as error:
            raise Ending(f"standard input cannot be kept: {error.strerror}", TRY_AGAIN) from error
    return iter([_of_files(customer, files, described, spool or sys.stdin.buffer)]), len(files)


def _opened(file: str) -> BinaryIO:
    try:
        return Path(file).open("rb")
    except OSError as error:
        wrong_use(f"{file} cannot be read: {error.strerror}")


def _of_payload(customer: str, payload: str, described: dict[str, Any]) -> "list[Given]":
    from fairturn.cli.batches import Given
    from fairturn.model import Submission

    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        wrong_use(f"--payload is not JSON: {error}; a text needs its own quotes: '\"text\"'")
    return [Given("", Submission(customer=customer, payload=value, **described))]


def _of_files(
    customer: str, files: tuple[str, ...], described: dict[str, Any], stdin: Any
) -> "list[Given]":
    from fairturn.cli.batches import BATCH_BYTES, Given
    from fairturn.model import Submission

    group = []
    for file in files:
        if file == _STANDARD_INPUT:
            submission = Submission(customer=customer, content=stdin, **described)
            # Nobody knows how much that is, so it is a batch of its own.
            group.append(Given("standard input", submission, BATCH_BYTES))
        else:
            submission = Submission(customer=customer, file=file, **described)
            group.append(Given(file, submission, Path(file).stat().st_size))
    return group


def _metadata(pairs: tuple[str, ...]) -> dict[str, str] | None:
    metadata = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            wrong_use(f"--metadata is {pair!r}; it must be KEY=VALUE")
        metadata[key] = value
    return metadata or None


class _Keyed:
    """Passes groups on, and remembers whether every document had a key."""

    def __init__(self, groups: "Iterator[list[Given]]") -> None:
        self._groups = groups
        self.all = True

    def begin(self) -> None:
        """Read on until there is a document: what is wrong before makes no queue."""
        first = next(filter(None, self._groups), [])
        self._groups = chain([first], self._groups)

    def __iter__(self) -> "Iterator[list[Given]]":
        for group in self._groups:
            self.all = self.all and all(given.submission.key for given in group)
            yield group


# ── What is answered ─────────────────────────────────────────────────────────────────────────────


class _Receipts:
    """Prints receipts: a line for each at once, or for people a table of the first few.

    If standard output takes no more, the documents are stored all the same: who has read enough
    of the receipts, such as `head`, has not asked for fewer documents.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: list[Receipt] = []
        self._priorities: Counter[int] = Counter()
        self._customers: set[str] = set()
        self.stored = 0
        self._repeated = 0
        self.unprinted: OSError | None = None  # why some are not

    def add(self, receipts: "list[Receipt]") -> None:
        self.stored += len(receipts)
        if self._as_json:
            with self._printing():
                for receipt in receipts:
                    print_line(receipt._asdict())
                sys.stdout.flush()
            return
        self._shown += receipts[: RECEIPTS_SHOWN + 1 - len(self._shown)]
        self._priorities.update(receipt.priority for receipt in receipts)
        self._customers.update(receipt.customer for receipt in receipts)
        self._repeated += sum(receipt.repeated for receipt in receipts)

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
        if self._repeated:
            was = "was" if self._repeated == 1 else "were"
            which = "It" if self.stored == 1 else f"{self._repeated:,} of them"
            click.echo(f"{which} {was} there already, under the same key.")


def _stopped(error: BaseException, stored: int, all_keyed: bool) -> NoReturn:
    """Say where it stopped, what is stored, and whether it can simply be run again."""
    cause = getattr(error, "cause", error)
    unsure = isinstance(cause, StoreError | KeyboardInterrupt) and not isinstance(
        cause, StoreFull | StoreRefused
    )
    if stored:
        kept = f"the {number(stored, 'document')} before it {'is' if stored == 1 else 'are'} stored"
        kept += ", and perhaps the batch after them" if unsure else ""
    else:
        kept = "perhaps the first batch is stored" if unsure else "nothing was stored"
    again = _again(all_keyed)
    sentence = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    more = f"; {again}" if stored or unsure else ""
    raise Ending(f"{sentence}; {kept}{more}", code_of(cause)) from error


def _tell_unprinted(error: OSError, stored: int, all_keyed: bool) -> None:
    """A reader that has gone is no failure; a full disk is one, whatever has been stored."""
    are = "is" if stored == 1 else "are"
    kept = f"{number(stored, 'document')} {are} stored, without a receipt for each"
    if isinstance(error, BrokenPipeError):
        click.echo(f"Nobody reads standard output any more; {kept}.", err=True)
        return
    raise unwritable(error, f"; {kept}; {_again(all_keyed)}") from error


def _again(all_keyed: bool) -> str:
    if all_keyed:
        return "every document had a key, so running it again is safe"
    return "running it again is safe only if every document has a key"
