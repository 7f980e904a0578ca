"""Documents, customers, claims, outcomes and settings: frozen values, without I/O.

Fields that end in `_at_us` are timestamps: microseconds since 1970 UTC, as in `fairturn.clock`.
Values created in large numbers are named tuples, which are faster to construct.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from math import isfinite
from os import PathLike
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypedDict

from fairturn.clock import datetime_or_none, to_datetime
from fairturn.errors import StoreRefused
from fairturn.priority import BOUNDS, LEVELS, RESET_INTERVAL_US, Count, Reset, Rule
from fairturn.scheduling.flows import (
    COST_ONE,
    PATIENCE_US,
    WEIGHT_MAX,
    WEIGHT_MIN,
    WEIGHT_ONE,
    Costs,
    Mode,
)
from fairturn.scheduling.outages import OF_KIND, PROBE_US
from fairturn.validation.text import identity, kind_name, small, spellings, storable

CUSTOMER_BYTES_MAX = 255
KEY_BYTES_MAX = 255
NAME_BYTES_MAX = 1_024
METADATA_BYTES_MAX = 65_536
METADATA_KEYS_MAX = 64
TAGS_MAX = 16
TAG_BYTES_MAX = 64
DEFAULT_KIND_NAME = "default"  # of documents that are submitted without a kind
KINDS_MAX = 100
KIND_BYTES_MAX = 64
TRACEPARENT = "traceparent"  # the metadata key of a submission's trace context (W3C)
DOCUMENT_BYTES = 1_024  # of each document in `stored_bytes`: its row, name, tags, key and indexes
BYTES_MAX = 1 << 53  # the highest limit of stored bytes
INLINE_BYTES_MAX = 65_536  # larger bodies are stored outside the database
PAYLOAD_BYTES_MAX = 16 * 1_048_576
CONTENT_BYTES_MAX = 8 * 1_073_741_824
ERROR_BYTES_MAX = 8_192
WORKER_BYTES_MAX = 255
SUBMIT_DOCUMENTS_MAX = 10_000
CLAIM_DOCUMENTS_MAX = 1_000
PAGE_MAX = 1_000
CANCELS_REPORTED_MAX = 1_000  # per claim
CANCELS_KEPT_MAX = 10_000  # not yet reported by a claim; beyond it the oldest are dropped
COST_MAX = 1_000_000.0  # keeps virtual times far below 2^63
SECONDS_MAX = 1e10  # about 300 years, for every setting in seconds
CHILDREN_UNCHECKED_MAX = 20
KEY_KEPT_US = 24 * 3_600 * 1_000_000
RESULT_BYTES_MAX = 16 * 1_048_576
LEASE_US_MIN, LEASE_US_MAX = 1, 24 * 3_600 * 1_000_000
RETRY_US_MAX = 366 * 24 * 3_600 * 1_000_000
RUNNING_MAX = 1_000_000  # the highest concurrency limit of a customer
# Of every other whole number in the settings: JSON clients can read it exactly.
NUMBER_MAX = 1 << 53
ATTEMPTS_MAX = (1 << 31) - 1  # of one document, in the columns of both stores
STEPS_MAX = 100  # finished steps of one document
STEP_VALUE_BYTES_MAX = 1_048_576  # of JSON text; larger values are files
CHECKPOINT_BYTES_MAX = 65_536  # of JSON text
ATTEMPTS_STORED_MAX = 200  # of one document; beyond it the oldest that is no step is deleted
DETAILS_BYTES_MAX = 8_192  # the tail of traceback and output of an attempt
SNOOZES_MAX = 1_000  # of one document
SNOOZE_US_MAX = RETRY_US_MAX
EXPIRE_MAX = 1_000  # documents that one transaction records as expired
SERVICE_BYTES_MAX = 64
SERVICES_MAX = 16  # that one kind of work needs
RESUMABLE_BYTES_MAX = len(OF_KIND) + max(SERVICE_BYTES_MAX, KIND_BYTES_MAX)  # of a held service


class State(StrEnum):
    """The state of a document. The position is the code in the database: append, never reorder."""

    DELAYED = "delayed"  # not due yet, or waiting for a retry
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    DEAD = "dead"  # failed without attempts left, or with `GiveUp`
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # not processed before its `expires_at`


LEASE_EXPIRED = "the lease expired: the worker crashed, hung or lost its connection"
# The tuples below, the lists of states in SQL and the counters of ended documents derive from this
# table.
TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.DELAYED: frozenset({State.WAITING, State.CANCELLED, State.EXPIRED}),
        State.WAITING: frozenset({State.RUNNING, State.CANCELLED, State.EXPIRED}),
        State.RUNNING: frozenset(
            {State.COMPLETED, State.DELAYED, State.WAITING, State.DEAD, State.CANCELLED}
        ),
        State.COMPLETED: frozenset(),
        State.DEAD: frozenset({State.WAITING}),  # by `retry` alone
        State.CANCELLED: frozenset(),
        # By `retry` alone; delayed again if it has never been due.
        State.EXPIRED: frozenset({State.WAITING, State.DELAYED}),
    }
)
ENDED = tuple(state for state, to in TRANSITIONS.items() if State.CANCELLED not in to)
NOT_ENDED = tuple(state for state in TRANSITIONS if state not in ENDED)
FAILED = tuple(state for state in ENDED if state is not State.COMPLETED)
ENDED_BY_ATTEMPT = tuple(state for state in ENDED if state not in TRANSITIONS[State.WAITING])
KEPT_SETTINGS = {state: f"{state}_kept_s" for state in ENDED}  # how long a document is kept


class BodyType(StrEnum):
    PAYLOAD = "payload"  # a JSON value
    CONTENT = "content"  # bytes


class ContentRef(NamedTuple):
    """A reference to bytes outside the database, already durable."""

    name: str
    size_bytes: int
    sha256: bytes


class Submission(NamedTuple):
    """One document for `Queue.submit_many`; `Queue.submit` accepts the same fields."""

    customer: str
    payload: Any = None
    content: bytes | BinaryIO | None = None
    file: str | PathLike[str] | None = None
    name: str | None = None
    metadata: Mapping[str, Any] | None = None
    key: str | None = None
    cost: float | None = None
    due_at: datetime | int | None = None  # an aware datetime, or a timestamp
    parent: str | None = None
    tags: Iterable[str] | None = None
    kind: str | None = None  # the kind of work; None: `default`
    expires_at: datetime | int | None = None  # an aware datetime, or a timestamp
    expires_in_s: float | None = None  # instead of `expires_at`
    written: ContentRef | None = None  # a file already stored through `Contents.begin`


class SubmissionFields(TypedDict, total=False):
    """The keyword arguments of `submit`: the fields of `Submission` except the customer."""

    payload: Any
    content: bytes | BinaryIO | None
    file: str | PathLike[str] | None
    name: str | None
    metadata: Mapping[str, Any] | None
    key: str | None
    cost: float | None
    due_at: datetime | int | None
    parent: str | None
    tags: Iterable[str] | None
    kind: str | None
    expires_at: datetime | int | None
    expires_in_s: float | None


class NewDocument(NamedTuple):
    """A validated and encoded submission, as stores accept it. SQLite stores the fields from `body`
    to `due_at` unchanged."""

    customer: str
    body: str | bytes | None  # JSON text, or bytes; None if stored outside the database
    body_type: BodyType = BodyType.PAYLOAD
    size_bytes: int = 0
    sha256: bytes | None = None
    content_name: str | None = None
    name: str | None = None
    metadata: str | None = None
    tags: str | None = None  # a JSON array
    cost: int | None = None
    due_at: int | None = None
    key: str | None = None
    digest: bytes | None = None
    parent: str | None = None
    expires_at: int | None = None  # None: by the rule of its kind
    kind: str = DEFAULT_KIND_NAME

    @property
    def stored_bytes(self) -> int:
        """How much the document counts towards `bytes_per_customer_max`."""
        return DOCUMENT_BYTES + self.size_bytes + len(self.metadata or "")  # JSON text is ASCII


class Receipt(NamedTuple):
    """The answer to a submission. `replayed` is true if the idempotency key replayed it."""

    id: str
    customer: str
    count: int  # type: ignore[assignment]  # hides tuple.count
    priority: int
    submitted_at_us: int
    replayed: bool = False

    @property
    def submitted_at(self) -> datetime:
        return to_datetime(self.submitted_at_us)


class Document(NamedTuple):
    """A document and its progress through the queue.

    It has more than 15 attributes because it is the public view of one row: queries, the HTTP API
    and the command line show every field.
    """

    id: str
    customer: str
    state: State
    priority: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    submitted_at_us: int
    due_at_us: int | None
    order: int | None
    attempts: int
    claimed_at_us: int | None
    ended_at_us: int | None
    worker: str | None
    error: str | None
    cancel_requested: bool
    cost: int | None
    body_type: BodyType
    size_bytes: int
    sha256: bytes | None
    content_name: str | None
    name: str | None
    metadata_json: str | None
    parent: str | None
    tags_json: str | None = None
    real_cost: int | None = None  # reported by the worker on completion
    progress: "Progress | None" = None
    kind: str = DEFAULT_KIND_NAME  # of its present step
    step: int = 0  # how many steps are finished; `attempts` counts those of the present one
    expires_at_us: int | None = None

    @property
    def submitted_at(self) -> datetime:
        return to_datetime(self.submitted_at_us)

    @property
    def due_at(self) -> datetime | None:
        return datetime_or_none(self.due_at_us)

    @property
    def expires_at(self) -> datetime | None:
        return datetime_or_none(self.expires_at_us)

    @property
    def claimed_at(self) -> datetime | None:
        return datetime_or_none(self.claimed_at_us)

    @property
    def ended_at(self) -> datetime | None:
        return datetime_or_none(self.ended_at_us)

    @property
    def metadata(self) -> dict[str, Any]:
        return json.loads(self.metadata_json) if self.metadata_json else {}

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags, sorted."""
        return tuple(json.loads(self.tags_json)) if self.tags_json else ()

    @property
    def ended(self) -> bool:
        """Whether the state is one of `ENDED`."""
        return self.state in ENDED

    @property
    def expiry(self) -> int | None:
        """When the document expires; None: never, in its present state."""
        is_pending = self.state in (State.WAITING, State.DELAYED)
        return self.expires_at_us if is_pending and not self.step and not self.attempts else None


