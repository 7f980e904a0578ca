"""Filters for listing documents, as callers pass them."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import TypedDict

from fairturn.clock import as_timestamp
from fairturn.model import CUSTOMER_BYTES_MAX, NAME_BYTES_MAX, PAGE_MAX, Filter, State
from fairturn.priority import LEVELS
from fairturn.validation import text
from fairturn.validation.submission import tags_json


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


# The filter that each parameter of a request and each option of a command sets.
PARAMETERS = {
    "customer": "customer",
    "state": "states",
    "priority": "priorities",
    "name": "name",
    "name_part": "name_part",
    "tag": "tags",
    "submitted_from": "submitted_from",
    "submitted_before": "submitted_before",
    "id": "ids",
}


def to_filter(filters: Filters) -> Filter:
    """Validate filters and return them as stores accept them. A wrong value raises an error instead
    of matching nothing."""
    unknown = filters.keys() - Filters.__annotations__.keys()
    if unknown:
        known = ", ".join(Filters.__annotations__)
        raise TypeError(f"unknown filter: {', '.join(sorted(unknown))}; the filters are: {known}")
    customer, name, part = filters.get("customer"), filters.get("name"), filters.get("name_part")
    submitted_from, before = filters.get("submitted_from"), filters.get("submitted_before")
    if customer is not None:
        text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
    return Filter(
        customer=customer,
        states=_states(filters.get("states")),
        priorities=_priorities(filters.get("priorities")),
        # Converted as names are when they are stored, in `submission.py`.
        name=None if name is None else text.description(name, NAME_BYTES_MAX),
        name_part=None if not part else text.description(part, NAME_BYTES_MAX),
        submitted_from=None
        if submitted_from is None
        else as_timestamp(submitted_from, "submitted_from"),
        submitted_before=None if before is None else as_timestamp(before, "submitted_before"),
        ids=_ids(filters.get("ids")),
        tags=_tags(filters.get("tags")),
    )


def _states(states: State | str | Iterable[State | str] | None) -> tuple[State, ...] | None:
    if states is None:
        return None
    wanted = [states] if isinstance(states, str) else list(states)
    for state in wanted:
        if state not in list(State):
            raise ValueError(f"{state!r} is not a state; the states are: {', '.join(State)}")
    return tuple(State(state) for state in wanted)


def _priorities(priorities: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if priorities is None:
        return None
    wanted = (priorities,) if isinstance(priorities, int) else tuple(priorities)
    for priority in wanted:
        if priority not in range(1, LEVELS + 1):
            raise ValueError(f"{priority!r} is not a priority; priorities are 1 to {LEVELS}")
    return wanted


def _ids(wanted: Iterable[str] | None) -> tuple[str, ...] | None:
    if wanted is None:
        return None
    found = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    if len(found) > PAGE_MAX:
        raise ValueError(f"{len(found):,} ids were given; at most {PAGE_MAX:,} are allowed")
    return found


def _tags(wanted: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if wanted is None:
        return None
    encoded = tags_json([wanted] if isinstance(wanted, str) else wanted)
    return tuple(json.loads(encoded)) if encoded else None


def page_size(size: int) -> int:
    """Return the size; raise `ValueError` if it is out of range."""
    if not 1 <= size <= PAGE_MAX:
        raise ValueError(f"size is {size}; it must be from 1 to {PAGE_MAX:,}")
    return size
