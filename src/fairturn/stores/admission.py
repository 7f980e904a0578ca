"""Admission of submissions: idempotency keys, parents, limits and the rule.

A store passes an `AdmissionState`, its view of customers, keys and parents inside the transaction,
and writes the resulting `Admission`. PostgreSQL does the same in `functions/submit.sql`; tests
compare both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from fairturn.clock import to_datetime
from fairturn.errors import ExpiryPassed, KeyReused, KindRefused, NotFound, QueueFull, QuotaExceeded
from fairturn.model import (
    CHILDREN_UNCHECKED_MAX,
    DEFAULT_KIND_NAME,
    DOCUMENT_BYTES,
    KINDS_MAX,
    KindPolicy,
    NewDocument,
    Receipt,
    Settings,
)
from fairturn.priority import Count
from fairturn.scheduling.flows import Mode, band_of


class AdmissionCustomer:
    """The count, pending documents and bytes of a customer, which admission updates."""

    __slots__ = ("bytes_max", "count", "number", "pending", "stored_bytes")

    def __init__(
        self,
        number: int,
        count: Count | None,
        pending: int,
        stored_bytes: int = 0,
        bytes_max: int | None = None,
    ) -> None:
        self.number = number
        self.count = count
        self.pending = pending  # waiting and delayed documents
        self.stored_bytes = stored_bytes
        self.bytes_max = bytes_max  # None: the setting of the queue


class AdmissionParent:
    """The count, priority and number of children of a parent document."""

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
    """A stored idempotency key, and the receipt to replay."""

    digest: bytes | None
    receipt: Receipt


class AdmissionState(Protocol):
    """A store's view inside one transaction. It returns the same object for the same customer or
    parent, so that submissions that share a transaction see each other's changes."""

    pending: int  # waiting and delayed documents of the queue
    next_number: int

    @property
    def kinds(self) -> Mapping[str, int]:
        """The numbers of the queue's kinds of work, by name. Not read if all documents of a call
        have the default kind."""
        ...

    @property
    def expires_in_us(self) -> Mapping[str, int]:
        """How long documents of a kind may wait once they are due, for kinds with such a rule."""
        ...

    def create_kind(self, name: str) -> None: ...

    def customer(self, name: str) -> AdmissionCustomer:
        """Return a customer, created if it is new."""
        ...

    def key(self, customer: int, key: str) -> KnownKey | None:
        """Return a stored key that is not older than 24 h."""
        ...

    def parent(self, id: str) -> AdmissionParent | None: ...


class Admission:
    """The documents of one call to be written, as columns, and receipts to replay."""

    __slots__ = (
        "bands",
        "counts",
        "customers",
        "documents",
        "due",
        "expiries",
        "first_number",
        "now",
        "priorities",
        "replayed",
    )

    def __init__(self, first_number: int, now: int) -> None:
        self.first_number = first_number  # the documents are numbered consecutively
        self.now = now
        self.documents: list[NewDocument] = []
        self.customers: list[int] = []
        self.counts: list[int] = []
        self.priorities: list[int] = []
        self.bands: list[int] = []
        self.due: dict[int, int] = {}  # the due time of delayed documents, by position
        self.expiries: dict[int, int] = {}  # when documents expire, by position
        # By position in the call: the receipt, or the position of the same key in `documents`.
        self.replayed: dict[int, Receipt | int] = {}

    @property
    def numbers(self) -> range:
        """The numbers of the documents to be written."""
        return range(self.first_number, self.first_number + len(self.documents))

    def receipts(self, ids: Iterable[str]) -> list[Receipt]:
        """Return a receipt for each document of the call; `ids` are of those to be written."""
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
        if not self.replayed:
            return fresh
        receipts: list[Receipt] = []
        rest = iter(fresh)
        for at in range(len(fresh) + len(self.replayed)):
            known = self.replayed.get(at)
            if known is None:
                receipts.append(next(rest))
            else:
                first = fresh[known] if isinstance(known, int) else known
                receipts.append(first._replace(replayed=True))
        return receipts

    def extend(self, following: "Admission") -> None:
        """Append the documents of the next call, whose numbers follow."""
        before = len(self.documents)
        for mine, more in ((self.due, following.due), (self.expiries, following.expiries)):
            mine.update((before + position, at) for position, at in more.items())
        self.documents = [*self.documents, *following.documents]
        self.customers = [*self.customers, *following.customers]
        self.counts = [*self.counts, *following.counts]
        self.priorities = [*self.priorities, *following.priorities]
        self.bands = [*self.bands, *following.bands]