class Fence(NamedTuple):
    """The fencing token of one attempt. Numbers only increase, so that an external system can
    reject requests of a stale attempt."""

    document: str
    number: int

    def __str__(self) -> str:
        return f"{self.document}-{self.number}"


class Progress(NamedTuple):
    """The progress that a handler reports; the total may be unknown."""

    done: float
    total: float | None = None


NO_PROGRESS: Mapping[Fence, Progress] = MappingProxyType({})
NO_CHECKPOINTS: Mapping[Fence, str] = MappingProxyType({})
NO_CAPS: Mapping[str, int] = MappingProxyType({})
NO_NEEDS: Mapping[str, Sequence[str]] = MappingProxyType({})


class FinishedStep(NamedTuple):
    """A step that a document has finished, without its value."""

    step: int  # from 0
    kind: str
    attempts: int  # how many the step needed
    worker: str
    claimed_at_us: int
    ended_at_us: int


class Claim(NamedTuple):
    """The right to work on a document until its lease expires."""

    fence: Fence
    document: Document
    body: str | bytes | None
    lease_ends_at_us: int
    previous: str | None = None  # the value of the last step, as JSON text
    previous_content: ContentRef | None = None  # its file
    steps: tuple[FinishedStep, ...] = ()
    checkpoint: str | None = None  # of an earlier attempt of this step, as JSON text

    @property
    def lease_ends_at(self) -> datetime:
        return to_datetime(self.lease_ends_at_us)


