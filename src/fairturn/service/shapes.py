"""What goes over the wire. Fields have the names that they have in Python; moments are whole
microseconds since 1970 UTC."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict

from fairturn import model
from fairturn.access.keys import Role
from fairturn.explain.analysis import Explanation as Explained
from fairturn.explain.sentences import tell
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    PAGE_MAX,
    Kind,
    State,
)
from fairturn.priority import LEVELS, Count, Rule
from fairturn.scheduling.flows import COST_ONE
from fairturn.scheduling.position import Cause
from fairturn.scheduling.position import Position as Positioned

Priority = Annotated[int, Field(ge=1, le=LEVELS)]
Moment = Annotated[int, Field(description="Microseconds since 1970-01-01 UTC.")]
CustomerName = Annotated[str, Field(min_length=1, max_length=CUSTOMER_BYTES_MAX)]
DocumentId = Annotated[
    str, Field(description="The id of a document.", examples=["3f1c52d09ab47e6"])
]
# In a body, a value of another type is refused: 0 for false could delete what was not meant.
YesOrNo = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
PageSize = Annotated[int, Field(ge=1, le=PAGE_MAX)]


class Shape(BaseModel):
    """A value that is answered."""

    model_config = ConfigDict(frozen=True)


class Asked(BaseModel):
    """A value that is asked with: a field that nobody knows is refused, or a slip of the pen would
    go unnoticed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldError(Shape):
    where: str
    what: str


class Problem(Shape):
    """RFC 9457. `code` stays; `title` is a sentence in the caller's language."""

    type: str
    code: str
    status: int
    title: str
    detail: str | None = None
    errors: list[FieldError] | None = None
    limit: Annotated[str | None, Field(description="Of queue_full: which was reached.")] = None
    maximum: Annotated[int | None, Field(description="Of queue_full: what it is.")] = None
    waiting: Annotated[int | None, Field(description="Of queue_full: how many wait.")] = None
    customer: Annotated[str | None, Field(description="Of queue_full: whose, if it is one's.")] = (
        None
    )


class Receipt(Shape):
    """What a submission is answered with."""

    id: str
    customer: str
    count: int
    priority: Priority
    submitted_at: Moment


def receipt_of(receipt: model.Receipt) -> dict[str, Any]:
    """The fields of a receipt as they are shown. There are thousands a second, so that they are
    not checked against their form."""
    return {name: getattr(receipt, name) for name in _RECEIPT}


_RECEIPT = tuple(Receipt.model_fields)


class Progress(Shape):
    done: float
    total: float | None


class Before(Shape):
    """The documents before it, by why they are before it."""

    better_levels: int
    other_turns: int
    longest_waiting: int
    own: int


class Position(Shape):
    """How many documents will be started before it."""

    least: int
    most: int
    before: Before
    reached: Annotated[bool, Field(description="False: its customer's limit comes before it.")]
    causes: Annotated[list[Cause], Field(description="Why least and most differ.")]

    @staticmethod
    def of(position: Positioned) -> "Position":
        return Position(
            **position.bounds._asdict(),
            before=Before(**position.before._asdict()),
            reached=position.reached,
            causes=list(position.causes),
        )


class Forecast(Shape):
    """Between which moments it will start; without the later one nobody can say."""

    earliest_at: Moment
    latest_at: Moment | None


class Reason(Shape):
    code: str
    parameters: dict[str, Any]


class Explanation(Shape):
    """Why the document is where it is: the reasons with codes, and in sentences."""

    at: Moment
    language: str
    position: Position | None
    forecast: Forecast | None
    reasons: list[Reason]
    sentences: list[str]

    @staticmethod
    def of(explained: Explained, language: str) -> "Explanation":
        position, forecast = explained.position, explained.forecast
        return Explanation(
            at=explained.at,
            language=language,
            position=None if position is None else Position.of(position),
            forecast=None
            if forecast is None
            else Forecast(earliest_at=forecast.earliest_at, latest_at=forecast.latest_at),
            reasons=[
                Reason(code=reason.code.value, parameters=dict(reason.parameters))
                for reason in explained.reasons
            ],
            sentences=tell(explained, language),
        )


class Document(Shape):
    """A document and what became of it so far."""

    id: str
    customer: str
    state: State
    priority: Priority
    count: int
    submitted_at: Moment
    due_at: Moment | None
    attempts: int
    claimed_at: Moment | None
    ended_at: Moment | None
    worker: Annotated[str | None, Field(description="Shown to operators.")]
    error: str | None
    cancel_requested: bool
    cost: float | None
    real_cost: float | None
    kind: Kind
    size_bytes: int
    sha256: str | None
    name: str | None
    metadata: dict[str, Any]
    parent: str | None
    progress: Progress | None

    @staticmethod
    def of(document: model.Document, *, whole: bool) -> "Document":
        """`whole`: with what only operators see."""
        return Document(**fields_of(document, whole=whole))


