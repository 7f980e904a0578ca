"""Findings of `fairturn doctor`: numbers of a queue, and stored values that are wrong."""

from collections.abc import Iterable
from typing import NamedTuple

from fairturn.scheduling.flows import BANDS_PER_KIND, kind_of, level_in

DAMAGES_SHOWN_MAX = 1_000


class Findings(NamedTuple):
    """Numbers of a queue at one instant."""

    settings: str  # JSON
    oldest_waiting_at: int | None
    newest_at: int | None
    running: int
    expired: int  # documents whose lease expired and that no claim has recovered yet
    expired_since_us: int | None  # the age of the oldest expired lease; None: unknown
    repairs: int  # flows that claims have repaired


class Damage(NamedTuple):
    """A stored value that does not agree with the documents."""

    kind: str  # a key of MEANINGS
    customer: int | None  # its number; None: a value of the whole queue, or of no customer
    name: str | None  # of the customer
    place: (
        int | None
    )  # a level or a priority (with its kind, as a band), a fence, a document number
    stored: int | None
    truth: int | None

    @property
    def identity(self) -> tuple[str, int | None, int | None]:
        """The stored value that is wrong."""
        return self.kind, self.customer, self.place


# Descriptions of stored values. `{place}` is `Damage.place`; `{level}` is that of a band, with the
# number of its kind.
MEANINGS = {
    "queue.waiting": "the number of waiting documents of priority {place}",
    "queue.delayed": "the number of delayed documents",
    "queue.counted": "the number of customers whose running documents are counted",
    "queue.events_from": "the number of events that no claim will apply",
    "queue.heads_from": "the time from which claims scan heads",
    "queue.leases_from": "the time from which claims scan leases",
    "kind.waiting": "the number of waiting documents of priority {level}",
    "level.weight": "the sum of the weights of active flows in level {level}",
    "level.places_from": "the place from which claims scan flows in level {level}",
    "customer.waiting": "the number of waiting documents of priority {level}",
    "customer.running": "the number of running documents",
    "customer.delayed": "the number of delayed documents",
    "customer.stored_bytes": "the number of bytes of its documents",
    "customer.submitted": "the number of documents ever submitted",
    "customer.counted": "`counted`",
    "flow.folded": "the number of folded waiting documents in level {level}",
    "flow.running": "the number of running documents in level {level}",
    "flow.head_order": "`head_order` of level {level}",
    "flow.head_since": "`head_since` of level {level} (1: set)",
    "flow.head_bound": "`head_bound` of level {level}",
    "flow.next_elsewhere": "`next_elsewhere` of level {level}",
    "flow.claimed_to": "`claimed_to` of level {level}",
    "flow.place": "`place` of level {level}",
    "flow.held": "`held` of level {level}",
    "flow.copies": "the number of rows of the flow of level {level}",
    "flow.orphan": "the number of flows of a customer that does not exist",
    "customer_state.weight": "`weight` of the scheduler state",
    "customer_state.running_max": "`running_max` of the scheduler state",
    "customer_state.paused": "`paused` of the scheduler state",
    "customer_state.orphan": "the number of scheduler states of a customer that does not exist",
    "limited.missing": "the number of rows in `limited_customers`",
    "limited.orphan": "the number of rows in `limited_customers` of a customer that does not exist",
    "key.orphan": "idempotency keys of a customer that does not exist",
    "document.returned": "`returned` of document {place}",
    "document.failed": "`failed` of document {place}",
    "document.delayed_until": "`delayed_until` of document {place} (1: set)",
    "document.level": "the level of document {place}",
    "document.step": "the number of finished steps of document {place}",
    "document.expiration": "the number of rows in `expirations` of document {place}",
    "document.order_number": "the order of document {place}",
    "document.orphan": "the customer of document {place}",
    "lease.running": "the number of running documents with fence {place}",
    "lease.until": "the time at which claims check the lease with fence {place}",
    "lease.missing": "the lease of the running document {place}",
    "body.orphan": "the body of document {place}, which does not exist,",
    "result.orphan": "the result of document {place}, which does not exist,",
    "attempt.orphan": "the attempts of document {place}, which does not exist,",
    "checkpoint.orphan": "the checkpoint of document {place}, which does not exist,",
    "children.orphan": "the number of children of document {place}, which does not exist,",
}

# The customer's name is only in a backup.
UNREPAIRABLE = frozenset({"document.orphan"})


def describe(damage: Damage) -> str:
    """Return a sentence with the customer, the stored value and the correct one."""
    meaning = MEANINGS[damage.kind].format(place=damage.place, level=_level(damage.place))
    stored, truth = ("none" if v is None else str(v) for v in (damage.stored, damage.truth))
    of = ""
    if damage.name is not None:
        of = f"customer {damage.name}: "
    elif damage.customer is not None:
        of = f"customer number {damage.customer}: "
    return f"{of}{meaning} is {stored}, and should be {truth} ({damage.kind})"


def _level(band: int | None) -> str:
    if band is None or band < BANDS_PER_KIND:
        return str(band)
    return f"{level_in(band)} of kind number {kind_of(band)}"


class Damages:
    """The result of a recount: the first `DAMAGES_SHOWN_MAX` damages, the total, and what to
    repair. All others are kept only as row numbers, so that those of a large queue fit in memory.
    """

    def __init__(self, damages: Iterable[Damage] = ()) -> None:
        self.shown: list[Damage] = []
        self.n = 0
        self.queue = False
        self.customers: set[int] = set()
        self.fences: set[int] = set()
        self.unleased: set[int] = set()  # running documents without a lease
        self.orphans: set[int] = set()  # deleted documents with rows in other tables
        for damage in damages:
            self.add(damage)

    @property
    def is_repairable(self) -> bool:
        """Whether a repair would change the store."""
        return bool(self.queue or self.customers or self.fences or self.unleased or self.orphans)

    def add(self, damage: Damage) -> None:
        self.n += 1
        if self.n <= DAMAGES_SHOWN_MAX:
            self.shown.append(damage)
        if damage.kind in UNREPAIRABLE:
            return
        table = damage.kind.partition(".")[0]
        if table in ("queue", "level", "kind"):
            self.queue = True
        elif damage.kind == "lease.missing":
            self.unleased.add(_number(damage.place))
        elif table == "lease":
            self.fences.add(_number(damage.place))
        elif table in ("body", "result", "attempt", "checkpoint", "children"):
            self.orphans.add(_number(damage.place))
        else:
            self.customers.add(_number(damage.customer))


def _number(number: int | None) -> int:
    assert number is not None
    return number