class Completed(NamedTuple):
    """The attempt succeeded. `real_cost`, in millionths, is stored with the document and used where
    costs are learned; workers report the run time in seconds."""

    fence: Fence
    result: str | None = None  # JSON text
    content: ContentRef | None = None
    real_cost: int | None = None


class Failed(NamedTuple):
    """The attempt failed. The document is retried after `retry_in_us`; with None, or without
    attempts left, it is dead."""

    fence: Fence
    error: str
    retry_in_us: int | None = None
    details: str | None = None  # traceback and output; the store keeps `DETAILS_BYTES_MAX` at most


class Advanced(NamedTuple):
    """The attempt ends a step: the same document waits for another kind of work, with all attempts
    available. A kind that the queue refuses, a step beyond `STEPS_MAX` and a value of more than
    `STEP_VALUE_BYTES_MAX` make it dead; a retry repeats the step."""

    fence: Fence
    kind: str
    value: str | None = None  # JSON text, which the next step gets as `Claim.previous`
    content: ContentRef | None = None
    cost: int | None = None  # of the next step, in millionths; None: as before
    real_cost: int | None = None  # of this step, as in `Completed`; used where costs are learned


class Snoozed(NamedTuple):
    """The attempt postpones the document by `delay_us`, without counting as one. After
    `SNOOZES_MAX` of them, the document is dead."""

    fence: Fence
    delay_us: int


