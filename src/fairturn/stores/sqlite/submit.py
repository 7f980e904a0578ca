"""Submitting: threads that submit at once share a transaction, and so an fsync."""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from typing import Any

import apsw

from fairturn import ids
from fairturn.clock import stopwatch
from fairturn.errors import FairturnError, StoreBusy, StoreUnavailable
from fairturn.model import KEY_KEPT_US, NewDocument, Receipt
from fairturn.priority import Count
from fairturn.scheduling.flows import Arrived
from fairturn.stores.admission import Admission, CustomerBook, KnownKey, ParentBook, admit
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.counters import MOVE_COUNTS, MOVE_FLOW, Tally
from fairturn.stores.sqlite.rows import (
    ROW_BODY_BYTES_MAX,
    QueueRow,
    fetch_each,
    record,
    row_to_write,
)
from fairturn.stores.values import DELAYED, WAITING, SettingsCache

# How long a leader waits for the threads it had for company the last time.
_COMPANY_WAIT_S = 0.0005

# By the unique index on customers.name, and the primary key of flows.
_CUSTOMER = """
    SELECT name, number, count, count_updated_at, delayed + (
        SELECT coalesce(sum(waiting), 0) FROM flows WHERE flows.customer = customers.number)
    FROM customers WHERE name = ?"""
_KEY = """
    SELECT digest, document, count, priority, submitted_at FROM keys
    WHERE customer = ? AND key = ? AND submitted_at >= ?"""
_PARENT = "SELECT customer, count, priority, children FROM documents WHERE number = ?"

_ADD_CUSTOMER = """
    INSERT INTO customers (number, name, count, count_updated_at, delayed) VALUES (?, ?, ?, ?, ?)"""
_MOVE_CUSTOMER = """
    UPDATE customers SET count = ?, count_updated_at = ?, delayed = delayed + ? WHERE number = ?"""
_MOVE_QUEUE = f"UPDATE queue SET next_number = ?, next_customer = ?, {MOVE_COUNTS}"
_ADD_DOCUMENTS = """
    INSERT INTO documents (
        number, customer, level, order_number, state, priority, count, submitted_at,
        body, kind, size_bytes, sha256, content_name, name, metadata, cost, due_at)
    VALUES """
_VALUES = f"({','.join('?' * 17)})"
_ADD_DOCUMENT = _ADD_DOCUMENTS + _VALUES
# Many rows in one statement: a third faster than a statement for each.
_ROWS_AT_ONCE = 25
_ADD_ROWS_AT_ONCE = _ADD_DOCUMENTS + ",".join([_VALUES] * _ROWS_AT_ONCE)
# The part of a NewDocument that is stored as it is: from body to due_at.
_AS_IT_IS = slice(NewDocument._fields.index("body"), NewDocument._fields.index("due_at") + 1)
_ADD_PARENT = "UPDATE documents SET parent = ? WHERE number = ?"
_ADD_BODY = "INSERT INTO bodies (document, body) VALUES (?, ?)"
_ADD_KEY = """
    INSERT OR REPLACE INTO keys (customer, key, digest, document, count, priority, submitted_at)
    VALUES (?, ?, ?, ?, ?, ?, ?)"""
_MOVE_PARENT = "UPDATE documents SET children = ? WHERE number = ?"


