"""A queue at one instant, exported from one database to be loaded into another."""

from collections.abc import Iterable
from typing import NamedTuple

from fairturn.model import NewDocument
from fairturn.scheduling.flows import EventBatch
from fairturn.stores.ids import IdKey
from fairturn.stores.transitions import OutcomeCounters
from fairturn.stores.values import Row


class ExportedQueue(NamedTuple):
    """A queue without running documents. Each iterable can be read once, in the order of the
    fields. It has more than 15 attributes because it has all tables and counters of a queue."""

    settings: str  # a JSON object
    key: IdKey
    next_number: int  # of documents
    next_customer: int
    claims: int  # the number of the last claim
    fence: int  # of the last lease
    tick: int  # of the last activation of a flow
    # number, name, running_max, paused, attempts_max, expires_in_us, since_patience; by number
    kinds: list[Row]
    kind_services: list[Row]  # kind (its number), service
    outages: list[Row]  # service, and the fields of `ServiceState`
    clocks: list[int]  # of each band, from 1 to the last of the last kind
    weights: list[int]
    kind_times: list[int]
    last_claims: list[int]
    level_times: list[int]  # of levels 1 to 9
    waiting: list[int]  # documents by kind and priority, as bands are numbered
    delayed: int
    outcome_counters: OutcomeCounters
    customers_known: int
    documents_known: int
    rows: int  # in the iterables below, about
    limited: list[int]  # customers whose running documents are counted
    # number, name, count, count_updated_at, weight, running_max, bytes_max, stored_bytes, paused,
    # documents, waiting (nine)
    customers: Iterable[Row]
    # customer, weight, running_max, paused, recent costs (lists by the number of the kind)
    customer_states: Iterable[Row]
    # customer, level, place, tick, folded, running, claimed_to, head_order, head_since, head_bound,
    # held
    flows: Iterable[Row]
    events: Iterable[EventBatch]  # since the last claim
    documents: Iterable["ExportedDocument"]
    results: Iterable[Row]  # document, result, content_name, size_bytes, sha256
    # document, number, kind (its number), step, attempt, worker, claimed_at, ended_at, outcome (its
    # code), error, details, content_name, size_bytes, sha256, value
    attempts: Iterable[Row]
    checkpoints: Iterable[Row]  # document, value
    unreported_cancels: Iterable[Row]  # document, in the order of the cancels
    keys: Iterable[Row]  # customer, key, digest, document, count, priority, submitted_at
    workers: Iterable[Row]  # name, seen_at, slots, kinds (a list of names, or None)
    # id, role, customer (its name), name, digest, made_at, used_at, ends_at
    access_keys: Iterable[Row]


# The columns of a document that are copied as they were submitted.
SUBMITTED = tuple(
    name
    for name in NewDocument._fields
    if name not in {"customer", "body", "due_at", "key", "digest", "parent", "kind"}
)


class ExportedDocument(NamedTuple):
    """A document. It has more than 15 attributes because it has all columns of a document."""

    number: int
    customer: int
    order_number: int | None
    count: int  # type: ignore[assignment]  # the rule's word
    submitted_at: int
    fence: int
    attempts: int
    step: int
    snoozes: int
    kind: int
    level: int
    priority: int
    state: int
    returned: int
    cancel_requested: int
    claimed_at: int | None
    charged_cost: int | None
    charged_weight: int | None
    charge: int | None
    ended_at: int | None
    due_at: int | None
    parent: int | None
    children: int
    real_cost: int | None
    progress_fence: int | None
    progress_done: float | None
    progress_total: float | None
    worker: str | None
    error: str | None
    body: str | bytes | None
    submitted: Row  # the columns of `SUBMITTED`
