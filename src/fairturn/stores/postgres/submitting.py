"""Submitting: one document in one round trip, or many with a COPY; or inside the transaction of the
caller. It locks the customers, in the order of their names, and nothing that a claim needs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from random import Random

from fairturn import ids
from fairturn.clock import stopwatch
from fairturn.errors import KeyReused, QueueFull
from fairturn.model import KEY_KEPT_US, NewDocument, Receipt
from fairturn.priority import LEVELS, Count
from fairturn.stores.admission import Admission, CustomerBook, KnownKey, ParentBook, admit
from fairturn.stores.postgres.database import (
    BEGIN,
    LOCK_GATE,
    SHARE_SETTINGS,
    Session,
)
from fairturn.stores.postgres.rows import (
    MOMENT,
    QUEUE,
    RECORD_ARRIVED,
    QueueRow,
    columns,
    is_payload,
    to_queue,
)
from fairturn.stores.values import DELAYED, WAITING, Row, SettingsCache

SHARDS = 16
# From here on a COPY is faster than arrays.
_COPY_FROM = 50
_PLACE = "#"  # begins the id of a document that has no number yet: its place follows
# How old the number of all documents that wait may be; and how near it may come to the limit before
# submissions go one by one, so that the limit is exact.
_PENDING_S = 1.0
_NEAR = 10_000

_SUBMIT_TYPES = (
    *("int8", "int8", "int4", "int8", "text", "text", "bytea", "bool", "int8", "bytea", "text"),
    *("text", "text", "int8", "int8", "text", "bytea"),
)
_SUBMIT_ONE = f"""
    SELECT * FROM fairturn.submit_one({", ".join(f"%s::{kind}" for kind in _SUBMIT_TYPES)})"""
_ACCEPTED, _KNOWN, _CUSTOMER_FULL, _QUEUE_FULL = range(4)
_PENDING = "SELECT fairturn.pending()"

# In the order of names, so that nobody waits for somebody who waits for them.
_ADD_CUSTOMERS = """
    INSERT INTO fairturn.customers (name)
    SELECT name FROM unnest(%s::text[]) AS n(name)
    WHERE NOT EXISTS (SELECT 1 FROM fairturn.customers c WHERE c.name = n.name)
    ON CONFLICT (name) DO NOTHING RETURNING number"""
_CUSTOMERS = """
    SELECT name, number, count, count_updated_at, submitted FROM fairturn.customers
    WHERE name = ANY (%s) ORDER BY name FOR NO KEY UPDATE"""
_NOW = f"SELECT {MOMENT}"
_PENDING_OF = """
    SELECT c.number, fairturn.pending_of(c.number, c.arrived) FROM fairturn.customers c
    WHERE c.number = ANY (%s)"""
_KEYS = """
    SELECT k.customer, k.key, k.digest, k.document, k.count, k.priority, k.submitted_at
    FROM unnest(%s::bigint[], %s::text[]) AS g(customer, key)
        JOIN fairturn.keys k ON k.customer = g.customer AND k.key = g.key
    WHERE k.submitted_at >= %s"""
_PARENTS = """
    SELECT d.number, d.customer, d.count, d.priority, coalesce(c.made, 0)
    FROM fairturn.documents d LEFT JOIN fairturn.children c ON c.parent = d.number
    WHERE d.number = ANY (%s)"""
_NUMBERS = "SELECT nextval('fairturn.document_numbers') FROM generate_series(1, %s)"

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
_DROP_CUSTOMERS = "DELETE FROM fairturn.customers WHERE number = ANY (%s)"


class _Books:
    """The database as admission sees it, inside one transaction."""

    def __init__(self, queue: QueueRow, rows: Iterable[Row]) -> None:
        self._key = queue.key
        self.pending = 0  # only where it is near its limit; otherwise there is room enough
        self.next_number = 0  # they are given when all is decided
        self.numbers: Sequence[int] = ()
        self.customers: dict[str, CustomerBook] = {}
        self.parents: dict[str, ParentBook | None] = {}
        self.keys: dict[tuple[int, str], KnownKey] = {}
        for name, number, value, updated_at, submitted in rows:
            last = None if value is None else Count(value, updated_at)
            # It has not more documents waiting or delayed than it ever had.
            self.customers[name] = CustomerBook(number, last, submitted)

    def customer(self, name: str) -> CustomerBook:
        return self.customers[name]

    def key(self, customer: int, key: str) -> KnownKey | None:
        return self.keys.get((customer, key))

    def parent(self, id: str) -> ParentBook | None:
        return self.parents.get(id)

    def encode(self, numbers: range) -> list[str]:
        # The true numbers are not known yet: the receipts get their ids at the end.
        return [f"{_PLACE}{position}" for position in numbers]


class Submitting:
    """The submissions of one process."""

    def __init__(self, cache: SettingsCache, random: Random) -> None:
        self._cache = cache
        self._random = random
        self._pending = 0
        self._pending_until = 0.0  # on the stopwatch

    # ── One ──────────────────────────────────────────────────────────────────────────────────────

    def submit_one(
        self, session: Session, document: NewDocument, known: QueueRow, moment: int | None
    ) -> tuple[list[Receipt], int]:
        """One document without a parent; and the version of the settings."""
        body = document.body
        maximum = known.settings.waiting_max
        roomy_for = None if self._near(session, known, 1) else maximum
        session.committing = document.key is None  # with a key it may be sent twice
        ((answer, number, count, priority, at, digest, pending, maximum, version),) = session.fetch(
            _SUBMIT_ONE,
            (
                moment,
                roomy_for,
                self._random.randrange(SHARDS),
                KEY_KEPT_US,
                document.customer,
                body if isinstance(body, str) else None,
                body if isinstance(body, bytes) else None,
                is_payload(document.kind),
                document.size_bytes,
                document.sha256,
                document.content_name,
                document.name,
                document.metadata,
                document.cost,
                document.due_at,
                document.key,
                document.digest,
            ),
        )
        if answer == _CUSTOMER_FULL:
            raise QueueFull(
                limit="waiting_per_customer_max",
                maximum=maximum,
                waiting=pending,
                customer=document.customer,
            )
        if answer == _QUEUE_FULL:
            raise QueueFull(limit="waiting_max", maximum=maximum, waiting=pending, customer=None)
        id = ids.encode(number, known.key)
        if answer == _KNOWN and digest != document.digest:
            raise KeyReused(
                f"the idempotency key {document.key!r} of customer {document.customer!r} belongs "
                f"to document {id}, which has another content, metadata, cost or due time"
            )
        receipt = Receipt(id, document.customer, count, priority, at, answer == _KNOWN)
        return [receipt], version

    def _near(self, session: Session, known: QueueRow, n: int) -> bool:
        """Whether so many more documents may come near the limit of all that wait."""
        maximum = known.settings.waiting_max
        room = maximum - max(_NEAR, maximum // 10) - n
        if room <= 0:
            return True
        if stopwatch() > self._pending_until:
            ((self._pending,),) = session.fetch(_PENDING)
            self._pending_until = stopwatch() + _PENDING_S
        return self._pending > room

    # ── Many ─────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        session: Session,
        documents: Sequence[NewDocument],
        known: QueueRow,
        moment: int | None,
        *,
        own: bool,
    ) -> list[Receipt]:
        """All documents or none. With `own` in a transaction of its own; otherwise in that of the
        caller, who commits it."""
        near = self._near(session, known, len(documents))
        books, now, queue, new = self._look(session, documents, moment, near=near, own=own)
        admission = admit(documents, books, queue.settings, now)
        n = len(admission.documents)
        # Not before all is decided, so that what is refused takes no numbers.
        numbers = [number for (number,) in session.fetch(_NUMBERS, (n,))] if n else []
        writing = _Writing(admission, books, numbers, queue.key, now)
        if n >= _COPY_FROM:
            session.copy(_COPY_DOCUMENTS, _DOCUMENT_TYPES, writing.rows(), writing.prepare)
        else:
            writing.prepare()
        together = session.commit("submit") if own else session.together()
        with together:
            if 0 < n < _COPY_FROM:
                session.ask(_ADD_DOCUMENTS, columns([*writing.rows()]))
            if n:
                writing.write(session, self._random.randrange(SHARDS))
            unused = [number for number in new if number not in writing.customers]
            if unused:  # all that came for them had come before
                session.ask(_DROP_CUSTOMERS, (unused,))
        return writing.receipts

    def _look(
        self,
        session: Session,
        documents: Sequence[NewDocument],
        moment: int | None,
        *,
        near: bool,
        own: bool,
    ) -> tuple[_Books, int, QueueRow, list[int]]:
        """Lock the customers, and read what admission needs; and which customers are new."""
        names = sorted({document.customer for document in documents})
        with session.together():
            if own:
                session.ask(BEGIN)
            if near:
                session.ask(LOCK_GATE)
            session.ask(SHARE_SETTINGS)
            new = session.ask(_ADD_CUSTOMERS, (names,))
            customers = session.ask(_CUSTOMERS, (names,))
            told = session.ask(QUEUE)
            told_now = session.ask(_NOW, (moment,))
            pending = session.ask(_PENDING) if near else None
        queue = to_queue(told.fetchall()[0], self._cache)
        ((now,),) = told_now.fetchall()
        books = _Books(queue, customers.fetchall())
        if pending is not None:
            ((books.pending,),) = pending.fetchall()
        elif self._near(session, queue, len(documents)):  # the settings have changed
            ((books.pending,),) = session.fetch(_PENDING)
        self._read_rare(session, books, documents, queue, now)
        return books, now, queue, [number for (number,) in new.fetchall()]

    def _read_rare(
        self,
        session: Session,
        books: _Books,
        documents: Sequence[NewDocument],
        queue: QueueRow,
        now: int,
    ) -> None:
        """Keys and parents, which few documents have, and the true number of documents of customers
        that may be at their limit."""
        coming = Counter(document.customer for document in documents)
        full = {
            books.customers[name].number: name
            for name, n in coming.items()
            if books.customers[name].pending + n > queue.settings.waiting_per_customer_max
        }
        if full:
            for number, pending in session.fetch(_PENDING_OF, ([*full],)):
                books.customers[full[number]].pending = pending
        keys = [(books.customers[d.customer].number, d.key) for d in documents if d.key is not None]
        if keys:
            oldest = now - KEY_KEPT_US
            for customer, key, digest, document, *receipt in session.fetch(
                _KEYS, (*columns(keys), oldest)
            ):
                known = Receipt(ids.encode(document, queue.key), "", *receipt)
                books.keys[customer, key] = KnownKey(digest, known)
        parents = {d.parent: ids.decode(d.parent, queue.key) for d in documents if d.parent}
        if parents:
            numbers = [number for number in parents.values() if number is not None]
            found = {row[0]: ParentBook(*row) for row in session.fetch(_PARENTS, (numbers,))}
            for id, number in parents.items():
                books.parents[id] = None if number is None else found.get(number)


class _Writing:
    """What was admitted, as rows."""

    def __init__(
        self, admission: Admission, books: _Books, numbers: Sequence[int], key: int, now: int
    ) -> None:
        self._admission = admission
        self._books = books
        self._numbers = numbers
        self._key = key
        self._now = now
        self._moved: list[Row] = []
        self._arrived: list[Row] = []
        self._delayed = 0
        self.customers = set(admission.customers)
        self.receipts: list[Receipt] = []

    def rows(self) -> Iterator[Row]:
        admission, now, due = self._admission, self._now, self._admission.due
        parents = self._books.parents
        for position, (document, number) in enumerate(
            zip(admission.documents, self._numbers, strict=True)
        ):
            body, delayed = document.body, position in due
            parent = parents[document.parent] if document.parent is not None else None
            yield (
                number,
                admission.customers[position],
                None if delayed else number,
                admission.counts[position],
                now,
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

    def prepare(self) -> None:
        """Count what came, and write the receipts, with the ids of the documents' numbers."""
        admission = self._admission
        arrived: dict[tuple[int, int], list[int]] = {}  # flow -> [lowest order, how many]
        waiting: Counter[tuple[int, int]] = Counter()  # by customer and priority
        for position, number in enumerate(self._numbers):
            if position in admission.due:
                self._delayed += 1
                continue
            customer = admission.customers[position]
            waiting[customer, admission.priorities[position]] += 1
            arrived.setdefault((customer, admission.levels[position]), [number, 0])[1] += 1
        self._arrived = [(*flow, *lowest_n) for flow, lowest_n in arrived.items()]
        came = Counter(admission.customers)
        for book in self._books.customers.values():
            if book.number in self.customers:
                value, updated_at = book.count or (None, None)
                by_priority = (waiting[book.number, p] for p in range(1, LEVELS + 1))
                self._moved.append(
                    (book.number, value, updated_at, came[book.number], *by_priority)
                )
        given = ids.encode_all(self._numbers, self._key)
        self.receipts = [
            receipt._replace(id=given[int(receipt.id[1:])])
            if receipt.id.startswith(_PLACE)
            else receipt
            for receipt in admission.receipts
        ]

    def write(self, session: Session, shard: int) -> None:
        """Everything but the documents."""
        self._write_rare(session)
        moved = columns(self._moved)
        session.ask(_MOVE_CUSTOMERS, moved)
        totals = [sum(column) for column in moved[4:]]
        session.ask(_COUNT_ARRIVED, (shard, totals, self._delayed))
        if self._arrived:
            session.ask(RECORD_ARRIVED, (self._now, *columns(self._arrived)))

    def _write_rare(self, session: Session) -> None:
        admission, now = self._admission, self._now
        keys = [
            (
                admission.customers[position],
                document.key,
                document.digest,
                self._numbers[position],
                admission.counts[position],
                admission.priorities[position],
                now,
            )
            for position, document in enumerate(admission.documents)
            if document.key is not None
        ]
        if keys:
            session.ask(_ADD_KEYS, columns(keys))
        made = [(book.number, book.children) for book in self._books.parents.values() if book]
        if made:
            session.ask(_MOVE_PARENTS, columns(made))
