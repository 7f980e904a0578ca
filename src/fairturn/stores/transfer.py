"""Everything of a queue at one moment, on its way from one database to another."""

from collections.abc import Iterable
from typing import NamedTuple

from fairturn.scheduling.flows import Recorded
from fairturn.stores.outcome_counters import Ends
from fairturn.stores.values import Row


class Whole(NamedTuple):
    """A queue in which nothing runs. Rows are read while they are written elsewhere: once, and in
    the order in which they stand here."""

    settings: str  # a JSON object
    key: int  # stirs numbers into public ids
    next_number: int  # of a document
    next_customer: int
    claims: int  # the number of the last claim
    fence: int  # of the last lease
    tick: int  # of the last activation of a flow
    clocks: list[int]  # of levels 1 to 9
    weights: list[int]
    waiting: list[int]  # documents of priorities 1 to 9
    delayed: int
    ends: Ends
    customers_known: int
    documents_known: int
    rows: int  # how many there are, about, in all that follows
    limited: list[int]  # customers that have a limit, or had one
    # number, name, count, count_updated_at, weight, running_max, paused, documents, waiting (nine)
    customers: Iterable[Row]
    standings: Iterable[Row]  # customer, weight, running_max, paused, recent costs (a list)
    # customer, level, place, tick, folded, running, claimed_to, head_order, head_since, head_bound,
    # held
    flows: Iterable[Row]
    recorded: Iterable[Recorded]  # since the last claim, in order
    documents: Iterable["WholeDocument"]
    results: Iterable[Row]  # document, result, content_name, size_bytes, sha256
    keys: Iterable[Row]  # customer, key, digest, document, count, priority, submitted_at
    workers: Iterable[Row]  # name, seen_at, slots
    # id, role, customer (its name), name, digest, made_at, used_at, ends_at
    access_keys: Iterable[Row]


class WholeDocument(NamedTuple):
    """A document with all that a database knows of it."""

    number: int
    customer: int
    order_number: int | None
    count: int  # type: ignore[assignment]  # the rule's word
    submitted_at: int
    size_bytes: int
    fence: int
    attempts: int
    level: int
    priority: int
    state: int
    returned: int
    cancel_requested: int
    kind: str
    claimed_at: int | None
    charged_cost: int | None
    charged_weight: int | None
    charge: int | None
    ended_at: int | None
    due_at: int | None
    cost: int | None
    parent: int | None
    children: int
    real_cost: int | None
    progress_fence: int | None
    progress_done: float | None
    progress_total: float | None
    worker: str | None
    error: str | None
    name: str | None
    metadata: str | None
    content_name: str | None
    sha256: bytes | None
    body: str | bytes | None
