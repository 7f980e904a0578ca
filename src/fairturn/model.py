"""The nouns: documents, customers, claims, outcomes. Frozen values without I/O.

Moments are integers of microseconds since 1970 UTC and end in `_at`; `fairturn.clock.to_datetime`
turns one into a datetime. Values that are made by the thousand are named tuples.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from math import isfinite
from os import PathLike
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from fairturn.errors import StoreRefused
from fairturn.priority import BOUNDS, LEVELS, RESET_INTERVAL_US, Reset, Rule
from fairturn.scheduling.flows import (
    COST_ONE,
    PATIENCE_US,
    WEIGHT_MAX,
    WEIGHT_MIN,
    WEIGHT_ONE,
    Costs,
    Mode,
)
from fairturn.validation.text import identity, storable

# Limits. Each has a name, so that an error can say which one was reached.
CUSTOMER_BYTES_MAX = 255
KEY_BYTES_MAX = 255
NAME_BYTES_MAX = 1_024
METADATA_BYTES_MAX = 65_536
METADATA_KEYS_MAX = 64
TRACEPARENT = "traceparent"  # in metadata: the trace that a submission belongs to
INLINE_BYTES_MAX = 65_536  # more than this goes to a folder beside the database
PAYLOAD_BYTES_MAX = 16 * 1_048_576
CONTENT_BYTES_MAX = 8 * 1_073_741_824
ERROR_BYTES_MAX = 8_192
WORKER_BYTES_MAX = 255
SUBMIT_DOCUMENTS_MAX = 10_000
CLAIM_DOCUMENTS_MAX = 1_000
PAGE_MAX = 1_000
CANCELS_REPORTED_MAX = 1_000  # by one claim
CANCELS_KEPT_MAX = 10_000  # until a claim reports them; the oldest are dropped
COST_MAX = 1_000_000.0  # so that no claim comes near the end of 64 bits
SECONDS_MAX = 1e10  # some 300 years, for every setting that is a time
CHILDREN_UNCHECKED_MAX = 20
KEY_KEPT_US = 24 * 3_600 * 1_000_000
RESULT_BYTES_MAX = 16 * 1_048_576
LEASE_US_MIN, LEASE_US_MAX = 1, 24 * 3_600 * 1_000_000
RETRY_US_MAX = 366 * 24 * 3_600 * 1_000_000
RUNNING_MAX = 1_000_000  # the highest limit of a customer


class State(StrEnum):
    """Where a document is on its road."""

    DELAYED = "delayed"  # not due yet, or between two attempts
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    DEAD = "dead"  # its attempts are used up, or an error said "never again"
    CANCELLED = "cancelled"


LEASE_RAN_OUT = "the lease ran out: the worker crashed, hung or lost its connection"
# What each state may become. Every list of states, in Python and in SQL, derives from this table.
TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.DELAYED: frozenset({State.WAITING, State.CANCELLED}),
        State.WAITING: frozenset({State.RUNNING, State.CANCELLED}),
        State.RUNNING: frozenset(
            {State.COMPLETED, State.DELAYED, State.WAITING, State.DEAD, State.CANCELLED}
        ),
        State.COMPLETED: frozenset(),
        State.DEAD: frozenset({State.WAITING}),  # by `retry` alone
        State.CANCELLED: frozenset(),
    }
)
# A document that can no longer be cancelled has ended.
ENDED = tuple(state for state, to in TRANSITIONS.items() if State.CANCELLED not in to)
FAILED = tuple(state for state in ENDED if state is not State.COMPLETED)


class Kind(StrEnum):
    """What a document carries."""

    PAYLOAD = "payload"  # a JSON value
    CONTENT = "content"  # bytes


class ContentRef(NamedTuple):
    """Bytes that lie outside the database, written and synced."""

    name: str
    size_bytes: int
    sha256: bytes


class Submission(NamedTuple):
    """One document to submit with `Queue.submit_many`; `Queue.submit` takes the same words."""

    customer: str
    payload: Any = None
    content: bytes | BinaryIO | None = None
    file: str | PathLike[str] | None = None
    name: str | None = None
    metadata: Mapping[str, Any] | None = None
    key: str | None = None
    cost: float | None = None
    due_at: datetime | int | None = None  # an aware datetime, or a moment
    parent: str | None = None
    written: ContentRef | None = None  # a content that `Contents.begin` has put there already


class NewDocument(NamedTuple):
    """A submission that was checked and encoded: what a store takes."""

    customer: str
    body: str | bytes | None  # JSON text, or bytes; None if it lies outside
    kind: Kind = Kind.PAYLOAD
    size_bytes: int = 0
    sha256: bytes | None = None
    content_name: str | None = None
    name: str | None = None
    metadata: str | None = None
    cost: int | None = None
    due_at: int | None = None
    key: str | None = None
    digest: bytes | None = None
    parent: str | None = None


class Receipt(NamedTuple):
    """What a submission is answered with. `repeated`: the idempotency key was known already."""

    id: str
    customer: str
    count: int  # type: ignore[assignment]  # the rule's word; nobody counts a tuple's items
    priority: int
    submitted_at: int
    repeated: bool = False


class Document(NamedTuple):
    """A document and what became of it so far."""

    id: str
    customer: str
    state: State
    priority: int
    count: int  # type: ignore[assignment]  # the rule's word; nobody counts a tuple's items
    submitted_at: int
    due_at: int | None
    order: int | None
    attempts: int
    claimed_at: int | None
    ended_at: int | None
    worker: str | None
    error: str | None
    cancel_requested: bool
    cost: int | None
    kind: Kind
    size_bytes: int
    sha256: bytes | None
    content_name: str | None
    name: str | None
    metadata_json: str | None
    parent: str | None
    real_cost: int | None = None  # of a completed one, as its worker said: the time that it ran
    progress: "Progress | None" = None

    @property
    def metadata(self) -> dict[str, Any]:
        """What the submitter attached."""
        return json.loads(self.metadata_json) if self.metadata_json else {}

    @property
    def ended(self) -> bool:
        """Completed, dead or cancelled."""
        return self.state in ENDED


class Fence(NamedTuple):
    """One attempt at one document. The number only ever rises, so that an outside system can
    refuse what an overtaken attempt still sends."""

    document: str
    number: int

    def __str__(self) -> str:
        """As one word: a key for an outside system."""
        return f"{self.document}-{self.number}"


class Progress(NamedTuple):
    """How far a handler says that it is; without a total, only how much is done."""

    done: float
    total: float | None = None


NO_PROGRESS: Mapping[Fence, Progress] = MappingProxyType({})


class Claim(NamedTuple):
    """The right to work on a document until its lease ends."""

    fence: Fence
    document: Document
    body: str | bytes | None
    lease_ends_at: int


class Completed(NamedTuple):
    """The attempt did its work. `real_cost` is what it took, in millionths; a worker says how many
    seconds. It is kept with the document, and counts where costs are learned."""

    fence: Fence
    result: str | None = None  # JSON text
    content: ContentRef | None = None
    real_cost: int | None = None


class Failed(NamedTuple):
    """The attempt failed. Without a delay the document is dead; otherwise it is tried again after
    the delay, unless its attempts are used up."""

    fence: Fence
    error: str
    retry_in_us: int | None = None


class Released(NamedTuple):
    """The attempt gives the document back untouched: attempt and charge are given back too."""

    fence: Fence


class Stopped(NamedTuple):
    """The attempt ended because the document was cancelled."""

    fence: Fence


Outcome = Completed | Failed | Released | Stopped


class Claimed(NamedTuple):
    """What a claim gives: documents to work on, the outcomes that came too late, and documents that
    were cancelled while they waited or were delayed."""

    claims: list[Claim]
    lost: list[Fence]
    cancelled: list[Document]


class Renewed(NamedTuple):
    """What a renewal tells: attempts that lost their lease, and documents to stop working on."""

    lost: list[Fence]
    cancelled: list[Fence]


class Stored(NamedTuple):
    """A document with all that belongs to it."""

    document: Document
    body: str | bytes | None
    result: str | None
    result_content: ContentRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which documents to list; what is None does not matter."""

    customer: str | None = None
    states: tuple[State, ...] | None = None
    priorities: tuple[int, ...] | None = None
    name: str | None = None
    name_part: str | None = None  # somewhere in the name; see `text.spellings`
    submitted_from: int | None = None
    submitted_before: int | None = None
    ids: tuple[str, ...] | None = None


