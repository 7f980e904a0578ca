"""Submissions. Concurrent submissions share a transaction and its fsync (decision 0014)."""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from typing import Any

import apsw

from fairturn.clock import stopwatch
from fairturn.errors import FairturnError, StoreBusy, StoreUnavailable
from fairturn.model import KEY_KEPT_US, NewDocument, Receipt
from fairturn.priority import Count
from fairturn.scheduling.flows import BANDS_PER_KIND, ArrivalEvent
from fairturn.stores import ids
from fairturn.stores.admission import Admission, AdmissionCustomer, AdmissionParent, KnownKey, admit
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.rows import (
    MOVE_COUNTS,
    MOVE_FLOW,
    ROW_BODY_BYTES_MAX,
    CounterChanges,
    QueueRow,
    create_kind,
    fetch_each,
    kind_numbers,
    record,
    row_to_write,
)
from fairturn.stores.values import DELAYED, WAITING, SettingsCache

# How long the first thread of a group waits for as many threads as the last group had.
_GROUP_WAIT_S = 0.0005

# By the unique index on customers.name, and flows_customer.
_CUSTOMER = """
    SELECT name, number, count, count_updated_at, delayed + (
        SELECT coalesce(sum(waiting), 0) FROM flows INDEXED BY flows_customer
        WHERE flows.customer = customers.number),
        stored_bytes, bytes_max
    FROM customers WHERE name = ?"""
_KEY = """
    SELECT digest, document, count, priority, submitted_at FROM idempotency_keys
    WHERE customer = ? AND key = ? AND submitted_at >= ?"""
_PARENT = "SELECT customer, count, priority, children FROM documents WHERE number = ?"

_ADD_CUSTOMER = """
    INSERT INTO customers (number, name, count, count_updated_at, stored_bytes, delayed)
    VALUES (?, ?, ?, ?, ?, ?)"""
_MOVE_CUSTOMER = """
    UPDATE customers SET count = ?, count_updated_at = ?, stored_bytes = ?, delayed = delayed + ?
    WHERE number = ?"""
_MOVE_QUEUE = f"UPDATE queue SET next_number = ?, next_customer = ?, {MOVE_COUNTS}"
# The fields of a NewDocument that are stored unchanged: from body to due_at.
_UNCHANGED = slice(NewDocument._fields.index("body"), NewDocument._fields.index("due_at") + 1)
_DECIDED = (
    "number",
    "customer",
    "kind",
    "level",
    "order_number",
    "state",
    "priority",
    "count",
    "submitted_at",
)
_COLUMNS = (*_DECIDED, *NewDocument._fields[_UNCHANGED])
_ADD_DOCUMENTS = f"INSERT INTO documents ({', '.join(_COLUMNS)}) VALUES "
_VALUES = f"({','.join('?' * len(_COLUMNS))})"
_ADD_DOCUMENT = _ADD_DOCUMENTS + _VALUES
# A third faster than a statement for each row.
_BATCH_ROWS = 25
_ADD_BATCH = _ADD_DOCUMENTS + ",".join([_VALUES] * _BATCH_ROWS)
_ADD_PARENT = "UPDATE documents SET parent = ? WHERE number = ?"
_ADD_BODY = "INSERT INTO bodies (document, body) VALUES (?, ?)"
_ADD_KEY = """
    INSERT OR REPLACE INTO idempotency_keys (customer, key, digest, document, count, priority,
        submitted_at)
    VALUES (?, ?, ?, ?, ?, ?, ?)"""
_MAY_EXPIRE = "INSERT INTO expirations (expires_at, document) VALUES (?, ?)"
_SET_EXPIRY = "UPDATE documents SET expires_at = ? WHERE number = ?"
_EXPIRES_IN = "SELECT name, expires_in_us FROM kinds WHERE expires_in_us IS NOT NULL"
_MOVE_PARENT = "UPDATE documents SET children = ? WHERE number = ?"


