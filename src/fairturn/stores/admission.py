"""What happens to a submission before it is written: keys, parents, limits, the rule.

A store hands in `Books`, its view of customers, keys and parents inside the transaction, and writes
the result. PostgreSQL does the same in `functions/submit.sql`; tests compare both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from fairturn.errors import KeyReused, NotFound, QueueFull
from fairturn.model import CHILDREN_UNCHECKED_MAX, NewDocument, Receipt, Settings
from fairturn.priority import Count
from fairturn.scheduling.flows import Mode


class CustomerBook:
    """What admission reads and moves of one customer."""

    __slots__ = ("count", "number", "pending")

    def __init__(self, number: int, count: Count | None, pending: int) -> None:
        self.number = number
        self.count = count
        self.pending = pending  # waiting and delayed documents


class ParentBook:
    """What admission reads and moves of a document that made others."""

    __slots__ = ("children", "count", "customer", "number", "priority")

    def __init__(
        self, number: int, customer: int, count: int, priority: int, children: int
    ) -> None:
        self.number = number
        self.customer = customer
        self.count = count
        self.priority = priority
        self.children = children


class KnownKey(NamedTuple):
    """An idempotency key that came before."""

    digest: bytes | None
    receipt: Receipt


class Books(Protocol):
    """A store's view inside one transaction. What it hands out it hands out again: several
    submissions that share a transaction see each other's changes."""

    pending: int  # waiting and delayed documents in all
    next_number: int

    def customer(self, name: str) -> CustomerBook:
        """The customer, made if it is new."""
        ...

    def key(self, customer: int, key: str) -> KnownKey | None:
        """The key, unless it is older than 24 h."""
        ...

    def parent(self, id: str) -> ParentBook | None:
        """The document that made others."""
        ...


class Admission:
    """One call's documents to be written, as columns, and what came before."""

    __slots__ = (
        "counts",
        "customers",
        "documents",
        "due",
        "first_number",
        "levels",
        "now",
        "priorities",
        "repeated",
    )

    def __init__(self, first_number: int, now: int) -> None:
        self.first_number = first_number  # the others follow
        self.now = now
        self.documents: list[NewDocument] = []
        self.customers: list[int] = []
        self.counts: list[int] = []
        self.priorities: list[int] = []
        self.levels: list[int] = []
        self.due: dict[int, int] = {}  # position -> when, for those that do not wait at once
        self.repeated: dict[int, Receipt | int] = {}  # position in the call -> receipt, or twin

    @property
    def numbers(self) -> range:
        """Those of the documents to be written, where they follow on."""
        return range(self.first_number, self.first_number + len(self.documents))

    def receipts(self, ids: Iterable[str]) -> list[Receipt]:
        """For all that were handed in; `ids` are those of the documents to be written."""
        values = zip(
            ids,
            names_of(self.documents),
            self.counts,
            self.priorities,
            repeat(self.now),
            repeat(False),
            strict=False,
        )
        fresh = list(map(_RECEIPT, values))
        if not self.repeated:
            return fresh
        receipts: list[Receipt] = []
        rest = iter(fresh)
        for at in range(len(fresh) + len(self.repeated)):
            known = self.repeated.get(at)
            if known is None:
                receipts.append(next(rest))
            else:
                first_time = fresh[known] if isinstance(known, int) else known
                receipts.append(first_time._replace(repeated=True))
        return receipts

    def extend(self, following: "Admission") -> None:
        """Take in the next call's documents, whose numbers follow on."""
        before = len(self.documents)
        self.due.update((before + position, at) for position, at in following.due.items())
        self.documents = [*self.documents, *following.documents]
        self.customers = [*self.customers, *following.customers]
        self.counts = [*self.counts, *following.counts]
        self.priorities = [*self.priorities, *following.priorities]
        self.levels = [*self.levels, *following.levels]


def admit(
    documents: Iterable[NewDocument], books: Books, settings: Settings, now: int
) -> Admission:
    """Decide over all documents of one call. A refusal leaves the books as they were."""
    call = _Call(books, settings, now)
    call.take_all(list(documents))
    _refuse_if_full(call.added, books, settings)
    _move(call, books, settings)
    return call.admission


def _move(call: "_Call", books: Books, settings: Settings) -> None:
    """Write down in the books what was decided."""
    admission = call.admission
    n_admitted = len(admission.counts)
    equal = settings.mode is Mode.EQUAL
    admission.levels = [1] * n_admitted if equal else admission.priorities
    for name, n in call.added.items():
        book = books.customer(name)
        book.count = call.counts[name]
        book.pending += n
    for id, n in call.children.items():
        parent = books.parent(id)
        assert parent is not None
        parent.children += n
    books.pending += n_admitted
    books.next_number += n_admitted


