"""The service's JSON as the values of the queue. Fields that a newer service adds are ignored."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from fairturn.access.keys import AccessKey, Role
from fairturn.access.registry import NewKey
from fairturn.clock import SECOND_US
from fairturn.explain.analysis import Explanation
from fairturn.explain.reasons import Code, Reason
from fairturn.explain.snapshot import CountRange
from fairturn.model import (
    SETTING_NAMES,
    AttemptRecord,
    Customer,
    CustomerPage,
    CustomerSettings,
    CustomerSummary,
    Document,
    Kind,
    KindSettings,
    Page,
    Receipt,
    ServiceOutage,
    Settings,
    State,
    Summary,
)
from fairturn.priority import Reset, Rule
from fairturn.scheduling.forecast import Forecast
from fairturn.scheduling.position import Cause, Position
from fairturn.scheduling.position.closed_form import DocumentsAhead
from fairturn.wire import (
    ACCESS_KEY,
    ATTEMPT,
    CUSTOMER,
    CUSTOMER_SETTINGS,
    CUSTOMER_SUMMARY,
    DOCUMENT,
    KIND,
    KIND_SETTINGS,
    OUTAGE,
    RECEIPT,
    from_json,
)

Json = Mapping[str, Any]


class Identity(NamedTuple):
    """The identity behind an access key; `customer` is None unless it is a customer's key."""

    role: Role
    key_id: str | None
    key_name: str | None
    customer: CustomerSummary | None


def identity_of(value: Json) -> Identity:
    customer = value["customer"]
    return Identity(
        role=Role(value["role"]),
        key_id=value["key"],
        key_name=value["key_name"],
        customer=None
        if customer is None
        else CustomerSummary(**from_json(CUSTOMER_SUMMARY, customer)),
    )


def receipt_of(value: Json, *, replayed: bool) -> Receipt:
    return Receipt(**from_json(RECEIPT, value), replayed=replayed)


def document_of(value: Json) -> Document:
    """A document without `order` and `content_name`, which the service does not expose."""
    return Document(**from_json(DOCUMENT, value), order=None, content_name=None)


def page_of(value: Json, after: str | None) -> Page:
    return Page([document_of(each) for each in value["documents"]], _next_of(value, after))


def explanation_of(value: Json) -> Explanation:
    """The explanation inside a document. `Position.turns` is empty: it has keys of the store."""
    explained = value["explanation"]
    position, forecast = explained["position"], explained["forecast"]
    return Explanation(
        id=value["id"],
        at_us=explained["at"],
        state=State(value["state"]),
        priority=value["priority"],
        count=value["count"],
        position=None if position is None else _position_of(position),
        forecast=None
        if forecast is None
        else Forecast(earliest_at_us=forecast["earliest_at"], latest_at_us=forecast["latest_at"]),
        reasons=tuple(
            Reason(Code(each["code"]), {n: _tuples(v) for n, v in each["parameters"].items()})
            for each in explained["reasons"]
            if each["code"] in list(Code)  # a newer service may have more
        ),
    )


def _position_of(value: Json) -> Position:
    return Position(
        bounds=CountRange(value["least"], value["most"]),
        before=DocumentsAhead(**_pick(value["before"], DocumentsAhead._fields)),
        reached=value["reached"],
        turns={},
        causes=tuple(Cause(each) for each in value["causes"] if each in list(Cause)),
    )


def customer_of(value: Json) -> Customer:
    return Customer(
        settings=CustomerSettings(**from_json(CUSTOMER_SETTINGS, value)),
        **from_json(CUSTOMER, value),
    )


def customers_of(value: Json, after: str | None = None) -> CustomerPage:
    customers = [customer_of(each) for each in value["customers"]]
    return CustomerPage(customers, _next_of(value, after))


def kind_of(value: Json) -> Kind:
    return Kind(settings=KindSettings(**from_json(KIND_SETTINGS, value)), **from_json(KIND, value))


def kinds_of(value: Json) -> list[Kind]:
    return [kind_of(each) for each in value["kinds"]]


def attempts_of(value: Json) -> list[AttemptRecord]:
    """The attempts, without their files, which the service does not expose. With a customer's key,
    `worker` is empty."""
    return [attempt_of(each) for each in value["attempts"]]


def attempt_of(value: Json) -> AttemptRecord:
    found = from_json(ATTEMPT, value)
    return AttemptRecord(**{**found, "worker": found["worker"] or ""})


def outages_of(value: Json) -> list[ServiceOutage]:
    return [ServiceOutage(**from_json(OUTAGE, each)) for each in value["outages"]]


def summary_of(value: Json) -> Summary:
    return Summary(**_pick(value, (each.name for each in fields(Summary))))


def settings_of(value: Json) -> Settings:
    return Settings(**_pick(value, SETTING_NAMES))


def rule_of(value: Json) -> Rule:
    return Rule(
        bounds=tuple(value["bounds"]),
        reset_interval_us=round(value["reset_interval_s"] * SECOND_US),
        reset=Reset(value["reset"]),
    )


def key_of(value: Json) -> AccessKey:
    """An access key without the hash of its secret, which the service does not expose."""
    return AccessKey(**from_json(ACCESS_KEY, value), digest=b"")


def keys_of(value: Json, after: str | None) -> list[AccessKey]:
    keys = [key_of(each) for each in value["keys"]]
    for key in keys:
        if after is not None and key.id <= after:
            raise ValueError(f"the page after the key {after} contains the key {key.id}")
    return keys


def new_key_of(value: Json) -> NewKey:
    return NewKey(key_of(value), value["shown"])


def _next_of(value: Json, after: str | None) -> str | None:
    """The cursor of the next page. Raises `ValueError` for that of this page: callers that read all
    pages would not end."""
    cursor: str | None = value["next"]
    if cursor is not None and cursor == after:
        raise ValueError(f"the page after {after!r} has itself as its next page")
    return cursor


def _pick(value: Json, names: Iterable[str]) -> dict[str, Any]:
    return {name: _tuples(value[name]) for name in names}


def _tuples(value: Any) -> Any:
    """The value with tuples in place of lists, as the values of the queue have them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