class OutageReport(NamedTuple):
    """The attempt found a service unavailable. It does not count, and the document is delayed until
    the next probe; reports of several documents hold every kind that needs the service.

    A report without a service, or with one that its kind does not need, is of the kind alone.
    """

    fence: Fence
    error: str
    retry_after_us: int = PROBE_US
    service: str | None = None


class Released(NamedTuple):
    """The attempt returns the document unprocessed. It does not count as an attempt, and its cost
    is refunded."""

    fence: Fence


class Stopped(NamedTuple):
    """The attempt stopped because the document was cancelled."""

    fence: Fence


Outcome = Completed | Failed | Advanced | Snoozed | OutageReport | Released | Stopped


class AttemptOutcome(StrEnum):
    """How a stored attempt ended. The position is the code in the database."""

    FAILED = "failed"
    LOST = "lost"  # its lease expired
    ADVANCED = "advanced"  # it ended a step


class AttemptRecord(NamedTuple):
    """A stored attempt: one that failed, lost its lease or ended a step. The attempt that completed
    a document is in the document itself; attempts that did not count are not stored."""

    step: int
    kind: str
    attempt: int  # its number in the step, from 1
    worker: str
    claimed_at_us: int
    ended_at_us: int
    outcome: AttemptOutcome
    error: str | None = None
    details: str | None = None
    value: str | None = None  # JSON text; None unless values were requested
    content: ContentRef | None = None

    @property
    def claimed_at(self) -> datetime:
        return to_datetime(self.claimed_at_us)

    @property
    def ended_at(self) -> datetime:
        return to_datetime(self.ended_at_us)


class Claimed(NamedTuple):
    """The result of a claim: claims, the fences of stale outcomes, and documents cancelled while
    waiting or delayed."""

    claims: list[Claim]
    lost: list[Fence]
    cancelled: list[Document]


class Renewed(NamedTuple):
    """The result of a renewal: attempts that lost their lease, and attempts to stop because their
    document was cancelled."""

    lost: list[Fence]
    cancelled: list[Fence]


