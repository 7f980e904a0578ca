"""Events as text, and what a store adds to them that counts running documents only for some."""

import json
from collections.abc import Iterable
from typing import Any

from fairturn.scheduling.flows import (
    Arrived,
    Changed,
    Counted,
    Ended,
    Event,
    Finished,
    Left,
    Purged,
    Recorded,
    Resumed,
    Returned,
)
from fairturn.validation.text import compact_json

# The position is the code in the database: append, never reorder.
_EVENTS: tuple[type[Any], ...] = (
    Arrived,
    Left,
    Ended,
    Finished,
    Returned,
    Changed,
    Purged,
    Resumed,
)
_EVENT_CODES = {kind: code for code, kind in enumerate(_EVENTS)}


def encode_events(events: Iterable[Event]) -> str | None:
    """Events as a JSON array; None if there are none."""
    encoded = [(_EVENT_CODES[type(event)], *event) for event in events]
    return compact_json(encoded) if encoded else None


def decode_events(text: str) -> tuple[Event, ...]:
    """The events that were encoded."""
    return tuple(_EVENTS[code](*rest) for code, *rest in json.loads(text))


def with_counts(recorded: list[Recorded], running: dict[int, dict[int, int]]) -> list[Recorded]:
    """What was recorded, with a count before each limit that one of these customers got. Given is
    what runs now, in each level; from there it goes back over what ended."""
    counted = []
    for at, events in reversed(recorded):
        backwards: list[Event] = []
        for event in reversed(events):
            backwards.append(event)
            if event.customer not in running:
                continue
            now = running[event.customer]
            if isinstance(event, Ended | Finished | Returned):
                ended = event.n if isinstance(event, Ended) else 1
                now[event.level] = now.get(event.level, 0) + ended
            elif type(event) is Changed and event.limit is not None:
                backwards.append(Counted(event.customer, dict(now)))
        counted.append(Recorded(at, tuple(reversed(backwards))))
    return counted[::-1]