def admit(
    documents: Iterable[NewDocument], state: AdmissionState, settings: Settings, now: int
) -> Admission:
    """Admit all documents of one call and update `state`. If it raises, `state` is unchanged."""
    call = _Call(state, settings, now)
    call.take_all(list(documents))
    named = set(kinds_of(call.admission.documents)) - {DEFAULT_KIND_NAME}
    new = _new_kinds(named, state, settings) if named else []
    _refuse_if_full(call.added, state, settings)
    added_bytes = _bytes_by_customer(call)
    _refuse_over_quota(added_bytes, state, settings)
    for name in new:
        state.create_kind(name)
    _update(call, state, settings, state.kinds if named else {})
    for name, n in added_bytes.items():
        state.customer(name).stored_bytes += n
    return call.admission


def _new_kinds(names: set[str], state: AdmissionState, settings: Settings) -> list[str]:
    """Return the kinds that the call creates; raise `KindRefused` if it may not create one."""
    known = state.kinds
    new = sorted(names - known.keys())
    for number, name in enumerate(new, start=len(known)):
        refuse_unknown_kind(name, settings)
        refuse_kind_beyond_max(name, number)
    return new


def _update(
    call: "_Call", state: AdmissionState, settings: Settings, kinds: Mapping[str, int]
) -> None:
    admission = call.admission
    n_admitted = len(admission.counts)
    equal = settings.mode is Mode.EQUAL
    admission.bands = [1] * n_admitted if equal else admission.priorities
    if kinds:  # otherwise all documents have the default kind
        numbers = map(kinds.__getitem__, kinds_of(admission.documents))
        admission.bands = list(map(band_of, admission.bands, numbers))
    _add_expiries(admission, state.expires_in_us)
    for name, n in call.added.items():
        customer = state.customer(name)
        customer.count = call.counts[name]
        customer.pending += n
    for id, n in call.children.items():
        parent = state.parent(id)
        assert parent is not None
        parent.children += n
    state.pending += n_admitted
    state.next_number += n_admitted


def _add_expiries(admission: Admission, expires_in_us: Mapping[str, int]) -> None:
    """Apply the rules of kinds to documents without an expiry of their own. The time counts from
    when a document is due."""
    if not expires_in_us:
        return
    for position, kind in enumerate(kinds_of(admission.documents)):
        if kind in expires_in_us:
            starts_at = admission.due.get(position, admission.now)
            admission.expiries.setdefault(position, starts_at + expires_in_us[kind])


class _Call:
    """Admission of one call. It collects changes and does not write to the `AdmissionState`."""

    def __init__(self, state: AdmissionState, settings: Settings, now: int) -> None:
        self.admission = Admission(state.next_number, now)
        self.counts: dict[str, Count | None] = {}
        self.added: dict[str, int] = {}
        self.children: dict[str, int] = {}
        self._keys: dict[tuple[str, str], tuple[bytes | None, int]] = {}
        self._state = state
        self._rule = settings.rule
        self._now = now

    def take_all(self, documents: list[NewDocument]) -> None:
        if are_plain(documents):
            self.take_plain(list(names_of(documents)))
            self.admission.documents = documents
            return
        for at, document in enumerate(documents):
            name = document.customer
            customer = self._state.customer(name)
            before = len(self.admission.documents)
            count = self.counts.get(name, customer.count)
            self.counts[name] = self._take_one(at, document, customer.number, count)
            added = len(self.admission.documents) - before
            self.admission.customers += [customer.number] * added
            self.added[name] = self.added.get(name, 0) + added

    def take_plain(self, names: list[str]) -> None:
        """Admit documents for which `are_plain` is true, customer by customer. An upload has
        thousands of them, so the work per document is left to functions written in C."""
        admission, rule = self.admission, self._rule
        self.added = Counter(names)
        numbers: dict[str, int] = {}
        values: dict[str, Iterator[int]] = {}
        for name, n in self.added.items():
            customer = self._state.customer(name)
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
            known = _known(document, self._state, customer, self._keys, position)
            if known is not None:
                admission.replayed[at] = known
                return count
        if document.expires_at is not None:
            refuse_passed(document.expires_at, self._now)
            admission.expiries[position] = document.expires_at
        inherited = None
        if document.parent is not None:
            inherited = _inherit(document, self._state, customer, self.children)
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
    """Return the customer of each document."""
    return map(_CUSTOMER, documents)


def kinds_of(documents: Iterable[NewDocument]) -> Iterator[str]:
    """Return the kind of work of each document."""
    return map(_KIND, documents)


def are_plain(documents: Iterable[NewDocument]) -> bool:
    """Return whether no document has a due time, a key, a parent or an expiry."""
    return set(map(_SPECIAL, documents)) <= _NOTHING_SPECIAL


_DUE_AT, _EXPIRES_AT = map(NewDocument._fields.index, ("due_at", "expires_at"))
_SPECIAL = itemgetter(slice(_DUE_AT, _EXPIRES_AT + 1))
_NOTHING_SPECIAL = {_SPECIAL(NewDocument("", None))}
_CUSTOMER, _KIND = (itemgetter(NewDocument._fields.index(name)) for name in ("customer", "kind"))
# `Receipt._make` without its length check, in half the time.
_RECEIPT: Callable[[Iterable[Any]], Receipt] = partial(tuple.__new__, Receipt)