class Stored(NamedTuple):
    """A document with its body and its result."""

    document: Document
    body: str | bytes | None
    result: str | None
    result_content: ContentRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Criteria for listing documents; None matches everything."""

    customer: str | None = None
    states: tuple[State, ...] | None = None
    priorities: tuple[int, ...] | None = None
    name: str | None = None
    name_part: str | None = None  # a substring of the name; see `text.spellings`
    submitted_from: int | None = None
    submitted_before: int | None = None
    ids: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None  # all of them
    kinds: tuple[str, ...] | None = None

    def matches(self, document: Document) -> bool:
        """Return whether a document matches all criteria."""
        return (
            (self.customer is None or document.customer == self.customer)
            and (self.states is None or document.state in self.states)
            and (self.priorities is None or document.priority in self.priorities)
            and (self.name is None or document.name == self.name)
            and (self.name_part is None or _has_part(document.name, self.name_part))
            and (self.submitted_from is None or document.submitted_at_us >= self.submitted_from)
            and (self.submitted_before is None or document.submitted_at_us < self.submitted_before)
            and (self.ids is None or document.id in self.ids)
            and (self.tags is None or set(self.tags) <= set(document.tags))
            and (self.kinds is None or document.kind in self.kinds)
        )


def _has_part(name: str | None, part: str) -> bool:
    return name is not None and any(spelling in small(name) for spelling in spellings(part))


class Page(NamedTuple):
    """Documents, newest first, and the cursor of the next page (None on the last)."""

    documents: list[Document]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerSettings:
    """The settings of one customer."""

    weight: float = 1.0
    limit: int | None = None  # of concurrently running documents
    paused: bool = False
    bytes_max: int | None = None  # of its stored documents; None: bytes_per_customer_max

    def __post_init__(self) -> None:
        weight_in_thousandths(self.weight)
        if self.limit is not None and not 1 <= self.limit <= RUNNING_MAX:
            raise ValueError(
                f"limit is {self.limit}; it must be from 1 to {RUNNING_MAX:,} (to stop a customer, "
                "pause it)"
            )
        if self.bytes_max is not None and not 1 <= self.bytes_max <= BYTES_MAX:
            raise ValueError(f"bytes_max is {self.bytes_max}; it must be from 1 to {BYTES_MAX:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSettings:
    """The settings of one kind of work, for every machine."""

    limit: int | None = None  # of concurrently running documents
    paused: bool = False
    attempts_max: int | None = None  # None: that of the queue
    expires_in_s: float | None = None  # of documents without an expiry, since they are due

    def __post_init__(self) -> None:
        if self.expires_in_s is not None:
            _seconds("expires_in_s", self.expires_in_s)
            if self.expires_in_us == 0:
                raise ValueError(
                    f"expires_in_s is {self.expires_in_s}; it must be positive (None: never)"
                )
        for name, most in (("limit", RUNNING_MAX), ("attempts_max", ATTEMPTS_MAX)):
            value = getattr(self, name)
            if value is not None and not 1 <= _whole(name, value) <= most:
                hint = " (to stop a kind, pause it)" if name == "limit" else ""
                raise ValueError(f"{name} is {value}; it must be from 1 to {most:,}{hint}")

    @property
    def expires_in_us(self) -> int | None:
        return None if self.expires_in_s is None else round(self.expires_in_s * 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of work: its settings, and its waiting and running documents."""

    name: str
    settings: KindSettings
    waiting: int
    running: int
    workers: int = 0  # live workers that serve it; `kinds_of` in `queue.py` counts them

    @property
    def is_unserved(self) -> bool:
        """Whether documents wait for it and no live worker serves it."""
        return self.waiting > 0 and self.workers == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOutage:
    """A service that holds kinds of work, or that they resume from."""

    service: str  # `kind:NAME` for one that is only known by the kind that needs it
    kinds: tuple[str, ...]  # that need it, ordered by name
    began_at_us: int  # the first report
    error: str  # of the last report
    probes: int  # attempts since the hold began that found the service unavailable
    probe_at_us: int  # when a claim may take the next document as a probe
    resumed_at_us: int | None  # since when the number of running documents rises; None: held

    @property
    def began_at(self) -> datetime:
        return to_datetime(self.began_at_us)

    @property
    def probe_at(self) -> datetime:
        return to_datetime(self.probe_at_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """A customer: its settings, its count, and its waiting, running and delayed documents."""

    name: str
    settings: CustomerSettings
    count: int
    count_updated_at_us: int | None
    waiting: int
    waiting_by_priority: tuple[int, ...]
    running: int
    delayed: int
    stored_bytes: int = 0  # of all its documents, until they are pruned

    @property
    def count_updated_at(self) -> datetime | None:
        return datetime_or_none(self.count_updated_at_us)


class CustomerSummary(NamedTuple):
    """A customer's pending documents count, and its waiting, running and delayed documents.

    The count is reset to 0 after `resets_at` unless a document is submitted before.
    """

    name: str
    count: int  # type: ignore[assignment]  # hides tuple.count
    priority_of_next: int = 1
    resets_at_us: int | None = None
    waiting: int = 0
    waiting_by_priority: tuple[int, ...] = (0,) * LEVELS
    running: int = 0
    delayed: int = 0

    @staticmethod
    def of(customer: Customer, rule: Rule, now: int) -> "CustomerSummary":
        updated_at = customer.count_updated_at_us
        last = None if updated_at is None else Count(customer.count, updated_at)
        resets_at = None if last is None else rule.resets_at(last)
        return CustomerSummary(
            name=customer.name,
            count=customer.count,
            priority_of_next=rule.priority(rule.check(last, now).value),
            resets_at_us=None if resets_at is None or now > resets_at else resets_at,
            waiting=customer.waiting,
            waiting_by_priority=customer.waiting_by_priority,
            running=customer.running,
            delayed=customer.delayed,
        )

    @property
    def resets_at(self) -> datetime | None:
        return datetime_or_none(self.resets_at_us)


class CustomerPage(NamedTuple):
    """Customers by name, and the cursor of the next page (None on the last)."""

    customers: list[Customer]
    next: str | None


class Pruned(NamedTuple):
    """How many documents and contents a prune deleted."""

    documents: int
    contents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The queue in numbers. `started` and the fields after it count since the queue was created."""

    waiting_by_priority: tuple[int, ...]
    delayed: int
    running: int
    started: int  # attempts
    completed: int
    dead: int  # a document that is retried and dies again counts twice
    cancelled: int
    expired: int
    retried: int  # attempts that failed or lost their lease, and were followed by another
    repairs: int = 0  # by claims, of flows that did not agree with the documents

    @property
    def waiting(self) -> int:
        return sum(self.waiting_by_priority)


class Lanes(NamedTuple):
    """The next documents of each priority, and the number of attempts ever started."""

    started: int
    upcoming: tuple[tuple[Document, ...], ...]


class KindPolicy(StrEnum):
    """Which kinds of work a submission may name."""

    KNOWN = "known"  # those that a worker has served or an operator has created
    OPEN = "open"  # every kind; a new one is created


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a queue. They are stored in its database and apply to every process."""

    mode: Mode = Mode.FAIR
    costs: Costs = Costs.EQUAL
    patience_s: float = PATIENCE_US / 1_000_000
    reset: Reset = Reset.IDLE
    reset_interval_s: float = RESET_INTERVAL_US / 1_000_000
    bounds: tuple[int, ...] = BOUNDS
    kinds: KindPolicy = KindPolicy.KNOWN
    attempts_max: int = 5
    waiting_max: int = 50_000_000
    waiting_per_customer_max: int = 10_000_000
    bytes_per_customer_max: int = 10 * 1_024**3
    completed_kept_s: float = 7 * 86_400.0
    cancelled_kept_s: float = 7 * 86_400.0
    dead_kept_s: float = 90 * 86_400.0
    expired_kept_s: float = 7 * 86_400.0
    rule: Rule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _member(Mode, "mode", self.mode))
        object.__setattr__(self, "costs", _member(Costs, "costs", self.costs))
        object.__setattr__(self, "reset", _member(Reset, "reset", self.reset))
        object.__setattr__(self, "kinds", _member(KindPolicy, "kinds", self.kinds))
        object.__setattr__(self, "bounds", tuple(_whole("bounds", b) for b in self.bounds))
        if any(abs(bound) > NUMBER_MAX for bound in self.bounds):
            raise ValueError(
                f"bounds is {list(self.bounds)}; each must be between -{NUMBER_MAX:,} and "
                f"{NUMBER_MAX:,}"
            )
        for name, most in _MAXIMA.items():
            if not 1 <= _whole(name, getattr(self, name)) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be between 1 and {most:,}"
                )
        for name in ("patience_s", "reset_interval_s", *KEPT_SETTINGS.values()):
            _seconds(name, getattr(self, name))
        rule = Rule(
            bounds=self.bounds,
            reset_interval_us=round(self.reset_interval_s * 1_000_000),
            reset=self.reset,
        )
        object.__setattr__(self, "rule", rule)

    @property
    def patience_us(self) -> int:
        return round(self.patience_s * 1_000_000)

    def kept_us(self, state: State) -> int:
        """Return how long a document in an ended state is kept."""
        kept_s: float = getattr(self, KEPT_SETTINGS[state])
        return round(kept_s * 1_000_000)

    def to_json(self) -> str:
        """Return the settings as they are stored. Those of this release are omitted while they have
        their defaults: the release before refuses settings that it does not know, and its processes
        may restart during a rollout."""
        values = {name: getattr(self, name) for name in SETTING_NAMES}
        plain = Settings()
        return json.dumps(
            {n: v for n, v in values.items() if n not in _NEW_SETTINGS or v != getattr(plain, n)}
        )

    @staticmethod
    def from_json(text: str) -> "Settings":
        """Parse settings; missing ones have their defaults. Raise `StoreRefused` for an unknown
        one: ignoring it would serve the queue in another order than configured."""
        values: dict[str, Any] = json.loads(text)
        unknown = sorted(set(values) - set(SETTING_NAMES))
        if unknown:
            raise StoreRefused(
                f"the queue has settings that this release does not support: {', '.join(unknown)}; "
                "install the newer fairturn that wrote them"
            )
        return Settings(**values)


