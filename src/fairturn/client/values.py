"""The service's JSON as the values of the queue. A field that a newer service has added is passed
over."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from fairturn.access.keys import AccessKey, Role
from fairturn.access.registry import NewKey
from fairturn.explain.analysis import Explanation
from fairturn.explain.reasons import Code, Reason, Value
from fairturn.explain.snapshot import Between
from fairturn.model import (
    SETTING_NAMES,
    Customer,
    CustomerPage,
    CustomerSettings,
    Document,
    Kind,
    Page,
    Progress,
    Receipt,
    Settings,
    State,
    Summary,
)
from fairturn.priority import Reset, Rule
from fairturn.scheduling.flows import COST_ONE
from fairturn.scheduling.forecast import Forecast
from fairturn.scheduling.position import Cause, Position
from fairturn.scheduling.position.closed_form import Before

Json = Mapping[str, Any]


class Standing(NamedTuple):
    """Where a customer stands. After `resets_at` the count is 0, if nothing comes in."""

    name: str
    count: int  # type: ignore[assignment]  # the rule's word; nobody counts a tuple's items
    priority_of_next: int
    resets_at: int | None
    waiting: int
    waiting_by_priority: tuple[int, ...]
    running: int
    delayed: int


class Me(NamedTuple):
    """Who the access key says that one is."""

    role: Role
    key_id: str | None
    key_name: str | None
    customer: Standing | None  # of a customer's key: whose it is


def me_of(value: Json) -> Me:
    standing = value["customer"]
    return Me(
        role=Role(value["role"]),
        key_id=value["key"],
        key_name=value["key_name"],
        customer=None if standing is None else _standing_of(standing),
    )


def _standing_of(value: Json) -> Standing:
    known = {name: value[name] for name in Standing._fields}
    known["waiting_by_priority"] = tuple(known["waiting_by_priority"])
    return Standing(**known)


def receipt_of(value: Json, *, repeated: bool) -> Receipt:
    return Receipt(
        id=value["id"],
        customer=value["customer"],
        count=value["count"],
        priority=value["priority"],
        submitted_at=value["submitted_at"],
        repeated=repeated,
    )


def document_of(value: Json) -> Document:
    """A document. Where it lies in the store (`order`, `content_name`) is not told to anybody."""
    metadata, sha256, progress = value["metadata"], value["sha256"], value["progress"]
    return Document(
        id=value["id"],
        customer=value["customer"],
        state=State(value["state"]),
        priority=value["priority"],
        count=value["count"],
        submitted_at=value["submitted_at"],
        due_at=value["due_at"],
        order=None,
        attempts=value["attempts"],
        claimed_at=value["claimed_at"],
        ended_at=value["ended_at"],
        worker=value["worker"],
        error=value["error"],
        cancel_requested=value["cancel_requested"],
        cost=_millionths(value["cost"]),
        kind=Kind(value["kind"]),
        size_bytes=value["size_bytes"],
        sha256=None if sha256 is None else bytes.fromhex(sha256),
        content_name=None,
        name=value["name"],
        metadata_json=json.dumps(metadata, separators=(",", ":")) if metadata else None,
        parent=value["parent"],
        real_cost=_millionths(value["real_cost"]),
        progress=None if progress is None else Progress(progress["done"], progress["total"]),
    )


def _millionths(cost: float | None) -> int | None:
    return None if cost is None else round(cost * COST_ONE)


def page_of(value: Json) -> Page:
    return Page([document_of(each) for each in value["documents"]], value["next"])


def explanation_of(value: Json) -> Explanation:
    """The explanation of a document, which comes along. Whose turns are before it is not told by
    numbers of the store, as `Position.turns` has them; the reasons name whom they may."""
    explained = value["explanation"]
    position, forecast = explained["position"], explained["forecast"]
    return Explanation(
        id=value["id"],
        at=explained["at"],
        state=State(value["state"]),
        priority=value["priority"],
        count=value["count"],
        position=None if position is None else _position_of(position),
        forecast=None
        if forecast is None
        else Forecast(earliest_at=forecast["earliest_at"], latest_at=forecast["latest_at"]),
        reasons=tuple(
            Reason(
                Code(each["code"]),
                {name: _value_of(given) for name, given in each["parameters"].items()},
            )
            for each in explained["reasons"]
            if each["code"] in list(Code)  # a newer service may know more of them
        ),
    )


def _position_of(value: Json) -> Position:
    before = value["before"]
    return Position(
        bounds=Between(value["least"], value["most"]),
        before=Before(**{name: before[name] for name in Before._fields}),
        reached=value["reached"],
        turns={},
        causes=tuple(Cause(each) for each in value["causes"] if each in list(Cause)),
    )


def _value_of(given: Any) -> Value:
    """JSON knows no tuples: customers with their numbers come as lists."""
    if isinstance(given, list):
        return tuple((name, n) for name, n in given)
    value: Value = given
    return value


def customer_of(value: Json) -> Customer:
    return Customer(
        name=value["name"],
        settings=CustomerSettings(
            weight=value["weight"], limit=value["limit"], paused=value["paused"]
        ),
        count=value["count"],
        count_updated_at=value["count_updated_at"],
        waiting=value["waiting"],
        waiting_by_priority=tuple(value["waiting_by_priority"]),
        running=value["running"],
        delayed=value["delayed"],
    )


def customers_of(value: Json) -> CustomerPage:
    return CustomerPage([customer_of(each) for each in value["customers"]], value["next"])


def summary_of(value: Json) -> Summary:
    known = {field.name: value[field.name] for field in fields(Summary)}
    return Summary(**{**known, "waiting_by_priority": tuple(value["waiting_by_priority"])})


def settings_of(value: Json) -> Settings:
    return Settings(**{name: value[name] for name in SETTING_NAMES})


def rule_of(value: Json) -> Rule:
    return Rule(
        bounds=tuple(value["bounds"]),
        reset_interval_us=round(value["reset_interval_s"] * 1_000_000),
        reset=Reset(value["reset"]),
    )


def key_of(value: Json) -> AccessKey:
    """A key without the hash of its secret, which nobody is told."""
    return AccessKey(
        id=value["id"],
        role=Role(value["role"]),
        customer=value["customer"],
        name=value["name"],
        digest=b"",
        made_at=value["made_at"],
        used_at=value["used_at"],
        ends_at=value["ends_at"],
    )


def new_key_of(value: Json) -> NewKey:
    return NewKey(key_of(value), value["shown"])
