"""Helpers for the steps in a document's life cycle, and a store's observable state as a value."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    DOCUMENT_BYTES,
    NO_CAPS,
    Claim,
    Completed,
    Customer,
    CustomerSettings,
    Document,
    Failed,
    Filter,
    KindSettings,
    NewDocument,
    Outcome,
    Receipt,
    State,
    Stored,
    Summary,
    by_priority,
)
from fairturn.stores.contract import QueueStore as Store

START = 1_700_000_000 * SECOND_US
LEASE_S = 30
LEASE_US = LEASE_S * SECOND_US
BODY = '{"page":1}'


def new(customer: str = "acme", body: str | bytes | None = BODY, **fields: Any) -> NewDocument:
    return NewDocument(customer, body, **fields)


def submit(store: Store, customer: str = "acme", **fields: Any) -> Receipt:
    (receipt,) = store.submit([new(customer, **fields)])
    return receipt


def submit_each(store: Store, customers: Iterable[str], **fields: Any) -> list[Receipt]:
    """Submit a document for each name; each letter of a string is a name."""
    return [submit(store, customer, **fields) for customer in customers]


def claim(
    store: Store,
    n: int = 1,
    *,
    worker: str = "worker-1",
    lease_us: int = LEASE_US,
    kinds: Sequence[str] | None = None,
    at_most: Mapping[str, int] = NO_CAPS,
    outcomes: Sequence[Outcome] = (),
) -> list[Claim]:
    claimed = store.claim(
        n, worker=worker, lease_us=lease_us, kinds=kinds, at_most=at_most, outcomes=outcomes
    )
    assert claimed.lost == []
    return claimed.claims


def claim_one(store: Store, **fields: Any) -> Claim:
    (claimed,) = claim(store, **fields)
    return claimed


def claim_each(store: Store) -> list[Claim]:
    """Claim all documents that can be claimed, one per call."""
    claims = []
    while found := claim(store):
        claims += found
    return claims


def ids(things: Iterable[Receipt | Document | Claim]) -> list[str]:
    return [thing.document.id if isinstance(thing, Claim) else thing.id for thing in things]


def customers_of(claims: Iterable[Claim]) -> str:
    """Return the first letters of the customers' names."""
    return "".join(claimed.document.customer[0] for claimed in claims)


def complete(store: Store, claims: Iterable[Claim]) -> None:
    assert store.finish([Completed(claimed.fence) for claimed in claims]) == []


def fail(store: Store, claimed: Claim, retry_in_s: float | None = None) -> None:
    retry_in_us = None if retry_in_s is None else round(retry_in_s * SECOND_US)
    assert store.finish([Failed(claimed.fence, "it failed", retry_in_us)]) == []


def document(store: Store, id: str) -> Document:
    stored = store.read(id)
    assert stored is not None, f"there is no document {id}"
    return stored.document


def state(store: Store, id: str) -> State:
    return document(store, id).state


def customer(store: Store, name: str) -> Customer:
    (found,) = store.customers(names=[name]).customers
    return found


def make(store: Store, wanted: State, clock: ManualClock | None = None, **fields: Any) -> str:
    """Submit a document of a new customer, bring it into this state and return its id.

    No other document may be waiting. A delayed document is due an hour after `START`. For an
    expired one, the clock advances by a microsecond."""
    if wanted is State.DELAYED:
        return submit(store, f"a-{wanted}-one", due_at=START + 3_600 * SECOND_US, **fields).id
    if wanted is State.EXPIRED:
        assert clock is not None
        id = submit(store, f"a-{wanted}-one", expires_at=clock.now() + 1, **fields).id
        clock.advance(1 / SECOND_US)
        assert store.expire() == 1
        return id
    id = submit(store, f"a-{wanted}-one", **fields).id
    if wanted is State.WAITING:
        return id
    if wanted is State.CANCELLED:
        assert store.cancel([id]) == [State.CANCELLED]
        return id
    claimed = claim_one(store)
    assert claimed.document.id == id
    if wanted is State.COMPLETED:
        complete(store, [claimed])
    elif wanted is State.DEAD:
        fail(store, claimed)
    return id


# ── Observable state ─────────────────────────────────────────────────────────────────────────────


class StoreDump(NamedTuple):
    """All documents, newest first; all customers, by name; the summary."""

    documents: list[Stored]
    customers: list[Customer]
    summary: Summary


def snapshot(store: Store) -> StoreDump:
    """Return the observable state of a store."""
    documents = [store.read(found.id) for found in find_all(store)]
    return StoreDump(
        [stored for stored in documents if stored is not None],
        all_customers(store),
        store.summary(),
    )


def find_all(store: Store, filter: Filter | None = None, size: int = 100) -> list[Document]:
    """Return the documents of all pages."""
    documents: list[Document] = []
    after: str | None = None
    while True:
        page = store.find(filter or Filter(), after=after, size=size)
        documents += page.documents
        after = page.next
        if after is None:
            return documents


def all_customers(store: Store, size: int = 100) -> list[Customer]:
    """Return the customers of all pages."""
    customers: list[Customer] = []
    after: str | None = None
    while True:
        page = store.customers(after=after, size=size)
        customers += page.customers
        after = page.next
        if after is None:
            return customers


def assert_numbers_are_exact(store: Store) -> None:
    """Assert that the counters of the store agree with its documents."""
    documents = find_all(store)
    states = Counter(found.state for found in documents)
    summary = store.summary()
    assert summary == replace(
        summary,
        waiting_by_priority=_waiting(documents),
        delayed=states[State.DELAYED],
        running=states[State.RUNNING],
    )
    for known in all_customers(store):
        own = [found for found in documents if found.customer == known.name]
        states = Counter(found.state for found in own)
        assert known.waiting_by_priority == _waiting(own), known.name
        assert (known.waiting, known.running, known.delayed) == (
            states[State.WAITING],
            states[State.RUNNING],
            states[State.DELAYED],
        ), known.name
        assert known.stored_bytes == sum(
            DOCUMENT_BYTES + found.size_bytes + len(found.metadata_json or "") for found in own
        ), known.name


def _waiting(documents: Iterable[Document]) -> tuple[int, ...]:
    return by_priority(Counter(d.priority for d in documents if d.state is State.WAITING))


def with_kinds(store: Store) -> Store:
    """Create the kinds ocr and text."""
    for name in ("ocr", "text"):
        store.configure_kind(name, KindSettings())
    return store


def adjust(store: Store, name: str, **settings: Any) -> None:
    store.adjust(name, CustomerSettings(**settings))


def prune_all(store: Store, *, documents_max: int = 1_000) -> list[str]:
    """Prune until nothing is left and return the contents that can be deleted."""
    contents: list[str] = []
    for _ in range(1_000):
        batch = store.prune(documents_max=documents_max)
        if batch is None:
            return contents
        contents += batch
    raise AssertionError("1,000 batches were pruned and more remain")