class _FileState:
    """The `AdmissionState` of one transaction on the file."""

    def __init__(self, connection: apsw.Connection, queue: QueueRow, now: int) -> None:
        self._connection = connection
        self._now = now
        self._key = queue.key
        self._has_expiry_rules = queue.has_expiry_rules
        self.pending = sum(queue.waiting) + queue.delayed
        self.next_number = queue.next_number
        self.next_customer = queue.next_customer
        self.customers: dict[str, AdmissionCustomer] = {}
        self.new_customers: set[str] = set()
        self.parents: dict[str, AdmissionParent | None] = {}
        self.keys: dict[tuple[int, str], KnownKey] = {}
        self._kinds: dict[str, int] = {}

    @property
    def kinds(self) -> dict[str, int]:
        if not self._kinds:
            self._kinds = kind_numbers(self._connection)
        return self._kinds

    def create_kind(self, name: str) -> None:
        self._kinds[name] = create_kind(self._connection, name)

    @property
    def expires_in_us(self) -> dict[str, int]:
        if not self._has_expiry_rules:
            return {}
        return dict(self._connection.execute(_EXPIRES_IN))

    def expect(self, names: Iterable[str]) -> None:
        """Load these customers in one pass. `customer` creates all others."""
        for name, number, value, updated_at, *counted in fetch_each(
            self._connection, _CUSTOMER, [(name,) for name in names]
        ):
            last = None if value is None else Count(value, updated_at)
            self.customers[name] = AdmissionCustomer(number, last, *counted)

    def customer(self, name: str) -> AdmissionCustomer:
        customer = self.customers.get(name)
        if customer is None:
            customer = self.customers[name] = AdmissionCustomer(self.next_customer, None, 0)
            self.next_customer += 1
            self.new_customers.add(name)
        return customer

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

    def parent(self, id: str) -> AdmissionParent | None:
        if id not in self.parents:
            number = ids.decode(id, self._key)
            row = self._connection.execute(_PARENT, (number,)).fetchone()
            self.parents[id] = None
            if row is not None and number is not None:
                self.parents[id] = AdmissionParent(number, *row)
        return self.parents[id]

    def receipts(self, admission: Admission) -> list[Receipt]:
        return admission.receipts(ids.encode_all(admission.numbers, self._key))


class _Request:
    """A submission of one thread, to be written by that thread or another one of its group."""

    __slots__ = ("answer", "begun_s", "documents", "done", "error", "size_bytes", "woken")

    def __init__(self, documents: Sequence[NewDocument]) -> None:
        self.documents = documents
        self.begun_s = stopwatch()
        # External contents are on the disk already.
        self.size_bytes = sum(d.size_bytes for d in documents if d.body is not None)
        self.answer: list[Receipt] | None = None
        self.error: BaseException | None = None
        self.done = False
        self.woken = threading.Lock()
        self.woken.acquire()