def _known(
    document: NewDocument,
    state: AdmissionState,
    customer: int,
    keys: dict[tuple[str, str], tuple[bytes | None, int]],
    position: int,
) -> Receipt | int | None:
    """Return the receipt of a known key, or the position of the same key in this call."""
    assert document.key is not None
    name = (document.customer, document.key)
    same_call = keys.get(name)
    if same_call is not None:
        digest, known = same_call
        _refuse_other(document, digest, "a document of the same call")
        return known
    stored = state.key(customer, document.key)
    if stored is not None:
        _refuse_other(document, stored.digest, f"document {stored.receipt.id}")
        return stored.receipt._replace(customer=document.customer)
    keys[name] = (document.digest, position)
    return None


def _refuse_other(document: NewDocument, digest: bytes | None, owner: str) -> None:
    if digest != document.digest:
        raise KeyReused(
            f"the idempotency key {document.key!r} of customer {document.customer!r} belongs to "
            f"{owner}, which differs in more than name and parent"
        )


def _inherit(
    document: NewDocument, state: AdmissionState, customer: int, children: dict[str, int]
) -> tuple[int, int] | None:
    """Return the parent's count and priority; None if its children without a check are used up."""
    assert document.parent is not None
    parent = state.parent(document.parent)
    if parent is None or parent.customer != customer:
        raise NotFound(
            f"customer {document.customer!r} has no document {document.parent!r} to be the parent"
        )
    made = children.get(document.parent, 0)
    children[document.parent] = made + 1
    if parent.children + made >= CHILDREN_UNCHECKED_MAX:
        return None
    return parent.count, parent.priority


def _refuse_if_full(added: dict[str, int], state: AdmissionState, settings: Settings) -> None:
    for name, n in added.items():
        pending = state.customer(name).pending
        if n and pending + n > settings.waiting_per_customer_max:
            raise QueueFull(
                limit="waiting_per_customer_max",
                maximum=settings.waiting_per_customer_max,
                waiting=pending,
                customer=name,
            )
    n = sum(added.values())
    if n and state.pending + n > settings.waiting_max:
        raise QueueFull(
            limit="waiting_max",
            maximum=settings.waiting_max,
            waiting=state.pending,
            customer=None,
        )


def refuse_passed(expires_at: int, now: int) -> None:
    """Raise `ExpiryPassed` unless a document would expire later than now."""
    if expires_at <= now:
        raise ExpiryPassed(
            f"expires_at is {to_datetime(expires_at).isoformat()}, which has passed; use a later "
            "expiry, or none"
        )


def refuse_unknown_kind(name: str, settings: Settings) -> None:
    """Raise `KindRefused` unless a submission may create a kind."""
    if settings.kinds is not KindPolicy.OPEN:
        raise KindRefused(
            f"the queue has no kind {name!r}; start a worker that serves it, create it with "
            f"'fairturn kinds set {name}', or configure the queue with kinds=open"
        )


def refuse_kind_beyond_max(name: str, known: int) -> None:
    """Raise `KindRefused` if the queue has the maximum of kinds."""
    if known >= KINDS_MAX:
        raise KindRefused(
            f"the kind {name!r} cannot be created: the queue has {KINDS_MAX} kinds already, the "
            "maximum; use one of them"
        )


_SIZE, _METADATA = map(NewDocument._fields.index, ("size_bytes", "metadata"))


def _bytes_by_customer(call: _Call) -> dict[str, int]:
    """Return `NewDocument.stored_bytes` of the admitted documents, added up for each customer. The
    work per document is left to functions written in C, as in `take_plain`."""
    documents = call.admission.documents
    sizes = map(itemgetter(_SIZE), documents)
    if len(call.added) == 1:
        (name,) = call.added
        metadata = sum(map(len, filter(None, map(itemgetter(_METADATA), documents))))
        return {name: DOCUMENT_BYTES * len(documents) + sum(sizes) + metadata}
    added = {name: DOCUMENT_BYTES * n for name, n in call.added.items()}
    for document, size_bytes in zip(documents, sizes, strict=True):
        added[document.customer] += size_bytes + len(document.metadata or "")
    return added


def _refuse_over_quota(
    added_bytes: dict[str, int], state: AdmissionState, settings: Settings
) -> None:
    for name, n in added_bytes.items():
        customer = state.customer(name)
        bytes_max = customer.bytes_max or settings.bytes_per_customer_max
        if n and customer.stored_bytes + n > bytes_max:
            raise QuotaExceeded(
                customer=name, stored_bytes=customer.stored_bytes, bytes_max=bytes_max
            )
