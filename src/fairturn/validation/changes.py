"""Changes to the settings of a queue or a customer; omitted settings keep their values."""

from dataclasses import replace
from enum import Enum
from math import isfinite
from typing import Any, Final

from fairturn.model import SETTING_NAMES, SettingChanges, Settings


class Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


def changed(settings: Settings, changes: SettingChanges) -> Settings:
    """Return settings with changes applied; raise `TypeError` or `ValueError` for a wrong one."""
    for name in changes:
        if name not in SETTING_NAMES:
            raise TypeError(
                f"{name!r} is not a setting; the settings are: {', '.join(SETTING_NAMES)}"
            )
    values: dict[str, Any] = dict(changes)  # `Settings` checks their types
    return replace(settings, **values)


def customer_changes(
    weight: float | Unchanged,
    limit: int | Unchanged | None,
    paused: bool | Unchanged,
    bytes_max: int | Unchanged | None,
) -> dict[str, Any]:
    """Return the settings of a customer to change; raise `TypeError` for a wrong type."""
    changes: dict[str, Any] = {}
    if weight is not UNCHANGED:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise TypeError(f"weight is {weight!r}; it must be a number")
        changes["weight"] = weight
    if limit is not UNCHANGED:
        if isinstance(limit, bool) or not isinstance(limit, int | None):
            raise TypeError(f"limit is {limit!r}; it must be a whole number, or None for no limit")
        changes["limit"] = limit
    if paused is not UNCHANGED:
        if not isinstance(paused, bool):
            raise TypeError(f"paused is {paused!r}; it must be True or False")
        changes["paused"] = paused
    if bytes_max is not UNCHANGED:
        if isinstance(bytes_max, bool) or not isinstance(bytes_max, int | None):
            raise TypeError(
                f"bytes_max is {bytes_max!r}; it must be a whole number, or None for the queue's"
            )
        changes["bytes_max"] = bytes_max
    return changes
