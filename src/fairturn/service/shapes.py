"""Request and response models. Timestamps are integers of microseconds since 1970 UTC."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, create_model

from fairturn import model, wire
from fairturn.access.keys import Role
from fairturn.explain.analysis import Explanation
from fairturn.explain.sentences import tell
from fairturn.model import CUSTOMER_BYTES_MAX, KIND_BYTES_MAX, PAGE_MAX, State
from fairturn.priority import LEVELS, Rule
from fairturn.scheduling.position import Cause, Position
from fairturn.validation import text

Priority = Annotated[int, Field(ge=1, le=LEVELS)]
Timestamp = Annotated[int, Field(description="Microseconds since 1970-01-01 UTC.")]
CustomerName = Annotated[
    str,
    Field(min_length=1, max_length=CUSTOMER_BYTES_MAX),
    # PostgreSQL raises an error for text that it cannot store, also in a query.
    AfterValidator(lambda name: text.identity(name, "customer", CUSTOMER_BYTES_MAX)),
]
KindName = Annotated[
    str, Field(min_length=1, max_length=KIND_BYTES_MAX), AfterValidator(text.kind_name)
]
DocumentId = Annotated[
    str, Field(description="Unique identifier of the document.", examples=["3f1c52d09ab47e6"])
]
# Strict in bodies: `dry_run: 0` must not be accepted as false.
YesOrNo = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
PageSize = Annotated[int, Field(ge=1, le=PAGE_MAX)]


class ResponseJson(BaseModel):
    model_config = ConfigDict(frozen=True)


class RequestFields(BaseModel):
    """Rejects unknown fields, so that a misspelt one is not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldErrorJson(ResponseJson):
    where: str
    what: str


class ProblemJson(ResponseJson):
    """A problem document (RFC 9457). `code` is stable; `title` is in the caller's language."""

    type: str
    code: str
    status: int
    title: str
    detail: str | None = None
    errors: list[FieldErrorJson] | None = None
    limit: Annotated[
        str | None, Field(description="With `queue_full`, the setting that was reached.")
    ] = None
    maximum: Annotated[
        int | None, Field(description="With `queue_full` and `quota_exceeded`, the limit.")
    ] = None
    waiting: Annotated[
        int | None, Field(description="With `queue_full`, the number of waiting documents.")
    ] = None
    stored_bytes: Annotated[
        int | None, Field(description="With `quota_exceeded`, the bytes of stored documents.")
    ] = None
    customer: Annotated[
        str | None,
        Field(description="With `queue_full` and `quota_exceeded`, the customer of the limit."),
    ] = None


class ProgressJson(ResponseJson):
    done: float
    total: float | None


_ANNOTATED = {wire.TIMESTAMP: Timestamp, wire.PRIORITY: Priority, wire.PROGRESS: ProgressJson}


def json_model(
    name: str,
    description: str,
    fields: Iterable[wire.JsonField],
    base: type[ResponseJson] = ResponseJson,
) -> Any:
    """Return a model with the given list of fields."""
    members: dict[str, Any] = {}
    for field in fields:
        plain = _ANNOTATED.get(field.type, field.type.schema)
        about = Field(description=field.description) if field.description else Field()
        members[field.name] = (Annotated[plain | None if field.optional else plain, about], ...)
    return create_model(name, __base__=base, __doc__=description, **members)


ReceiptJson = json_model("ReceiptJson", "The response to a submission.", wire.RECEIPT)


class DocumentsAheadJson(ResponseJson):
    """The documents ahead, by reason."""

    better_levels: int
    other_turns: int
    longest_waiting: int
    own: int


class PositionJson(ResponseJson):
    """The queue position: the number of documents ahead, between `least` and `most`."""

    least: int
    most: int
    before: DocumentsAheadJson
    reached: Annotated[
        bool, Field(description="False if its customer's limit blocks it before its turn.")
    ]
    causes: Annotated[list[Cause], Field(description="Why `least` and `most` differ.")]

    @staticmethod
    def of(position: Position) -> "PositionJson":
        return PositionJson(
            **position.bounds._asdict(),
            before=DocumentsAheadJson(**position.before._asdict()),
            reached=position.reached,
            causes=list(position.causes),
        )


class ForecastJson(ResponseJson):
    """The prediction interval of the start; `latest_at` is null if there is no upper estimate."""

    earliest_at: Timestamp
    latest_at: Timestamp | None


class ReasonJson(ResponseJson):
    code: str
    parameters: dict[str, Any]


