"""What was admitted, written: documents with a COPY or as arrays, and all that is counted of them.

Documents come by the thousand, and what the server does with them is most of the time. So rows are
sent in blocks, the server works on one while the next is put together, and on the last of them
while receipts are.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice, repeat
from operator import itemgetter

from fairturn import ids
from fairturn.model import Kind, NewDocument, Receipt
from fairturn.priority import LEVELS
from fairturn.stores.admission import Admission, CustomerBook, ParentBook
from fairturn.stores.postgres.rows import RECORD_ARRIVED, columns, is_payload
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import DELAYED, WAITING, Row

# From here on a COPY is faster than arrays.
_COPY_FROM = 50
_BLOCK = 200  # rows

_DOCUMENT_COLUMNS = """
    number, customer, order_number, count, submitted_at, size_bytes, level, priority, state,
    is_payload, due_at, delayed_until, cost, parent, name, metadata, content_name, sha256,
    body_text, body_bytes"""
_DOCUMENT_TYPES = (
    *("int8", "int8", "int8", "int8", "int8", "int8", "int2", "int2", "int2"),
    *("bool", "int8", "int8", "int8", "int8", "text", "text", "text", "bytea", "text", "bytea"),
)
_COPY_DOCUMENTS = f"COPY fairturn.documents ({_DOCUMENT_COLUMNS}) FROM STDIN (FORMAT BINARY)"
_ADD_DOCUMENTS = f"""
    INSERT INTO fairturn.documents ({_DOCUMENT_COLUMNS})
    SELECT * FROM unnest({", ".join(f"%s::{kind}[]" for kind in _DOCUMENT_TYPES)})"""

# Most documents are a payload and nothing else: their rows are shorter. They go as text, because
# the server stores what it has of that with every 64 KB, and of the binary form after 1,000 rows.
_PLAIN_COLUMNS = """
    number, order_number, customer, count, level, priority, submitted_at, state, is_payload,
    size_bytes, body_text"""
_COPY_PLAIN = f"COPY fairturn.documents ({_PLAIN_COLUMNS}) FROM STDIN"
_ESCAPED = ("\\", r"\\")
_SEPARATORS = ("\t", "\n", "\r")

_ADD_KEYS = """
    INSERT INTO fairturn.keys (customer, key, digest, document, count, priority, submitted_at)
    SELECT * FROM unnest(%s::bigint[], %s::text[], %s::bytea[], %s::bigint[], %s::bigint[],
        %s::smallint[], %s::bigint[])
    ON CONFLICT (customer, key) DO UPDATE SET digest = excluded.digest,
        document = excluded.document, count = excluded.count, priority = excluded.priority,
        submitted_at = excluded.submitted_at"""
_MOVE_PARENTS = """
    INSERT INTO fairturn.children (parent, made)
    SELECT * FROM unnest(%s::bigint[], %s::integer[])
    ON CONFLICT (parent) DO UPDATE SET made = excluded.made"""
_MOVE_CUSTOMERS = f"""
    UPDATE fairturn.customers c SET count = v.count, count_updated_at = v.updated_at,
        submitted = c.submitted + v.submitted, arrived = ARRAY[
            {", ".join(f"c.arrived[{n}] + v.a{n}" for n in range(1, LEVELS + 1))}]
    FROM unnest({", ".join(repeat("%s::bigint[]", 4 + LEVELS))})
        AS v(number, count, updated_at, submitted,
            {", ".join(f"a{n}" for n in range(1, LEVELS + 1))})
    WHERE c.number = v.number"""
_COUNT_ARRIVED = "SELECT fairturn.count_arrived(%s::integer, %s::bigint[], %s)"

_BODY = itemgetter(NewDocument._fields.index("body"))
_SIZE_BYTES = itemgetter(NewDocument._fields.index("size_bytes"))
_KIND = itemgetter(NewDocument._fields.index("kind"))
_MORE = itemgetter(slice(NewDocument._fields.index("sha256"), None))
_NO_MORE = {_MORE(NewDocument("", None))}


class Writing:
    """What was admitted, on its way into the tables."""

    def __init__(
        self,
        admission: Admission,
        customers: Sequence[CustomerBook],
        parents: dict[str, ParentBook | None],
        numbers: Sequence[int],
        key: int,
        *,
        bodies: Iterable[str] | None = None,
    ) -> None:
        self._admission = admission
        self._books = customers
        self._parents = parents
        self._numbers = numbers
        self._key = key
        self._bodies = bodies  # of plain documents, where they come one by one
        self._moved: list[Row] = []
        self._arrived: list[Row] = []
        self.customers = set(admission.customers)
        self.receipts: list[Receipt] = []

    def copy(self, session: Session) -> None:
        """Send the documents, if they are many; and count what came meanwhile."""
        if self._bodies is not None:
            session.copy_blocks(_COPY_PLAIN, self._blocks(self._bodies), self._count)
        elif len(self._numbers) < _COPY_FROM:
            self._count()
        elif self._is_plain():
            bodies = map(_BODY, self._admission.documents)
            session.copy_blocks(_COPY_PLAIN, self._blocks(bodies), self._count)
        else:
            session.copy(_COPY_DOCUMENTS, _DOCUMENT_TYPES, self._rows(), self._count)

    def write(self, session: Session, shard: int) -> None:
        """Everything that was not sent."""
        if not self._numbers:
            return
        if self._bodies is None and len(self._numbers) < _COPY_FROM:
            session.ask(_ADD_DOCUMENTS, columns([*self._rows()]))
        self._write_rare(session)
        moved = columns(self._moved)
        session.ask(_MOVE_CUSTOMERS, moved)
        totals = [sum(column) for column in moved[4:]]
        session.ask(_COUNT_ARRIVED, (shard, totals, len(self._admission.due)))
        if self._arrived:
            session.ask(RECORD_ARRIVED, (self._admission.now, *columns(self._arrived)))

    def _is_plain(self) -> bool:
        """Whether all are payloads in their rows, as JSON in ASCII without a blank too many, and
        no more is known of any."""
        documents = self._admission.documents
        if (
            set(map(_MORE, documents)) != _NO_MORE
            or list(map(_KIND, documents)).count(Kind.PAYLOAD) != len(documents)
            or set(map(type, map(_BODY, documents))) != {str}
        ):
            return False
        bodies = list(map(_BODY, documents))
        if list(map(len, bodies)) != list(map(_SIZE_BYTES, documents)):
            return False
        text = "".join(bodies)
        return text.isascii() and not any(map(text.__contains__, _SEPARATORS))

    def _blocks(self, bodies: Iterable[str]) -> Iterator[bytes]:
        """The rows of plain documents as a COPY takes them."""
        admission, numbers = self._admission, self._numbers
        alike = f"{admission.now}\t{WAITING}\tt"  # in all of them
        rows = zip(
            *(numbers, admission.customers, admission.counts, admission.levels),
            *(admission.priorities, bodies),
            strict=True,
        )
        while block := [
            f"{number}\t{number}\t{customer}\t{count}\t{level}\t{priority}\t{alike}\t"
            f"{len(body)}\t{body}\n"
            for number, customer, count, level, priority, body in islice(rows, _BLOCK)
        ]:
            yield "".join(block).replace(*_ESCAPED).encode()

    def _rows(self) -> Iterator[Row]:
        admission, due = self._admission, self._admission.due
        for position, (document, number) in enumerate(
            zip(admission.documents, self._numbers, strict=True)
        ):
            body, delayed = document.body, position in due
            parent = self._parents[document.parent] if document.parent is not None else None
            yield (
                number,
                admission.customers[position],
                None if delayed else number,
                admission.counts[position],
                admission.now,
                document.size_bytes,
                admission.levels[position],
                admission.priorities[position],
                DELAYED if delayed else WAITING,
                is_payload(document.kind),
                document.due_at,
                document.due_at if delayed else None,
                document.cost,
                None if parent is None else parent.number,
                document.name,
                document.metadata,
                document.content_name,
                document.sha256,
                body if isinstance(body, str) else None,
                body if isinstance(body, bytes) else None,
            )

    def answer(self) -> None:
        """Write the receipts, with the ids of the documents' numbers."""
        self.receipts = self._admission.receipts(ids.encode_all(self._numbers, self._key))

    def _count(self) -> None:
        """Count what came."""
        admission = self._admission
        waits = [position not in admission.due for position in range(len(self._numbers))]
        customers = list(compress(admission.customers, waits))
        flows = list(zip(customers, compress(admission.levels, waits), strict=True))
        # The first one of a flow is the last one that is put here.
        lowest = dict(
            zip(reversed(flows), reversed([*compress(self._numbers, waits)]), strict=True)
        )
        sizes = Counter(flows)
        self._arrived = [(*flow, lowest[flow], n) for flow, n in sizes.items()]
        came = Counter(admission.customers)
        waiting = {customer: [0] * LEVELS for customer in came}
        if admission.levels is not admission.priorities:
            sizes = Counter(zip(customers, compress(admission.priorities, waits), strict=True))
        for (customer, priority), n in sizes.items():
            waiting[customer][priority - 1] = n
        self._moved = [
            (book.number, *(book.count or (None, None)), came[book.number], *waiting[book.number])
            for book in self._books
            if book.number in came
        ]

    def _write_rare(self, session: Session) -> None:
        admission = self._admission
        keys = [
            (
                admission.customers[position],
                document.key,
                document.digest,
                self._numbers[position],
                admission.counts[position],
                admission.priorities[position],
                admission.now,
            )
            for position, document in enumerate(admission.documents)
            if document.key is not None
        ]
        if keys:
            session.ask(_ADD_KEYS, columns(keys))
        made = [(book.number, book.children) for book in self._parents.values() if book]
        if made:
            session.ask(_MOVE_PARENTS, columns(made))
