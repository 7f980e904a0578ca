"""Submitting: one document in one round trip, or many with a COPY; or inside the transaction of the
caller. It locks the customers, in the order of their names, and nothing that a claim needs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from fairturn import ids
from fairturn.clock import stopwatch
from fairturn.errors import KeyReused, QueueFull, StoreRefused
from fairturn.model import KEY_KEPT_US, NewDocument, Receipt
from fairturn.priority import Count
from fairturn.store import Payloads
from fairturn.stores.admission import (
    CustomerBook,
    KnownKey,
    ParentBook,
    PlainCall,
    admit,
    are_plain,
    names_of,
)
from fairturn.stores.postgres.piping import nothing
from fairturn.stores.postgres.rows import MOMENT, QUEUE, QueueRow, columns, is_payload, to_queue
from fairturn.stores.postgres.session import BEGIN, HINT_FIRST, LOCK_GATE, SHARE_SETTINGS, Session
from fairturn.stores.postgres.writing import Writing
from fairturn.stores.values import Row, SettingsCache

_SHARD_BITS = 4  # of the rows of `totals` that there are from the beginning
# How old the number of all documents that wait may be; and how near it may come to the limit before
# submissions go one by one, so that the limit is exact.
_PENDING_S = 1.0
_NEAR = 10_000
_PREPARED = 300  # payloads that are encoded while the server looks

_SUBMIT_TYPES = (
    *("int8", "int8", "int4", "int8", "text", "text", "bytea", "bool", "int8", "bytea", "text"),
    *("text", "text", "int8", "int8", "text", "bytea"),
)
_SUBMITTED = f"fairturn.submit_document({', '.join(f'%s::{kind}' for kind in _SUBMIT_TYPES)})"
SUBMIT_ONE = f"SELECT {_SUBMITTED}"
_SUBMIT_ONE_HINTING = f"SELECT {_SUBMITTED}, {HINT_FIRST}"
_ACCEPTED, _KNOWN, _OF_ANOTHER, _CUSTOMER_FULL, _QUEUE_FULL = range(5)
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
_NUMBERS = "SELECT ARRAY(SELECT nextval('fairturn.document_numbers') FROM generate_series(1, %s))"

_DROP_CUSTOMERS = "DELETE FROM fairturn.customers WHERE number = ANY (%s)"


class _Books:
    """The database as admission sees it, inside one transaction."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.pending = 0  # only where it is near its limit; otherwise there is room enough
        self.next_number = 0  # they are given when all is decided
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


class _Look(NamedTuple):
    """What was read of the database, with the customers locked."""

    books: _Books
    now: int
    queue: QueueRow
    new: list[int]  # customers


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
        told = session.fetch_last(
            SUBMIT_ONE,
            _SUBMIT_ONE_HINTING,
            (
                moment,
                roomy_for,
                self._random.getrandbits(_SHARD_BITS),
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
        answer, number, count, priority, at, pending, maximum, version = told[0][0]
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
        if answer == _OF_ANOTHER:
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
        names = list(names_of(documents))
        look = self._look(session, names, known, moment, own=own)
        books, queue = look.books, look.queue
        if queue.key != known.key:
            raise StoreRefused(
                "the connection leads to another queue than this one; hand in one to the database "
                "of the queue (nothing was stored)"
            )
        if not are_plain(documents):
            _read_rare(session, documents, look)
        admission = admit(documents, books, queue.settings, look.now)
        n = len(admission.documents)
        # Not before all is decided, so that what is refused takes no numbers.
        ((numbers,),) = session.fetch(_NUMBERS, (n,)) if n else [([],)]
        known_customers = list(books.customers.values())
        writing = Writing(admission, known_customers, books.parents, numbers, queue.key)
        writing.copy(session)
        finish = session.commit("submit", writing.answer) if own else session.together()
        with finish:
            writing.write(session, self._random.getrandbits(_SHARD_BITS))
            unused = [number for number in look.new if number not in writing.customers]
            if unused:  # all that came for them had come before
                session.ask(_DROP_CUSTOMERS, (unused,))
        if not own:
            writing.answer()
        return writing.receipts

    def submit_payloads(
        self, session: Session, payloads: Payloads, known: QueueRow, moment: int | None
    ) -> list[Receipt]:
        """The same for payloads that are encoded while the server is at work, in a transaction of
        its own."""
        names = payloads.customers
        look = self._look(
            session, names, known, moment, own=True, meanwhile=partial(payloads.prepare, _PREPARED)
        )
        books, queue = look.books, look.queue
        call = PlainCall(names, books, queue.settings, look.now)
        with session.together(meanwhile=call.admit):
            drawn = session.ask(_NUMBERS, (len(names),))
        ((numbers,),) = drawn.fetchall()
        writing = Writing(
            *(call.admission, list(books.customers.values()), {}, numbers, queue.key),
            bodies=payloads.bodies(),
        )
        writing.copy(session)
        with session.commit("submit", writing.answer):
            writing.write(session, self._random.getrandbits(_SHARD_BITS))
        return writing.receipts

    def _look(
        self,
        session: Session,
        coming: list[str],
        known: QueueRow,
        moment: int | None,
        *,
        own: bool,
        meanwhile: Callable[[], None] = nothing,
    ) -> _Look:
        """Lock the customers, and read what admission needs; and which customers are new."""
        near = self._near(session, known, len(coming))
        names = sorted(set(coming))
        with session.together(meanwhile=meanwhile):
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
        books = _Books(customers.fetchall())
        if pending is not None:
            ((books.pending,),) = pending.fetchall()
        elif self._near(session, queue, len(coming)):  # the settings have changed
            ((books.pending,),) = session.fetch(_PENDING)
        _read_full(session, coming, books, queue)
        return _Look(books, now, queue, [number for (number,) in new.fetchall()])


def _read_full(session: Session, names: list[str], books: _Books, queue: QueueRow) -> None:
    """The true number of documents of customers that may be at their limit."""
    coming = Counter(names)
    full = {
        books.customers[name].number: name
        for name, n in coming.items()
        if books.customers[name].pending + n > queue.settings.waiting_per_customer_max
    }
    if full:
        for number, pending in session.fetch(_PENDING_OF, ([*full],)):
            books.customers[full[number]].pending = pending


def _read_rare(session: Session, documents: Sequence[NewDocument], look: _Look) -> None:
    """Keys and parents, which few documents have."""
    books, now, queue = look.books, look.now, look.queue
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