class _Books:
    """The file as admission sees it, inside one transaction."""

    def __init__(self, connection: apsw.Connection, queue: QueueRow, now: int) -> None:
        self._connection = connection
        self._now = now
        self._key = queue.key
        self.pending = sum(queue.waiting) + queue.delayed
        self.next_number = queue.next_number
        self.next_customer = queue.next_customer
        self.customers: dict[str, CustomerBook] = {}
        self.new_customers: set[str] = set()
        self.parents: dict[str, ParentBook | None] = {}
        self.keys: dict[tuple[int, str], KnownKey] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Read these customers together, which is faster than one by one."""
        for name, number, value, updated_at, pending in fetch_each(
            self._connection, _CUSTOMER, [(name,) for name in names]
        ):
            last = None if value is None else Count(value, updated_at)
            self.customers[name] = CustomerBook(number, last, pending)

    def customer(self, name: str) -> CustomerBook:
        book = self.customers.get(name)
        if book is None:  # none of those that were expected, so it is new
            book = self.customers[name] = CustomerBook(self.next_customer, None, 0)
            self.next_customer += 1
            self.new_customers.add(name)
        return book

    def key(self, customer: int, key: str) -> KnownKey | None:
        known = self.keys.get((customer, key))
        if known is None:
            oldest = self._now - KEY_KEPT_US
            row = self._connection.execute(_KEY, (customer, key, oldest)).fetchone()
            if row is None:
                return None
            digest, document, value, priority, submitted_at = row
            receipt = Receipt(ids.encode(document, self._key), "", value, priority, submitted_at)
            known = self.keys[customer, key] = KnownKey(digest, receipt)
        return known

    def parent(self, id: str) -> ParentBook | None:
        if id not in self.parents:
            number = ids.decode(id, self._key)
            row = self._connection.execute(_PARENT, (number,)).fetchone()
            self.parents[id] = None
            if row is not None and number is not None:
                self.parents[id] = ParentBook(number, *row)
        return self.parents[id]

    def receipts(self, admission: Admission) -> list[Receipt]:
        return admission.receipts(ids.encode_all(admission.numbers, self._key))


class _Request:
    """One thread's submission, to be written by itself or by a thread that came later."""

    __slots__ = ("answer", "begun_s", "documents", "done", "error", "size_bytes", "woken")

    def __init__(self, documents: Sequence[NewDocument]) -> None:
        self.documents = documents
        self.begun_s = stopwatch()
        # Contents outside the row are on the disk already.
        self.size_bytes = sum(d.size_bytes for d in documents if d.body is not None)
        self.answer: list[Receipt] | None = None
        self.error: BaseException | None = None
        self.done = False
        self.woken = threading.Lock()
        self.woken.acquire()


class Submitting:
    """Group commit: one thread writes for all that wait at that moment.

    A thread alone writes at once. Threads that shared the last transaction are likely to be back in
    a moment, and without them each would pay for an fsync of its own: so the first one waits for
    them, and the one that completes the company writes for all. If it does not come together in
    half a millisecond, the first one writes for those who are there."""

    def __init__(self, database: Database, cache: SettingsCache, now: Callable[[], int]) -> None:
        self._database = database
        self._cache = cache
        self._now = now
        self._lock = threading.Lock()
        self._writer: _Request | None = None  # whose thread writes at the moment,
        self._taken: list[_Request] = []  # and for whom
        self._requests: list[_Request] = []
        self._company = 1  # how many submit at the same time, as far as one has seen
        self._first: _Request | None = None  # who waits for the others

    def submit(self, documents: Sequence[NewDocument]) -> list[Receipt]:
        # Before all else: in a forked process nobody is left to finish what was begun here.
        self._database.check_process()
        request = _Request(documents)
        try:
            with self._lock:
                self._requests.append(request)
                taken = self._take(request, self._company)
                if not taken and self._first is None and self._writer is None:
                    self._first = request
            while not taken and not request.done:
                taken = self._wait(request)
            if taken:
                self._write_all(taken)
                self._hand_back()
        except BaseException as interrupt:
            self._leave(request, interrupt)
            raise
        if request.error is not None:
            raise request.error
        assert request.answer is not None
        return request.answer

    def _take(self, writer: _Request, enough: int) -> list[_Request]:
        """Take all that wait, to write for them, if they are enough; under the lock."""
        if self._writer is not None or len(self._requests) < enough:
            return []
        self._writer, self._first = writer, None
        self._taken, self._requests = self._requests, []
        return self._taken

    def _wait(self, request: _Request) -> list[_Request]:
        """Wait to be answered. Whoever is the first takes all when it has waited enough."""
        if self._first is not request:
            request.woken.acquire()
            if self._first is not request:
                return []
            with self._lock:  # all may have come while others were written
                taken = self._take(request, self._company)
            if taken:
                return taken
        if not request.woken.acquire(timeout=_COMPANY_WAIT_S):
            with self._lock:
                if self._first is request:
                    return self._take(request, 1)
        return []

    def _hand_back(self) -> None:
        """Let those go whom this thread has written for, and let others write. It can be done once
        more if it was interrupted, so the writer is forgotten last."""
        with self._lock:
            for request in self._taken:
                request.done = True
                if request is not self._writer:
                    _wake(request)
            self._company = len(self._taken) + len(self._requests)
            self._wake_first()
            self._writer, self._taken = None, []

    def _wake_first(self) -> None:
        """Let one of those that came meanwhile see to the others; under the lock."""
        self._first = self._requests[0] if self._requests else None
        if self._first is not None:
            _wake(self._first)

    def _leave(self, request: _Request, interrupt: BaseException) -> None:
        """Whoever is interrupted leaves the line, and lets go whom it was to write for: otherwise
        all others might wait for ever."""
        with self._lock:
            if request in self._requests:
                self._requests.remove(request)
            if self._first is request:
                self._wake_first()
            writes = self._writer is request
        if writes:
            for other in self._taken:
                if other.answer is None and other.error is None:
                    other.error = StoreUnavailable(
                        "the thread that wrote this submission together with its own was ended by "
                        f"{interrupt!r}, perhaps when it was stored already; try again with a key"
                    )
            self._hand_back()

    def _write_all(self, requests: list[_Request]) -> None:
        """Write all in one transaction; if that fails, each in its own, so that a submission fails
        only by itself. A lock that was waited for in vain would be for each of them, too."""
        try:
            self._commit(requests)
        except StoreBusy as error:
            _fail(requests, error)
        except Exception as error:
            if len(requests) == 1:
                _fail(requests, error)
                return
            for request in requests:
                request.error = None  # a refusal is decided anew
                self._write_all([request])

    def _commit(self, requests: list[_Request]) -> None:
        self._database.refuse_if_full(sum(request.size_bytes for request in requests))
        since_s = min(request.begun_s for request in requests)
        with self._database.writing("submit", since_s=since_s) as connection:
            queue = row_to_write(connection, self._cache)
            now = self._now()
            books = _Books(connection, queue, now)
            books.expect({d.customer for request in requests for d in request.documents})
            admitted, answers = _admit_all(requests, books, queue, now)
            if admitted.documents:
                _write(connection, books, admitted, now)
        for request, receipts in answers:
            request.answer = receipts