def fields_of(document: model.Document, *, whole: bool) -> dict[str, Any]:
    """The fields of a document as they are shown."""
    sha256, progress = document.sha256, document.progress
    return {
        "id": document.id,
        "customer": document.customer,
        "state": document.state,
        "priority": document.priority,
        "count": document.count,
        "submitted_at": document.submitted_at,
        "due_at": document.due_at,
        "attempts": document.attempts,
        "claimed_at": document.claimed_at,
        "ended_at": document.ended_at,
        "worker": document.worker if whole else None,
        "error": document.error,
        "cancel_requested": document.cancel_requested,
        "cost": None if document.cost is None else document.cost / COST_ONE,
        "real_cost": None if document.real_cost is None else document.real_cost / COST_ONE,
        "kind": document.kind,
        "size_bytes": document.size_bytes,
        "sha256": None if sha256 is None else sha256.hex(),
        "name": document.name,
        "metadata": document.metadata,
        "parent": document.parent,
        "progress": None if progress is None else progress._asdict(),
    }


class ExplainedDocument(Document):
    """A document with its explanation, if that was asked for."""

    result_file_bytes: Annotated[
        int | None, Field(description="Of a completed one: the size of its file, if it has one.")
    ]
    explanation: Explanation | None


class Documents(Shape):
    """One page, the newest first; `next` is the `after` of the page that follows."""

    documents: list[Document]
    next: str | None


class Changed(Shape):
    """The state of the document afterwards."""

    id: str
    state: State


class Standing(Shape):
    """Where a customer stands."""

    name: str
    count: Annotated[int, Field(description="The pending documents count.")]
    priority_of_next: Annotated[Priority, Field(description="Of a document submitted now.")]
    resets_at: Annotated[
        Moment | None, Field(description="After this moment the count is 0, if nothing comes in.")
    ]
    waiting: int
    waiting_by_priority: Annotated[list[int], Field(min_length=LEVELS, max_length=LEVELS)]
    running: int
    delayed: int

    @staticmethod
    def of(customer: model.Customer, rule: Rule, now: int) -> "Standing":
        return Standing(**_standing(customer, rule, now))

    @staticmethod
    def of_nobody_known(name: str) -> "Standing":
        """Of a customer who has nothing here now."""
        return Standing(
            name=name,
            count=0,
            priority_of_next=1,
            resets_at=None,
            waiting=0,
            waiting_by_priority=[0] * LEVELS,
            running=0,
            delayed=0,
        )


def _standing(customer: model.Customer, rule: Rule, now: int) -> dict[str, Any]:
    updated_at = customer.count_updated_at
    last = None if updated_at is None else Count(customer.count, updated_at)
    resets = last is not None and now <= rule.resets_at(last)
    return {
        "name": customer.name,
        "count": customer.count,
        "priority_of_next": rule.priority(rule.check(last, now).value),
        "resets_at": rule.resets_at(last) if last is not None and resets else None,
        "waiting": customer.waiting,
        "waiting_by_priority": list(customer.waiting_by_priority),
        "running": customer.running,
        "delayed": customer.delayed,
    }


class Me(Shape):
    """Who asks: the role of the key, and where its customer stands."""

    role: Role
    key: str | None
    key_name: str | None
    customer: Standing | None
    version: Annotated[str, Field(description="Of the fairturn that answers.")]


class Customer(Standing):
    """A customer as an operator sees it."""

    weight: float
    limit: int | None
    paused: bool
    count_updated_at: Annotated[Moment | None, Field(description="When the count moved last.")]

    @staticmethod
    def seen(customer: model.Customer, rule: Rule, now: int) -> "Customer":
        settings = customer.settings
        return Customer(
            **_standing(customer, rule, now),
            weight=settings.weight,
            limit=settings.limit,
            paused=settings.paused,
            count_updated_at=customer.count_updated_at,
        )


class Customers(Shape):
    """One page, by name."""

    customers: list[Customer]
    next: str | None


class Summary(Shape):
    """The whole queue in a few numbers."""

    waiting: int
    waiting_by_priority: list[int]
    delayed: int
    running: int
    started: Annotated[int, Field(description="Attempts that were ever begun.")]
    completed: Annotated[int, Field(description="Documents that ever completed.")]
    dead: Annotated[int, Field(description="Documents that ever died, each time.")]
    cancelled: Annotated[int, Field(description="Documents that ever were cancelled.")]
    retried: Annotated[
        int, Field(description="Attempts that failed, or lost their lease, and were not the last.")
    ]
    repairs: Annotated[
        int, Field(description="Repairs that claims made because counters were wrong.")
    ]
    workers: Annotated[int, Field(description="Seen lately.")]
    oldest_waiting_since_at: Moment | None


class Worker(Shape):
    name: str
    seen_at: Moment
    slots: Annotated[int, Field(description="How many documents it runs at the same time.")]
    alive: bool


class Workers(Shape):
    workers: list[Worker]


class Bulk(Shape):
    """What a bulk action did, or would do."""

    matched: Annotated[int, Field(description="Documents that match, up to the limit of one call.")]
    changed: int
    more: Annotated[bool, Field(description="There are more that match; ask again.")]
    dry_run: bool