_MAXIMA = {
    "attempts_max": ATTEMPTS_MAX,
    "waiting_max": NUMBER_MAX,
    "waiting_per_customer_max": NUMBER_MAX,
    "bytes_per_customer_max": BYTES_MAX,
}
SETTING_NAMES = tuple(f.name for f in fields(Settings) if f.init)
_NEW_SETTINGS = ("kinds", "expired_kept_s")


class SettingChanges(TypedDict, total=False):
    """Settings of a queue by name; omitted ones keep their values."""

    mode: Mode | str
    costs: Costs | str
    patience_s: float
    reset: Reset | str
    reset_interval_s: float
    bounds: Iterable[int]
    kinds: KindPolicy | str
    attempts_max: int
    waiting_max: int
    waiting_per_customer_max: int
    bytes_per_customer_max: int
    completed_kept_s: float
    cancelled_kept_s: float
    dead_kept_s: float
    expired_kept_s: float


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
    """Return a weight as an integer of thousandths; raise `ValueError` if out of range."""
    thousandths = round(weight * WEIGHT_ONE) if isfinite(weight) else 0
    if not WEIGHT_MIN <= thousandths <= WEIGHT_MAX:
        low, high = WEIGHT_MIN / WEIGHT_ONE, WEIGHT_MAX / WEIGHT_ONE
        raise ValueError(f"weight is {weight:g}; it must be between {low:g} and {high:g}")
    return thousandths


