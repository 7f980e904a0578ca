"""Options that several commands have, and what they turn into."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NoReturn

import click

from fairturn.clock import microseconds
from fairturn.priority import BOUNDS, RESET_INTERVAL_US, Reset, Rule

SECONDS_MAX = 1_000_000_000


class Seconds(click.ParamType[float]):
    """A finite number of seconds that is not negative."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        if not 0 <= number <= SECONDS_MAX:
            self.fail(f"{value} is not between 0 and {SECONDS_MAX:,} seconds.", param, ctx)
        return number


class Bounds(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "a,b,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as -2,-4,-6.", param, ctx)


def choice(values: Iterable[StrEnum]) -> click.Choice[str]:
    """One of these words. Of the members alone click would show the names, in capitals."""
    return click.Choice([value.value for value in values])


def rule_of(
    reset: str | None, reset_interval_s: float | None, bounds: tuple[int, ...] | None = None
) -> Rule:
    """The rule with these settings; None is the default."""
    try:
        return Rule(
            bounds=BOUNDS if bounds is None else bounds,
            reset_interval_us=(
                RESET_INTERVAL_US if reset_interval_s is None else microseconds(reset_interval_s)
            ),
            reset=Reset.IDLE if reset is None else Reset(reset),
        )
    except ValueError as error:
        wrong_use(str(error))


def wrong_use(sentence: str) -> NoReturn:
    """End with what is wrong with the options that were given."""
    raise click.UsageError(f"{sentence[:1].upper()}{sentence[1:]}.")
