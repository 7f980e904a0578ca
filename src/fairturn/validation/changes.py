"""Changes of settings as they are asked for: by name, and what is left out stays as it is."""

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from math import isfinite
from typing import Any, Final, TypedDict

from fairturn.model import SETTING_NAMES, Settings
from fairturn.priority import Reset
from fairturn.scheduling.flows import Costs, Mode


class Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


class SettingChanges(TypedDict, total=False):
    """Settings of the queue by name; those that are left out stay as they are."""

    mode: Mode | str
    costs: Costs | str
    patience_s: float
    reset: Reset | str
    reset_interval_s: float
    bounds: Iterable[int]
    attempts_max: int
    waiting_max: int
    waiting_per_customer_max: int
    completed_kept_s: float
    cancelled_kept_s: float
    dead_kept_s: float


def changed(settings: Settings, changes: SettingChanges) -> Settings:
    """Settings with some of them changed; the error for a wrong one names it."""
    for name in changes:
        if name not in SETTING_NAMES:
            raise TypeError(f"{name!r} is not a setting; they are: {', '.join(SETTING_NAMES)}")
    values: dict[str, Any] = dict(changes)  # their types are checked by Settings itself
    return replace(settings, **values)


def customer_changes(
    weight: float | Unchanged, limit: int | Unchanged | None, paused: bool | Unchanged
) -> dict[str, Any]:
    """What is to be changed of a customer; the error for a value of a wrong type names it."""
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
    return changes