class _Call:
    """One call under decision; the books are not touched before all of it is decided."""

    def __init__(self, books: Books, settings: Settings, now: int) -> None:
        self.admission = Admission(books.next_number, now)
        self.counts: dict[str, Count | None] = {}
        self.added: dict[str, int] = {}
        self.children: dict[str, int] = {}
        self._keys: dict[tuple[str, str], tuple[bytes | None, int]] = {}
        self._books = books
        self._rule = settings.rule
        self._now = now

    def take_all(self, documents: list[NewDocument]) -> None:
        if are_plain(documents):
            self.take_plain(list(names_of(documents)))
            self.admission.documents = documents
            return
        for at, document in enumerate(documents):
            name = document.customer
            customer = self._books.customer(name)
            before = len(self.admission.documents)
            count = self.counts.get(name, customer.count)
            self.counts[name] = self._take_one(at, document, customer.number, count)
            added = len(self.admission.documents) - before
            self.admission.customers += [customer.number] * added
            self.added[name] = self.added.get(name, 0) + added

    def take_plain(self, names: list[str]) -> None:
        """The usual upload: nothing special about any document, so that the checks of a customer
        follow on each other. Documents come by the thousand: what is done for each of them alone
        is done by what is written in C."""
        admission, rule = self.admission, self._rule
        self.added = Counter(names)
        numbers: dict[str, int] = {}
        values: dict[str, Iterator[int]] = {}
        for name, n in self.added.items():
            customer = self._books.customer(name)
            numbers[name] = customer.number
            found, self.counts[name] = rule.burst(customer.count, self._now, n)
            values[name] = iter(found)
        admission.customers = list(map(numbers.__getitem__, names))
        admission.counts = list(map(next, map(values.__getitem__, names)))
        priorities = {count: rule.priority(count) for count in set(admission.counts)}
        admission.priorities = list(map(priorities.__getitem__, admission.counts))

    def _take_one(
        self, at: int, document: NewDocument, customer: int, count: Count | None
    ) -> Count | None:
        admission = self.admission
        position = len(admission.documents)
        if document.key is not None:
            known = _known(document, self._books, customer, self._keys, position)
            if known is not None:
                admission.repeated[at] = known
                return count
        inherited = None
        if document.parent is not None:
            inherited = _inherit(document, self._books, customer, self.children)
        if inherited is not None:
            value, priority = inherited
        else:
            count = self._rule.check(count, self._now)
            value, priority = count.value, self._rule.priority(count.value)
        if document.due_at is not None and document.due_at > self._now:
            admission.due[position] = document.due_at
        admission.documents.append(document)
        admission.counts.append(value)
        admission.priorities.append(priority)
        return count


def names_of(documents: Iterable[NewDocument]) -> Iterator[str]:
    """The customer of each."""
    return map(_CUSTOMER, documents)


def are_plain(documents: Iterable[NewDocument]) -> bool:
    """Whether none has a due time, a key or a parent."""
    return set(map(_SPECIAL, documents)) <= _NOTHING_SPECIAL


_SPECIAL = itemgetter(slice(NewDocument._fields.index("due_at"), None))
_NOTHING_SPECIAL = {_SPECIAL(NewDocument("", None))}
_CUSTOMER = itemgetter(NewDocument._fields.index("customer"))
# `Receipt._make` without its look at the number of values: half the time.
_RECEIPT: Callable[[Iterable[Any]], Receipt] = partial(tuple.__new__, Receipt)


def _known(
    document: NewDocument,
    books: Books,
    customer: int,
    keys: dict[tuple[str, str], tuple[bytes | None, int]],
    position: int,
) -> Receipt | int | None:
    """The receipt that the key had before, or the position of its twin in this very call."""
    assert document.key is not None
    name = (document.customer, document.key)
    twin = keys.get(name)
    if twin is not None:
        digest, known = twin
        _refuse_other(document, digest, "a document of the same call")
        return known
    stored = books.key(customer, document.key)
    if stored is not None:
        _refuse_other(document, stored.digest, f"document {stored.receipt.id}")
        return stored.receipt._replace(customer=document.customer)
    keys[name] = (document.digest, position)
    return None


def _refuse_other(document: NewDocument, digest: bytes | None, owner: str) -> None:
    if digest != document.digest:
        raise KeyReused(
            f"the idempotency key {document.key!r} of customer {document.customer!r} belongs to "
            f"{owner}, which has another content, metadata, cost or due time"
        )


def _inherit(
    document: NewDocument, books: Books, customer: int, children: dict[str, int]
) -> tuple[int, int] | None:
    """The parent's count and priority, or None once it has had its children without a check."""
    assert document.parent is not None
    parent = books.parent(document.parent)
    if parent is None or parent.customer != customer:
        raise NotFound(
            f"customer {document.customer!r} has no document {document.parent!r} to be the parent"
        )
    made = children.get(document.parent, 0)
    children[document.parent] = made + 1
    if parent.children + made >= CHILDREN_UNCHECKED_MAX:
        return None
    return parent.count, parent.priority


def _refuse_if_full(added: dict[str, int], books: Books, settings: Settings) -> None:
    for name, its in added.items():
        pending = books.customer(name).pending
        if its and pending + its > settings.waiting_per_customer_max:
            raise QueueFull(
                limit="waiting_per_customer_max",
                maximum=settings.waiting_per_customer_max,
                waiting=pending,
                customer=name,
            )
    n = sum(added.values())
    if n and books.pending + n > settings.waiting_max:
        raise QueueFull(
            limit="waiting_max",
            maximum=settings.waiting_max,
            waiting=books.pending,
            customer=None,
        )