def _fail(requests: list[_Request], error: Exception) -> None:
    for request in requests:
        request.error = request.error or error


def _wake(request: _Request) -> None:
    """Wake its thread, unless it is about to wake already."""
    if request.woken.locked():
        request.woken.release()


def _admit_all(
    requests: list[_Request], books: _Books, queue: QueueRow, now: int
) -> tuple[Admission, list[tuple[_Request, list[Receipt]]]]:
    """Decide over all requests at once, which is cheaper by far; if that is refused, over one
    after the other, so that only those are refused that have to be."""
    try:
        together = chain.from_iterable(request.documents for request in requests)
        admitted = admit(together, books, queue.settings, now)
    except FairturnError:
        return _admit_each(requests, books, queue, now)
    receipts = iter(books.receipts(admitted))
    return admitted, [(r, list(islice(receipts, len(r.documents)))) for r in requests]


def _admit_each(
    requests: list[_Request], books: _Books, queue: QueueRow, now: int
) -> tuple[Admission, list[tuple[_Request, list[Receipt]]]]:
    admitted = Admission(queue.next_number, now)
    answers = []
    for request in requests:
        try:
            admission = admit(request.documents, books, queue.settings, now)
        except FairturnError as refusal:
            request.error = refusal
        else:
            admitted.extend(admission)
            receipts = books.receipts(admission)
            answers.append((request, receipts))
            _remember_keys(books, admission, receipts)
    return admitted, answers


def _remember_keys(books: _Books, admission: Admission, receipts: list[Receipt]) -> None:
    """Let the next submission that shares the transaction know the keys of this one."""
    fresh = (receipt for receipt in receipts if not receipt.repeated)
    for receipt, document in zip(fresh, admission.documents, strict=True):
        if document.key is not None:
            customer = books.customers[document.customer].number
            books.keys[customer, document.key] = KnownKey(document.digest, receipt)


