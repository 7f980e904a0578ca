"""Filters for listing documents, as callers pass them.

`FILTERS` has each filter once. The parameters of requests and their OpenAPI description, the
options of commands, the client and the filters of the page derive from it.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, TypedDict

from fairturn.clock import as_timestamp
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    KIND_BYTES_MAX,
    KINDS_MAX,
    NAME_BYTES_MAX,
    PAGE_MAX,
    TAG_BYTES_MAX,
    TAGS_MAX,
    Filter,
    State,
)
from fairturn.priority import LEVELS
from fairturn.validation import text
from fairturn.validation.submission import tags_json
from fairturn.wire import IDS_MAX


class Filters(TypedDict, total=False):
    """Criteria for listing documents; an omitted one matches everything."""

    customer: str | None
    states: State | str | Iterable[State | str] | None
    priorities: int | Iterable[int] | None
    name: str | None
    name_part: str | None
    submitted_from: datetime | int | None
    submitted_before: datetime | int | None
    ids: Iterable[str] | None
    tags: str | Iterable[str] | None
    kinds: str | Iterable[str] | None


class FilterType(StrEnum):
    """The type of a filter's value: how requests, commands and the page write it."""

    CUSTOMER = "customer"
    TEXT = "text"
    STATE = "state"
    PRIORITY = "priority"
    TIMESTAMP = "timestamp"
    ID = "id"


class FilterDefinition(NamedTuple):
    """One filter, in Python and as a parameter."""

    name: str  # in `Filters` and `Filter`
    parameter: str  # of requests; its option is `--PARAMETER`, with hyphens
    type: FilterType
    check: Callable[[Any], Any]  # converts a value of `Filters` to that of `Filter`
    description: str  # without the full stop
    several: str = ""  # if several values are accepted: "one" or "all" of them must match
    values_max: int | None = None  # per request
    bytes_max: int | None = None  # of a text
    is_option: bool = True  # whether commands have it
    on_page: str = ""  # its parameter on the page, with the label `filter_PARAMETER`; "": none


def to_filter(filters: Filters) -> Filter:
    """Validate filters and return them as stores accept them. A wrong value raises an error instead
    of matching nothing."""
    unknown = filters.keys() - Filters.__annotations__.keys()
    if unknown:
        known = ", ".join(Filters.__annotations__)
        raise TypeError(f"unknown filter: {', '.join(sorted(unknown))}; the filters are: {known}")
    given = {name: value for name, value in filters.items() if value is not None}
    checked = {each.name: each.check(given[each.name]) for each in FILTERS if each.name in given}
    return Filter(**checked)


def _customer(customer: str) -> str:
    return text.identity(customer, "customer", CUSTOMER_BYTES_MAX)


def _name(name: str) -> str:
    """Convert a name as `submission.py` does before it is stored."""
    return text.description(name, NAME_BYTES_MAX)


def _name_part(part: str) -> str | None:
    return _name(part) if part else None


def _states(states: State | str | Iterable[State | str]) -> tuple[State, ...]:
    wanted = [states] if isinstance(states, str) else list(states)
    for state in wanted:
        if state not in list(State):
            raise ValueError(f"{state!r} is not a state; the states are: {', '.join(State)}")
    return tuple(State(state) for state in wanted)


def _priorities(priorities: int | Iterable[int]) -> tuple[int, ...]:
    wanted = (priorities,) if isinstance(priorities, int) else tuple(priorities)
    for priority in wanted:
        if priority not in range(1, LEVELS + 1):
            raise ValueError(f"{priority!r} is not a priority; priorities are 1 to {LEVELS}")
    return wanted


def _ids(wanted: Iterable[str]) -> tuple[str, ...]:
    found = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    if len(found) > PAGE_MAX:
        raise ValueError(f"{len(found):,} ids were given; at most {PAGE_MAX:,} are allowed")
    return found


def _tags(wanted: str | Iterable[str]) -> tuple[str, ...] | None:
    encoded = tags_json([wanted] if isinstance(wanted, str) else wanted)
    return tuple(json.loads(encoded)) if encoded else None


def _kinds(wanted: str | Iterable[str]) -> tuple[str, ...]:
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    return tuple(text.kind_name(name) for name in names)


# In the order of parameters, options and fields of the page.
FILTERS = (
    FilterDefinition(
        "customer",
        "customer",
        FilterType.CUSTOMER,
        _customer,
        "Only of this customer",
        bytes_max=CUSTOMER_BYTES_MAX,
        on_page="customer",
    ),
    FilterDefinition(
        "name",
        "name",
        FilterType.TEXT,
        _name,
        "Only with exactly this name",
        bytes_max=NAME_BYTES_MAX,
    ),
    FilterDefinition(
        "name_part",
        "name_part",
        FilterType.TEXT,
        _name_part,
        "Only with this text in the name, ignoring case",
        bytes_max=NAME_BYTES_MAX,
        is_option=False,
        on_page="name",
    ),
    FilterDefinition(
        "tags",
        "tag",
        FilterType.TEXT,
        _tags,
        "Only with this tag",
        several="all",
        values_max=TAGS_MAX,
        bytes_max=TAG_BYTES_MAX,
        on_page="tag",
    ),
    FilterDefinition(
        "kinds",
        "kind",
        FilterType.TEXT,
        _kinds,
        "Only of this kind of work",
        several="one",
        values_max=KINDS_MAX,
        bytes_max=KIND_BYTES_MAX,
        on_page="kind",
    ),
    FilterDefinition(
        "states",
        "state",
        FilterType.STATE,
        _states,
        "Only in this state",
        several="one",
        on_page="state",
    ),
    FilterDefinition(
        "priorities",
        "priority",
        FilterType.PRIORITY,
        _priorities,
        "Only of this priority",
        several="one",
        on_page="priority",
    ),
    FilterDefinition(
        "submitted_from",
        "submitted_from",
        FilterType.TIMESTAMP,
        partial(as_timestamp, what="submitted_from"),
        "Only submitted at or after this time",
        on_page="submitted_from",
    ),
    FilterDefinition(
        "submitted_before",
        "submitted_before",
        FilterType.TIMESTAMP,
        partial(as_timestamp, what="submitted_before"),
        "Only submitted before this time",
        on_page="submitted_before",
    ),
    FilterDefinition(
        "ids",
        "id",
        FilterType.ID,
        _ids,
        "Only with this id",
        several="one",
        values_max=IDS_MAX,
        is_option=False,
    ),
)


def page_size(size: int) -> int:
    """Return the size; raise `ValueError` if it is out of range."""
    if not 1 <= size <= PAGE_MAX:
        raise ValueError(f"size is {size}; it must be from 1 to {PAGE_MAX:,}")
    return size
