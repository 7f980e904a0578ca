"""Changes to the settings of a queue, a customer or a kind of work; omitted ones keep their
values."""

from dataclasses import replace
from enum import Enum
from math import isfinite
from typing import Any, Final

from fairturn.model import SETTING_NAMES, SettingChanges, Settings


class Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED
_TYPES: dict[str, tuple[Any, str]] = {
    "weight": (int | float, "a number"),
    "limit": (int | None, "a whole number, or None for no limit"),
    "paused": (bool, "True or False"),
    "bytes_max": (int | None, "a whole number, or None for the queue's"),
    "attempts_max": (int | None, "a whole number, or None for the queue's"),
    "expires_in_s": (int | float | None, "a number of seconds, or None for no expiry"),
}


def changed(settings: Settings, changes: SettingChanges) -> Settings:
    """Return settings with changes applied; raise `TypeError` or `ValueError` for a wrong one."""
    for name in changes:
        if name not in SETTING_NAMES:
            raise TypeError(
                f"{name!r} is not a setting; the settings are: {', '.join(SETTING_NAMES)}"
            )
    values: dict[str, Any] = dict(changes)  # `Settings` checks their types
    return replace(settings, **values)


def setting_changes(**given: Any) -> dict[str, Any]:
    """Return the settings of a customer or a kind to change; raise `TypeError` for a wrong type."""
    changes: dict[str, Any] = {n: value for n, value in given.items() if value is not UNCHANGED}
    for name, value in changes.items():
        types, expected = _TYPES[name]
        is_wrong = not isinstance(value, types) or (isinstance(value, bool) and name != "paused")
        if is_wrong or (name == "weight" and not isfinite(value)):
            raise TypeError(f"{name} is {value!r}; it must be {expected}")
    return changes