class Page(NamedTuple):
    """Documents, newest first, and where the next page starts (None: this was the last)."""

    documents: list[Document]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerSettings:
    """What an operator sets for one customer."""

    weight: float = 1.0
    limit: int | None = None  # of documents running at once
    paused: bool = False

    def __post_init__(self) -> None:
        weight_in_thousandths(self.weight)
        if self.limit is not None and not 1 <= self.limit <= RUNNING_MAX:
            raise ValueError(
                f"limit is {self.limit}; it must be from 1 to {RUNNING_MAX:,} (pause to stop)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """A customer: its settings, its count, and how many of its documents wait and run."""

    name: str
    settings: CustomerSettings
    count: int
    count_updated_at: int | None
    waiting: int
    waiting_by_priority: tuple[int, ...]
    running: int
    delayed: int


class CustomerPage(NamedTuple):
    """Customers by name, and where the next page starts (None: this was the last)."""

    customers: list[Customer]
    next: str | None


class Pruned(NamedTuple):
    """How much was forgotten."""

    documents: int
    contents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole queue in a few numbers."""

    waiting_by_priority: tuple[int, ...]
    delayed: int
    running: int
    started: int  # how many attempts were ever begun
    completed: int  # how many documents ever completed,
    dead: int  # died, each time that one did,
    cancelled: int  # and were cancelled
    retried: int  # how many attempts failed, or lost their lease, without being the last
    repairs: int = 0  # how often a claim has repaired flows that did not agree with the documents

    @property
    def waiting(self) -> int:
        """How many documents wait, in all."""
        return sum(self.waiting_by_priority)


class Lanes(NamedTuple):
    """What comes next in each of the nine priorities, and how many attempts were ever begun."""

    started: int
    upcoming: tuple[tuple[Document, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a queue. They are kept in its database and hold for every process."""

    mode: Mode = Mode.FAIR
    costs: Costs = Costs.EQUAL
    patience_s: float = PATIENCE_US / 1_000_000
    reset: Reset = Reset.IDLE
    reset_interval_s: float = RESET_INTERVAL_US / 1_000_000
    bounds: tuple[int, ...] = BOUNDS
    attempts_max: int = 5
    waiting_max: int = 50_000_000
    waiting_per_customer_max: int = 10_000_000
    completed_kept_s: float = 7 * 86_400.0
    cancelled_kept_s: float = 7 * 86_400.0
    dead_kept_s: float = 90 * 86_400.0
    rule: Rule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _member(Mode, "mode", self.mode))
        object.__setattr__(self, "costs", _member(Costs, "costs", self.costs))
        object.__setattr__(self, "reset", _member(Reset, "reset", self.reset))
        object.__setattr__(self, "bounds", tuple(_whole("bounds", b) for b in self.bounds))
        for name in ("attempts_max", "waiting_max", "waiting_per_customer_max"):
            if _whole(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("patience_s", "completed_kept_s", "cancelled_kept_s", "dead_kept_s"):
            _seconds(name, getattr(self, name))
        _seconds("reset_interval_s", self.reset_interval_s)
        rule = Rule(
            bounds=self.bounds,
            reset_interval_us=round(self.reset_interval_s * 1_000_000),
            reset=self.reset,
        )
        object.__setattr__(self, "rule", rule)

    @property
    def patience_us(self) -> int:
        """The patience in microseconds."""
        return round(self.patience_s * 1_000_000)

    def kept_us(self, state: State) -> int:
        """How long an ended document is kept."""
        kept_s: float = getattr(self, f"{state.value}_kept_s")
        return round(kept_s * 1_000_000)

    def to_json(self) -> str:
        """The settings as a JSON object."""
        return json.dumps({name: getattr(self, name) for name in SETTING_NAMES})

    @staticmethod
    def from_json(text: str) -> "Settings":
        """The settings in a JSON object, defaults where it has none. One that this version does
        not know must not be ignored: the queue would be served otherwise than it was meant."""
        values: dict[str, Any] = json.loads(text)
        unknown = sorted(set(values) - set(SETTING_NAMES))
        if unknown:
            raise StoreRefused(
                f"the queue has settings that this fairturn does not know: {', '.join(unknown)}; "
                "install the newer fairturn that wrote them"
            )
        return Settings(**values)


SETTING_NAMES = tuple(f.name for f in fields(Settings) if f.init)


def _member(kind: type[StrEnum], name: str, value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(kind)
        raise ValueError(f"{name} is {value!r}; it must be one of: {choices}") from None


def _whole(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    return value


def _seconds(name: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds")
    if not 0 <= value <= SECONDS_MAX:
        raise ValueError(f"{name} is {value}; it must be between 0 and {SECONDS_MAX:g}")


def weight_in_thousandths(weight: float) -> int:
    """A weight for people as the integer that turns are divided by."""
    thousandths = round(weight * WEIGHT_ONE) if isfinite(weight) else 0
    if not WEIGHT_MIN <= thousandths <= WEIGHT_MAX:
        low, high = WEIGHT_MIN / WEIGHT_ONE, WEIGHT_MAX / WEIGHT_ONE
        raise ValueError(f"weight is {weight:g}; it must be between {low:g} and {high:g}")
    return thousandths


def cost_in_millionths(cost: float) -> int:
    """A cost for people as the integer that turns are charged with."""
    if not 0 <= cost <= COST_MAX:
        raise ValueError(f"cost is {cost:,}; it must be between 0 and {COST_MAX:,.0f}")
    return round(cost * COST_ONE)


REAL_COST_MAX = cost_in_millionths(COST_MAX)


def real_cost_within(real_cost: int) -> int:
    """What a finished document really cost, within what a document may cost."""
    if 0 <= real_cost <= REAL_COST_MAX:
        return real_cost
    return 0 if real_cost < 0 else REAL_COST_MAX


def kept_cost(completed: Completed) -> int | None:
    """What is kept with a document about its cost."""
    return None if completed.real_cost is None else real_cost_within(completed.real_cost)


def check_claim(n: int, worker: str, lease_us: int) -> None:
    """Refuse a claim that is out of bounds."""
    if not 0 <= n <= CLAIM_DOCUMENTS_MAX:
        raise ValueError(f"n is {n}; a claim takes from 0 to {CLAIM_DOCUMENTS_MAX:,} documents")
    identity(worker, "worker", WORKER_BYTES_MAX)
    check_lease(lease_us)


def check_lease(lease_us: int) -> None:
    """Refuse a lease that is too short to be renewed, or endless."""
    if not LEASE_US_MIN <= lease_us <= LEASE_US_MAX:
        raise ValueError(
            f"lease_us is {lease_us}; a lease lasts from {LEASE_US_MIN / 1_000_000:g} s "
            f"to {LEASE_US_MAX / 3_600_000_000:g} hours"
        )


def check_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Refuse outcomes that no store could keep, before anything of the call is recorded."""
    for outcome in outcomes:
        if isinstance(outcome, Completed):
            if outcome.result is None:
                continue
            if not storable(outcome.result):
                raise ValueError(
                    f"a result has a NUL character or a lone surrogate: {outcome.result[:40]!r}; "
                    "write it with json.dumps, which escapes them"
                )
            if len(outcome.result) > RESULT_BYTES_MAX:
                raise ValueError(
                    f"a result has {len(outcome.result):,} bytes; "
                    f"at most {RESULT_BYTES_MAX:,} are allowed"
                )
        elif isinstance(outcome, Failed) and (outcome.retry_in_us or 0) > RETRY_US_MAX:
            raise ValueError(f"retry_in_us is {outcome.retry_in_us}; at most a year is allowed")


def level_of(priority: int, mode: Mode) -> int:
    """The level in which a document waits: its priority, or the one level of mode `equal`."""
    return 1 if mode is Mode.EQUAL else priority


def by_priority(counts: Mapping[int, int]) -> tuple[int, ...]:
    """Numbers per priority as a tuple of nine."""
    return tuple(counts.get(priority, 0) for priority in range(1, LEVELS + 1))