def cost_in_millionths(cost: float) -> int:
    """Return a cost as an integer of millionths; raise `ValueError` if out of range."""
    if not 0 <= cost <= COST_MAX:
        raise ValueError(f"cost is {cost:,}; it must be between 0 and {COST_MAX:,.0f}")
    return round(cost * COST_ONE)


REAL_COST_MAX = cost_in_millionths(COST_MAX)


def real_cost_within(real_cost: int) -> int:
    """Return a real cost, clamped to the range of costs."""
    if 0 <= real_cost <= REAL_COST_MAX:
        return real_cost
    return 0 if real_cost < 0 else REAL_COST_MAX


def kept_cost(completed: Completed) -> int | None:
    """Return the real cost to store with a completed document."""
    return None if completed.real_cost is None else real_cost_within(completed.real_cost)


def check_claim(n: int, worker: str, lease_us: int) -> None:
    """Raise `ValueError` if the arguments of a claim are out of range."""
    if not 0 <= n <= CLAIM_DOCUMENTS_MAX:
        raise ValueError(f"n is {n}; a claim takes from 0 to {CLAIM_DOCUMENTS_MAX:,} documents")
    identity(worker, "worker", WORKER_BYTES_MAX)
    check_lease(lease_us)


def check_lease(lease_us: int) -> None:
    """Raise `ValueError` if the length of a lease is out of range."""
    if not LEASE_US_MIN <= lease_us <= LEASE_US_MAX:
        raise ValueError(
            f"lease_us is {lease_us}; it must be from {LEASE_US_MIN} to {LEASE_US_MAX} "
            f"({LEASE_US_MAX / 3_600_000_000:g} hours)"
        )


