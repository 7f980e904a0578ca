"""The JSON of documents and other entities, and the constants of HTTP requests.

Each entity has one list of fields. The service and its OpenAPI description, the clients, the
command line (`--json`) and the CSV export derive from it: a field that is added here appears in all
of them. The parameters, options and lines of JSON that state a submission derive from `SUBMISSION`.
Timestamps are integers of microseconds since 1970 UTC.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fairturn.access.keys import Role
from fairturn.model import (
    ENDED,
    KIND_BYTES_MAX,
    NAME_BYTES_MAX,
    AttemptOutcome,
    BodyType,
    Progress,
    State,
)
from fairturn.scheduling.flows import COST_ONE

JSON, LINES = "application/json", "application/x-ndjson"
BINARY, PROBLEM = "application/octet-stream", "application/problem+json"

IDEMPOTENCY_KEY = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"  # header of a response: the key was known

JSON_BYTES_MAX = 1_048_576  # of a payload or a request; a larger body must be content
BATCH_BYTES_MAX = 32 * 1_048_576
IDS_MAX = 500  # in the query of a list: a request line has to fit into the server's buffer
WAIT_S_MAX = 60.0  # of a long poll


@dataclass(frozen=True, slots=True, eq=False)
class FieldType:
    """How a field is converted. None converts to None and is never passed to these functions."""

    schema: Any  # the type in the OpenAPI description
    encode: Callable[[Any], Any] | None = None  # from the Python value; None: as it is
    decode: Callable[[Any], Any] | None = None  # from JSON


class JsonField(NamedTuple):
    """One field of an entity."""

    name: str  # in JSON and CSV
    attribute: str  # of the Python value
    type: FieldType
    optional: bool = False  # may be None
    description: str = ""
    in_csv: bool = False
    operators_only: bool = False  # None in the responses for customers


def _json_or_none(value: Any) -> str | None:
    return json.dumps(value, separators=(",", ":")) if value else None


def _progress(value: Mapping[str, Any]) -> Progress:
    return Progress(value["done"], value["total"])


TEXT, INTEGER, NUMBER, BOOLEAN = map(FieldType, (str, int, float, bool))
DOCUMENT_ID = FieldType(str)
TIMESTAMP = FieldType(int)
SECONDS = FieldType(float)
PRIORITY = FieldType(int)
STATE = FieldType(State, decode=State)
BODY_TYPE = FieldType(BodyType, decode=BodyType)
ROLE = FieldType(Role, decode=Role)
COST = FieldType(float, lambda cost: cost / COST_ONE, lambda cost: round(cost * COST_ONE))
HEX = FieldType(str, bytes.hex, bytes.fromhex)
METADATA = FieldType(dict[str, Any], decode=_json_or_none)
PROGRESS = FieldType(dict[str, float | None], Progress._asdict, _progress)
INTEGERS = FieldType(list[int], list, tuple)
TEXTS = FieldType(list[str], list, _json_or_none)
NAMES = FieldType(list[str], list, tuple)
ATTEMPT_OUTCOME = FieldType(AttemptOutcome, decode=AttemptOutcome)
JSON_OBJECT = FieldType(dict, json.loads)
JSON_ARRAY = FieldType(list, json.loads)


def _field(name: str, type: FieldType, attribute: str = "", **more: Any) -> JsonField:
    """A field whose attribute has its name; timestamps are integers in `NAME_us`."""
    return JsonField(name, attribute or (f"{name}_us" if type is TIMESTAMP else name), type, **more)


_FOR_OPERATORS = "Only for operators and readers."
DOCUMENT = (
    _field("id", TEXT, in_csv=True),
    _field("customer", TEXT, in_csv=True),
    _field("state", STATE, in_csv=True),
    _field("priority", PRIORITY, in_csv=True),
    _field("count", INTEGER, in_csv=True),
    _field("name", TEXT, optional=True, in_csv=True),
    _field("body_type", BODY_TYPE),
    _field("size_bytes", INTEGER, in_csv=True),
    _field("sha256", HEX, optional=True),
    _field("metadata", METADATA),
    _field("tags", TEXTS, in_csv=True),
    _field("parent", TEXT, optional=True),
    _field("submitted_at", TIMESTAMP, in_csv=True),
    _field("due_at", TIMESTAMP, optional=True, in_csv=True),
    _field("claimed_at", TIMESTAMP, optional=True, in_csv=True),
    _field("ended_at", TIMESTAMP, optional=True, in_csv=True),
    _field("attempts", INTEGER, in_csv=True),
    _field(
        "worker",
        TEXT,
        optional=True,
        in_csv=True,
        operators_only=True,
        description=_FOR_OPERATORS,
    ),
    _field("error", TEXT, optional=True, in_csv=True),
    _field("kind", TEXT, in_csv=True),  # last in CSV: programs may read its columns by position
    _field("step", INTEGER, description="The number of its finished steps."),
    _field(
        "expires_at",
        TIMESTAMP,
        optional=True,
        description="It expires unless an attempt of its first step has begun before.",
    ),
    _field("cancel_requested", BOOLEAN),
    _field("cost", COST, optional=True),
    _field("real_cost", COST, optional=True),
    _field("progress", PROGRESS, optional=True),
)
ATTEMPT = (
    _field("step", INTEGER, description="From 0."),
    _field("kind", TEXT),
    _field("attempt", INTEGER, description="Its number in the step, from 1."),
    _field("worker", TEXT, optional=True, operators_only=True, description=_FOR_OPERATORS),
    _field("claimed_at", TIMESTAMP),
    _field("ended_at", TIMESTAMP),
    _field("outcome", ATTEMPT_OUTCOME),
    _field("error", TEXT, optional=True),
    _field(
        "details",
        TEXT,
        optional=True,
        operators_only=True,
        description=f"The end of the traceback and the output. {_FOR_OPERATORS}",
    ),
    _field(
        "value",
        TEXT,
        optional=True,
        operators_only=True,
        description=f"The value of the step as JSON text, if requested. {_FOR_OPERATORS}",
    ),
)
OUTAGE = (
    _field(
        "service",
        TEXT,
        description="Its name, or `kind:NAME` if only the kind of work that needs it is known.",
    ),
    _field("kinds", NAMES, description="The kinds of work that need it."),
    _field("began_at", TIMESTAMP, description="When it was first reported as unavailable."),
    _field("error", TEXT, description="The last report."),
    _field("probes", INTEGER, description="Attempts that found it unavailable since the hold."),
    _field("probe_at", TIMESTAMP, description="When the next document is tried."),
    _field(
        "resumed_at",
        TIMESTAMP,
        optional=True,
        description="Since when work resumes step by step; null: its kinds are held.",
    ),
)
RECEIPT = (
    _field("id", TEXT),
    _field("customer", TEXT),
    _field("count", INTEGER),
    _field("priority", PRIORITY),
    _field("submitted_at", TIMESTAMP),
)
ACCESS_KEY = (
    _field("id", TEXT),
    _field("role", ROLE),
    _field("customer", TEXT, optional=True),
    _field("name", TEXT),
    _field("made_at", TIMESTAMP),
    _field("used_at", TIMESTAMP, optional=True),
    _field("ends_at", TIMESTAMP, optional=True),
)
# The settings of a customer are in `Customer.settings`.
CUSTOMER_SETTINGS = (
    _field("weight", NUMBER),
    _field("limit", INTEGER, optional=True),
    _field("paused", BOOLEAN),
    _field(
        "bytes_max",
        INTEGER,
        optional=True,
        description="Maximum size of its stored documents, in bytes; "
        "null: `bytes_per_customer_max`.",
    ),
)
_CUSTOMER_COUNTERS = (
    _field("name", TEXT),
    _field("count", INTEGER, description="The pending documents count."),
    _field("waiting", INTEGER),
    _field("waiting_by_priority", INTEGERS),
    _field("running", INTEGER),
    _field("delayed", INTEGER),
)
CUSTOMER = (
    *_CUSTOMER_COUNTERS,
    _field("stored_bytes", INTEGER, description="Of its documents, until they are pruned."),
    _field(
        "count_updated_at", TIMESTAMP, optional=True, description="When the count changed last."
    ),
)
CUSTOMER_SUMMARY = (
    *_CUSTOMER_COUNTERS,
    _field("priority_of_next", PRIORITY, description="Of a document submitted now."),
    _field(
        "resets_at",
        TIMESTAMP,
        optional=True,
        description="The count is 0 after this time, unless a document is submitted before.",
    ),
)
KIND_SETTINGS = (
    _field("limit", INTEGER, optional=True, description="Of running documents; null: no limit."),
    _field("paused", BOOLEAN),
    _field("attempts_max", INTEGER, optional=True, description="null: that of the queue."),
    _field(
        "expires_in_s",
        SECONDS,
        optional=True,
        description="After what time its documents expire, from when they are due, if they were "
        "submitted without an expiry; null: never.",
    ),
)
# Its settings are in `Kind.settings`.
KIND = (
    _field("name", TEXT),
    _field("waiting", INTEGER),
    _field("running", INTEGER),
    _field("workers", INTEGER, description="Live workers that serve it."),
)
SUMMARY = (
    _field("waiting", INTEGER),
    _field("waiting_by_priority", INTEGERS),
    _field("delayed", INTEGER),
    _field("running", INTEGER),
    _field("started", INTEGER, description="Attempts started since the queue was created."),
    *(
        _field(
            state.value,
            INTEGER,
            description=f"Documents that became {state} since then, counted each time.",
        )
        for state in ENDED
    ),
    _field(
        "retried",
        INTEGER,
        description="Attempts that failed or lost their lease, and were followed by another.",
    ),
    _field("repairs", INTEGER, description="Counters and flows that claims have corrected."),
)


class SubmissionField(NamedTuple):
    """One field of a submission: a keyword of `submit`, an option of `fairturn submit`, a parameter
    of a request, a part of a form, and a key in a line of JSON."""

    name: str
    type: FieldType
    description: str  # without the full stop
    option: str = ""  # `--OPTION`, if it is not the name
    bytes_max: int | None = None  # of a text


# What a submission states beside its customer, its key and its body.
SUBMISSION = (
    SubmissionField(
        "name",
        TEXT,
        "Its name, for display; by default that of the file",
        bytes_max=NAME_BYTES_MAX,
    ),
    SubmissionField("cost", COST, "Its cost, if the setting costs of the queue is known"),
    SubmissionField("metadata", JSON_OBJECT, "Metadata of the document, as keys and values"),
    SubmissionField("tags", JSON_ARRAY, "Tags for filtering", option="tag"),
    SubmissionField("due_at", TIMESTAMP, "Its earliest start"),
    SubmissionField("expires_at", TIMESTAMP, "When it expires unless it has started"),
    SubmissionField(
        "expires_in_s",
        SECONDS,
        "After what time it expires unless it has started, instead of a timestamp",
        option="expires-in",
    ),
    SubmissionField("kind", TEXT, "The kind of work that it waits for", bytes_max=KIND_BYTES_MAX),
    SubmissionField("parent", DOCUMENT_ID, "The id of the document that it derives from"),
)


def submission_to_json(described: Any) -> dict[str, Any]:
    """Return the fields of a validated submission that are set, as a JSON object."""
    found = {}
    for name, type, *_ in SUBMISSION:
        plain = getattr(described, name)
        if plain is not None:
            found[name] = plain if type.encode is None else type.encode(plain)
    return found


def to_json(
    fields: Iterable[JsonField], value: Any, *, for_customer: bool = False
) -> dict[str, Any]:
    """Return the fields of a value as a JSON object."""
    found = {}
    for name, attribute, type, _, _, _, operators_only in fields:
        plain = None if for_customer and operators_only else getattr(value, attribute)
        found[name] = plain if plain is None or type.encode is None else type.encode(plain)
    return found


def from_json(fields: Iterable[JsonField], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a value, from a JSON object. Unknown keys are ignored: a newer
    service may send more. Raises `TypeError` for a value of another type."""
    found = {}
    for field in fields:
        plain, decode = value[field.name], field.type.decode
        if decode is None and plain is not None and not _is_a(field.type.schema, plain):
            raise TypeError(f"{field.name} is {plain!r}; it must be of type {field.type.schema}")
        # Objects and lists are stored as JSON text, in `NAME_json`.
        attribute = f"{field.attribute}_json" if decode is _json_or_none else field.attribute
        found[attribute] = plain if plain is None or decode is None else decode(plain)
    return found


def _is_a(kind: Any, plain: Any) -> bool:
    """Return whether a JSON value has a plain type; bool is no number, and an int is a float."""
    if kind is bool or isinstance(plain, bool):
        return kind is bool and isinstance(plain, bool)
    return isinstance(plain, int | float if kind is float else kind)