class GroupCommit:
    """Group commit: one thread writes the submissions of all threads that wait.

    A single thread writes at once. Threads that shared the last transaction are likely to submit
    again soon, and without a group each would pay for its own fsync. The first thread therefore
    waits for them, and the thread that completes the group writes for all. If the group is not
    complete within `_GROUP_WAIT_S`, the first thread writes for those that have come.
    """

    def __init__(self, database: Database, cache: SettingsCache, now: Callable[[], int]) -> None:
        self._database = database
        self._cache = cache
        self._now = now
        self._lock = threading.Lock()
        self._writer: _Request | None = None  # of the thread that is writing
        self._taken: list[_Request] = []  # the group that it writes
        self._requests: list[_Request] = []  # not taken yet
        self._group_size = 1  # expected, from the last group
        self._first: _Request | None = None  # of the thread that waits for the group

    def submit(self, documents: Sequence[NewDocument]) -> list[Receipt]:
        # First of all: in a forked process the threads that would write this request do not exist.
        self._database.check_process()
        request = _Request(documents)
        try:
            with self._lock:
                self._requests.append(request)
                taken = self._take(request, self._group_size)
                if not taken and self._first is None and self._writer is None:
                    self._first = request
            while not taken and not request.done:
                taken = self._wait(request)
            if taken:
                self._write_all(taken)
                self._complete_group()
        except BaseException as interrupt:
            self._leave(request, interrupt)
            raise
        if request.error is not None:
            raise request.error
        assert request.answer is not None
        return request.answer

    def _take(self, writer: _Request, enough: int) -> list[_Request]:
        """Take all requests for `writer` if there are `enough`; under the lock."""
        if self._writer is not None or len(self._requests) < enough:
            return []
        self._writer, self._first = writer, None
        self._taken, self._requests = self._requests, []
        return self._taken

    def _wait(self, request: _Request) -> list[_Request]:
        """Wait until the request is done. The first of a group takes all after `_GROUP_WAIT_S`."""
        if self._first is not request:
            request.woken.acquire()
            if self._first is not request:
                return []
            with self._lock:  # the group may have become complete during the last transaction
                taken = self._take(request, self._group_size)
            if taken:
                return taken
        if not request.woken.acquire(timeout=_GROUP_WAIT_S):
            with self._lock:
                if self._first is request:
                    return self._take(request, 1)
        return []

    def _complete_group(self) -> None:
        """Wake the threads of the group, and the first of the next group. The call can be repeated
        if it was interrupted, because it resets the writer last."""
        with self._lock:
            for request in self._taken:
                request.done = True
                if request is not self._writer:
                    _wake(request)
            self._group_size = len(self._taken) + len(self._requests)
            self._wake_first()
            self._writer, self._taken = None, []

    def _wake_first(self) -> None:
        """Make the oldest request the first of the next group; under the lock."""
        self._first = self._requests[0] if self._requests else None
        if self._first is not None:
            _wake(self._first)

    def _leave(self, request: _Request, interrupt: BaseException) -> None:
        """Withdraw the request of an interrupted thread, and fail those that it was writing, whose
        threads would otherwise wait forever."""
        with self._lock:
            if request in self._requests:
                self._requests.remove(request)
            if self._first is request:
                self._wake_first()
            is_writer = self._writer is request
        if is_writer:
            for other in self._taken:
                if other.answer is None and other.error is None:
                    other.error = StoreUnavailable(
                        f"the thread that wrote this submission was interrupted by {interrupt!r}; "
                        "the submission may be stored; retry it with an idempotency key"
                    )
            self._complete_group()

    def _write_all(self, requests: list[_Request]) -> None:
        """Write all requests in one transaction; if it fails, each in its own, so that a request
        fails only for its own reasons. After a timeout for a lock, all fail."""
        try:
            self._commit(requests)
        except StoreBusy as error:
            _fail(requests, error)
        except Exception as error:
            if len(requests) == 1:
                _fail(requests, error)
                return
            for request in requests:
                request.error = None  # admission is repeated
                self._write_all([request])

    def _commit(self, requests: list[_Request]) -> None:
        self._database.refuse_if_full(sum(request.size_bytes for request in requests))
        since_s = min(request.begun_s for request in requests)
        with self._database.writing("submit", since_s=since_s) as connection:
            queue = row_to_write(connection, self._cache)
            now = self._now()
            state = _FileState(connection, queue, now)
            state.expect({d.customer for request in requests for d in request.documents})
            admitted, answers = _admit_all(requests, state, queue, now)
            if admitted.documents:
                _write(connection, state, admitted, now)
        for request, receipts in answers:
            request.answer = receipts


def _fail(requests: list[_Request], error: Exception) -> None:
    for request in requests:
        request.error = request.error or error


def _wake(request: _Request) -> None:
    """Wake the thread of a request, unless it has been woken."""
    if request.woken.locked():
        request.woken.release()


def _admit_all(
    requests: list[_Request], state: _FileState, queue: QueueRow, now: int
) -> tuple[Admission, list[tuple[_Request, list[Receipt]]]]:
    """Admit all requests at once, which is much cheaper; if that raises, one after the other, so
    that only the offending ones are rejected."""
    try:
        together = chain.from_iterable(request.documents for request in requests)
        admitted = admit(together, state, queue.settings, now)
    except FairturnError:
        return _admit_each(requests, state, queue, now)
    receipts = iter(state.receipts(admitted))
    return admitted, [(r, list(islice(receipts, len(r.documents)))) for r in requests]


def _admit_each(
    requests: list[_Request], state: _FileState, queue: QueueRow, now: int
) -> tuple[Admission, list[tuple[_Request, list[Receipt]]]]:
    admitted = Admission(queue.next_number, now)
    answers = []
    for request in requests:
        try:
            admission = admit(request.documents, state, queue.settings, now)
        except FairturnError as refusal:
            request.error = refusal
        else:
            admitted.extend(admission)
            receipts = state.receipts(admission)
            answers.append((request, receipts))
            _add_keys(state, admission, receipts)
    return admitted, answers