def check_expire(limit: int) -> None:
    """Raise `ValueError` if `expire` cannot record this number of documents at most."""
    if not 1 <= limit <= EXPIRE_MAX:
        raise ValueError(f"limit is {limit}; it must be from 1 to {EXPIRE_MAX:,}")


def check_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Raise `ValueError` for an outcome that cannot be stored, before anything is recorded."""
    for outcome in outcomes:
        match outcome:
            case Completed(result=str(result)):
                _check_json("a result", result)
                if len(result) > RESULT_BYTES_MAX:
                    raise ValueError(
                        f"a result has {len(result):,} bytes; at most {RESULT_BYTES_MAX:,} are "
                        "allowed"
                    )
            case Failed():
                _check_delay("retry_in_us", outcome.retry_in_us or 0, RETRY_US_MAX)
            case Advanced():
                _check_json("the value of a step", outcome.value or "")
                if outcome.cost is not None and not 0 <= outcome.cost <= REAL_COST_MAX:
                    raise ValueError(
                        f"cost is {outcome.cost}; it must be from 0 to {REAL_COST_MAX:,} millionths"
                    )
            case Snoozed():
                _check_delay("delay_us", outcome.delay_us, SNOOZE_US_MAX)
            case OutageReport(service=str(service)):
                identity(service, "service", SERVICE_BYTES_MAX)


def check_checkpoints(checkpoints: Iterable[str]) -> None:
    """Raise `ValueError` for a checkpoint that cannot be stored."""
    for checkpoint in checkpoints:
        _check_json("a checkpoint", checkpoint)
        size = len(checkpoint.encode())
        if size > CHECKPOINT_BYTES_MAX:
            raise ValueError(
                f"a checkpoint has {size:,} bytes; at most {CHECKPOINT_BYTES_MAX:,} are allowed"
            )


def check_needs(needs: Mapping[str, Sequence[str]]) -> None:
    """Raise `ValueError` if the services that a kind needs are not valid."""
    for kind, services in needs.items():
        kind_name(kind)
        if len(services) > SERVICES_MAX:
            raise ValueError(
                f"the kind {kind!r} needs {len(services)} services; at most {SERVICES_MAX} are "
                "allowed"
            )
        for service in services:
            identity(service, "service", SERVICE_BYTES_MAX)
            if service.startswith(OF_KIND):
                raise ValueError(f"service {service!r} is reserved; choose one without {OF_KIND!r}")


def _check_json(what: str, text: str) -> None:
    if not storable(text):
        raise ValueError(
            f"{what} has a NUL character or a lone surrogate: {text[:40]!r}; write it with "
            "json.dumps, which escapes them"
        )


def _check_delay(name: str, delay_us: int, most: int) -> None:
    if delay_us > most:
        days = most // (24 * 3_600 * 1_000_000)
        raise ValueError(f"{name} is {delay_us}; at most {days} days are allowed")


def level_of(priority: int, mode: Mode) -> int:
    """Return the level in which a document waits: its priority, or 1 in mode `equal`."""
    return 1 if mode is Mode.EQUAL else priority


def by_priority(counts: Mapping[int, int]) -> tuple[int, ...]:
    """Return counts per priority as a tuple of nine."""
    return tuple(counts.get(priority, 0) for priority in range(1, LEVELS + 1))