class ExplanationJson(ResponseJson):
    """Why the document is in its state: reasons as codes, and as sentences."""

    at: Timestamp
    language: str
    position: PositionJson | None
    forecast: ForecastJson | None
    reasons: list[ReasonJson]
    sentences: list[str]

    @staticmethod
    def of(explained: Explanation, language: str) -> "ExplanationJson":
        position, forecast = explained.position, explained.forecast
        return ExplanationJson(
            at=explained.at_us,
            language=language,
            position=None if position is None else PositionJson.of(position),
            forecast=None
            if forecast is None
            else ForecastJson(earliest_at=forecast.earliest_at_us, latest_at=forecast.latest_at_us),
            reasons=[
                ReasonJson(code=reason.code.value, parameters=dict(reason.parameters))
                for reason in explained.reasons
            ],
            sentences=tell(explained, language),
        )


DocumentJson = json_model("DocumentJson", "A document and its current state.", wire.DOCUMENT)


class ExplainedDocumentJson(DocumentJson):  # type: ignore[misc, valid-type]  # a model made from a list
    """A document with its explanation, if requested."""

    result_file_bytes: Annotated[
        int | None, Field(description="Size of the result file of a completed document, if any.")
    ]
    explanation: ExplanationJson | None


AttemptJson = json_model(
    "AttemptJson",
    "An attempt that failed, lost its lease or ended a step that is not the last.",
    wire.ATTEMPT,
)


class AttemptsJson(ResponseJson):
    """The stored attempts of a document, oldest first."""

    attempts: list[AttemptJson]  # type: ignore[valid-type]


class DocumentsJson(ResponseJson):
    """A page of documents, newest first. Pass `next` as `after` to request the next page."""

    documents: list[DocumentJson]  # type: ignore[valid-type]
    next: str | None


class DocumentStateJson(ResponseJson):
    """The state of the document afterwards."""

    id: str
    state: State


CustomerSummaryJson = json_model(
    "CustomerSummaryJson", "The state of a customer.", wire.CUSTOMER_SUMMARY
)


class IdentityJson(ResponseJson):
    """The role of the access key, and the state of its customer."""

    role: Role
    key: str | None
    key_name: str | None
    customer: CustomerSummaryJson | None  # type: ignore[valid-type]
    version: Annotated[str, Field(description="The version of the service.")]


CustomerJson = json_model(
    "CustomerJson",
    "A customer as operators see it: its state and its settings.",
    (*wire.CUSTOMER_SUMMARY, *wire.CUSTOMER_SETTINGS, *wire.CUSTOMER),
)


def customer_json(customer: model.Customer, rule: Rule, now: int) -> dict[str, Any]:
    """Return the fields of `CustomerJson`."""
    return {
        **wire.to_json(wire.CUSTOMER, customer),
        **wire.to_json(wire.CUSTOMER_SUMMARY, model.CustomerSummary.of(customer, rule, now)),
        **wire.to_json(wire.CUSTOMER_SETTINGS, customer.settings),
    }


class CustomersJson(ResponseJson):
    """A page of customers, ordered by name."""

    customers: list[CustomerJson]  # type: ignore[valid-type]
    next: str | None


KindJson = json_model(
    "KindJson",
    "A kind of work: its settings, its documents and its workers.",
    (*wire.KIND, *wire.KIND_SETTINGS),
)


def kind_json(kind: model.Kind) -> dict[str, Any]:
    """Return the fields of `KindJson`."""
    return {**wire.to_json(wire.KIND, kind), **wire.to_json(wire.KIND_SETTINGS, kind.settings)}


class KindsJson(ResponseJson):
    """All kinds of work, ordered by name."""

    kinds: list[KindJson]  # type: ignore[valid-type]


OutageJson = json_model("OutageJson", "A service that holds kinds of work.", wire.OUTAGE)


class OutagesJson(ResponseJson):
    """The services that hold kinds of work, or that work resumes from, ordered by name."""

    outages: list[OutageJson]  # type: ignore[valid-type]


_Summary = json_model("_Summary", "The counters of the queue.", wire.SUMMARY)


class SummaryJson(_Summary):  # type: ignore[misc, valid-type]  # a model made from a list
    """The counters of the queue."""

    workers: Annotated[int, Field(description="Workers with a recent heartbeat.")]
    oldest_waiting_since_at: Timestamp | None


class WorkerJson(ResponseJson):
    name: str
    seen_at: Timestamp
    slots: Annotated[int, Field(description="Documents that it can run at the same time.")]
    alive: bool
    kinds: Annotated[
        list[str] | None, Field(description="The kinds of work that it serves; null: every kind.")
    ]


class WorkersJson(ResponseJson):
    workers: list[WorkerJson]


class BulkResultJson(ResponseJson):
    """The result of a bulk action, or of its dry run."""

    matched: Annotated[int, Field(description="Matching documents, up to the limit per request.")]
    changed: int
    more: Annotated[bool, Field(description="Whether more documents match: repeat the request.")]
    dry_run: bool