def _add_keys(state: _FileState, admission: Admission, receipts: list[Receipt]) -> None:
    """Make the keys of a request known to the next one in the transaction."""
    fresh = (receipt for receipt in receipts if not receipt.replayed)
    for receipt, document in zip(fresh, admission.documents, strict=True):
        if document.key is not None:
            customer = state.customers[document.customer].number
            state.keys[customer, document.key] = KnownKey(document.digest, receipt)


def _write(connection: apsw.Connection, state: _FileState, admission: Admission, now: int) -> None:
    changes = CounterChanges()
    arrived: dict[tuple[int, int], list[int]] = {}  # by flow: lowest order, number of documents
    _write_documents(connection, admission, changes, arrived, now)
    _write_rare(connection, state, admission, now)
    _write_customers(connection, state, set(admission.customers), changes.delayed)
    connection.executemany(MOVE_FLOW, [(*f, n, low - 1) for f, (low, n) in arrived.items()])
    connection.execute(_MOVE_QUEUE, (state.next_number, state.next_customer, *changes.counts()))
    changes.write_kinds(connection)
    record(connection, now, [ArrivalEvent(*flow, *lowest_n) for flow, lowest_n in arrived.items()])


def _write_documents(
    connection: apsw.Connection,
    admission: Admission,
    changes: CounterChanges,
    arrived: dict[tuple[int, int], list[int]],
    now: int,
) -> None:
    """Insert the documents. Rows are built column by column, because an upload has thousands."""
    first = admission.first_number
    numbers = range(first, first + len(admission.documents))
    orders: Sequence[int | None] = numbers
    states: Iterable[int] = repeat(WAITING)
    bands, priorities = admission.bands, admission.priorities
    customers = admission.customers
    columns: list[Sequence[Any]] = list(zip(*admission.documents, strict=True))
    bodies, *stored = columns[_UNCHANGED]
    if admission.due:
        due = admission.due
        orders = [None if n - first in due else n for n in numbers]
        states = [WAITING if order is not None else DELAYED for order in orders]
        for position in due:
            changes.delay(customers[position])
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
            [band // BANDS_PER_KIND for band in bands],
            bands,
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
    together = len(rows) - len(rows) % _BATCH_ROWS
    for begin in range(0, together, _BATCH_ROWS):
        values = chain.from_iterable(rows[begin : begin + _BATCH_ROWS])
        connection.execute(_ADD_BATCH, tuple(values))
    connection.executemany(_ADD_DOCUMENT, rows[together:])
    waiting = changes.waiting
    for flow, priority, order in zip(
        zip(customers, bands, strict=True), priorities, orders, strict=True
    ):
        if order is None:
            continue
        counter = flow[1] // BANDS_PER_KIND * BANDS_PER_KIND + priority
        waiting[counter] = waiting.get(counter, 0) + 1
        if flow in arrived:
            arrived[flow][1] += 1
        else:
            arrived[flow] = [order, 1]  # orders rise


_SIZE = NewDocument._fields[_UNCHANGED][1:].index("size_bytes")


def _write_rare(
    connection: apsw.Connection, state: _FileState, admission: Admission, now: int
) -> None:
    """Insert expiries, keys and parents, which few documents have."""
    if admission.expiries:
        expiries = [(at, admission.first_number + n) for n, at in admission.expiries.items()]
        connection.executemany(_SET_EXPIRY, expiries)
        connection.executemany(_MAY_EXPIRE, expiries)
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
            parent = state.parents[document.parent]
            assert parent is not None
            parents.append((parent.number, number))
    if keys:
        connection.executemany(_ADD_KEY, keys)
    if parents:
        connection.executemany(_ADD_PARENT, parents)
        made = [(p.children, p.number) for p in state.parents.values() if p]
        connection.executemany(_MOVE_PARENT, made)


def _write_customers(
    connection: apsw.Connection, state: _FileState, admitted: set[int], delayed: dict[int, int]
) -> None:
    new = []
    moved = []
    for name, customer in state.customers.items():
        if customer.number not in admitted:
            continue
        value, updated_at = customer.count or (None, None)
        changed = (value, updated_at, customer.stored_bytes, delayed.get(customer.number, 0))
        if name in state.new_customers:
            new.append((customer.number, name, *changed))
        else:
            moved.append((*changed, customer.number))
    if new:
        connection.executemany(_ADD_CUSTOMER, new)
    if moved:
        connection.executemany(_MOVE_CUSTOMER, moved)