def _write(connection: apsw.Connection, books: _Books, admission: Admission, now: int) -> None:
    tally = Tally()
    arrived: dict[tuple[int, int], list[int]] = {}  # flow -> [lowest order, how many]
    _write_documents(connection, admission, tally, arrived, now)
    _write_rare(connection, books, admission, now)
    _write_customers(connection, books, set(admission.customers), tally.delayed)
    connection.executemany(MOVE_FLOW, [(*f, n, low - 1) for f, (low, n) in arrived.items()])
    connection.execute(_MOVE_QUEUE, (books.next_number, books.next_customer, *tally.counts()))
    record(connection, now, [Arrived(*flow, *lowest_n) for flow, lowest_n in arrived.items()])


def _write_documents(
    connection: apsw.Connection,
    admission: Admission,
    tally: Tally,
    arrived: dict[tuple[int, int], list[int]],
    now: int,
) -> None:
    """The rows, put together column by column: documents come by the thousand."""
    first = admission.first_number
    numbers = range(first, first + len(admission.documents))
    orders: Sequence[int | None] = numbers
    states: Iterable[int] = repeat(WAITING)
    levels, priorities = admission.levels, admission.priorities
    customers = admission.customers
    columns: list[Sequence[Any]] = list(zip(*admission.documents, strict=True))
    bodies, *stored = columns[_AS_IT_IS]
    if admission.due:
        due = admission.due
        orders = [None if n - first in due else n for n in numbers]
        states = [WAITING if order is not None else DELAYED for order in orders]
        for position in due:
            tally.delay(customers[position])
    if max(stored[_SIZE]) > ROW_BODY_BYTES_MAX:
        large = [
            (n, body)
            for n, body, size in zip(numbers, bodies, stored[_SIZE], strict=True)
            if size > ROW_BODY_BYTES_MAX and body is not None
        ]
        connection.executemany(_ADD_BODY, large)
        elsewhere = {number for number, _ in large}
        bodies = [None if n in elsewhere else b for n, b in zip(numbers, bodies, strict=True)]
    rows = list(
        zip(
            numbers,
            customers,
            levels,
            orders,
            states,
            priorities,
            admission.counts,
            repeat(now),
            bodies,
            *stored,
            strict=False,
        )
    )
    together = len(rows) - len(rows) % _ROWS_AT_ONCE
    for begin in range(0, together, _ROWS_AT_ONCE):
        values = chain.from_iterable(rows[begin : begin + _ROWS_AT_ONCE])
        connection.execute(_ADD_ROWS_AT_ONCE, tuple(values))
    connection.executemany(_ADD_DOCUMENT, rows[together:])
    waiting = tally.levels
    for flow, priority, order in zip(
        zip(customers, levels, strict=True), priorities, orders, strict=True
    ):
        if order is None:
            continue
        waiting[priority] = waiting.get(priority, 0) + 1
        if flow in arrived:
            arrived[flow][1] += 1
        else:
            arrived[flow] = [order, 1]  # the lowest comes first


_SIZE = NewDocument._fields[_AS_IT_IS][1:].index("size_bytes")


def _write_rare(connection: apsw.Connection, books: _Books, admission: Admission, now: int) -> None:
    """Keys and parents, which few documents have."""
    if all(document.key is None and document.parent is None for document in admission.documents):
        return
    keys = []
    parents = []
    for position, document in enumerate(admission.documents):
        number = admission.first_number + position
        if document.key is not None:
            value, priority = admission.counts[position], admission.priorities[position]
            customer = admission.customers[position]
            keys.append((customer, document.key, document.digest, number, value, priority, now))
        if document.parent is not None:
            book = books.parents[document.parent]
            assert book is not None
            parents.append((book.number, number))
    if keys:
        connection.executemany(_ADD_KEY, keys)
    if parents:
        connection.executemany(_ADD_PARENT, parents)
        made = [(book.children, book.number) for book in books.parents.values() if book]
        connection.executemany(_MOVE_PARENT, made)


def _write_customers(
    connection: apsw.Connection, books: _Books, admitted: set[int], delayed: dict[int, int]
) -> None:
    new = []
    moved = []
    for name, book in books.customers.items():
        if book.number not in admitted:
            continue
        value, updated_at = book.count or (None, None)
        if name in books.new_customers:
            new.append((book.number, name, value, updated_at, delayed.get(book.number, 0)))
        else:
            moved.append((value, updated_at, delayed.get(book.number, 0), book.number))
    if new:
        connection.executemany(_ADD_CUSTOMER, new)
    if moved:
        connection.executemany(_MOVE_CUSTOMER, moved)
