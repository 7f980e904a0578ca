"""Options that several commands have, and what they turn into."""

from collections.abc import Callable, Iterable
from datetime import datetime
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import wrong_use
from fairturn.cli.settings import FILE_METAVAR, Known, flag_of, option_settings
from fairturn.clock import from_datetime, microseconds
from fairturn.priority import BOUNDS, LEVELS, RESET_INTERVAL_US, Reset, Rule

if TYPE_CHECKING:
    from fairturn.validation.filters import Filters

SECONDS_MAX = 1_000_000_000
STATES = ("delayed", "waiting", "running", "completed", "dead", "cancelled")


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


class Moment(click.ParamType[int]):
    """A moment in ISO 8601 with a time zone."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return moment_of(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


def moment_of(text: str) -> int:
    """The moment that a text in ISO 8601 names; without a time zone it names none."""
    try:
        return from_datetime(datetime.fromisoformat(text))
    except (ValueError, TypeError):
        raise ValueError(
            f"{text!r} is not a moment with a time zone, such as 2030-01-31T08:00Z "
            "or 2030-01-31T09:00+01:00"
        ) from None


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


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, which every command has that prints values."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON Lines, for programs.")
    return option(command)


def setting_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of these settings; the command gets the values as one `flags`, None for each
    option that was left out."""
    known = option_settings()

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_flags(*args: Any, **options: Any) -> Any:
            flags = {name: options.pop(name) for name in names}
            given = {name: None if value == () else value for name, value in flags.items()}
            return command(*args, flags=given, **options)

        decorated: Callable[..., Any] = with_flags
        for name in reversed(names):
            decorated = _option_of(name, known[name])(decorated)
        return decorated

    return add


def _option_of(name: str, known: Known) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option of a setting, or the argument of the handler. `resolve` checks its value."""
    if name == "handler":
        return click.argument(name, required=False, metavar=known.metavar)
    flag = flag_of(name)
    if isinstance(known.default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=known.about)
    return click.option(
        *(("-d", flag) if name == "database" else (flag,)),
        name,
        # A path is completed by the shell; every other value is a text.
        type=click.Path() if FILE_METAVAR in str(known.metavar) else str,
        multiple=isinstance(known.default, tuple),
        metavar=known.metavar,
        help=known.about,
    )


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which documents are meant; the command gets them as one `filters`."""

    @wraps(command)
    def with_filters(
        *args: Any,
        customer: str | None,
        state: tuple[str, ...],
        priority: tuple[int, ...],
        name: str | None,
        submitted_from: int | None,
        submitted_before: int | None,
        **options: Any,
    ) -> Any:
        filters: Filters = {}
        if customer is not None:
            filters["customer"] = customer
        if state:
            filters["states"] = state
        if priority:
            filters["priorities"] = priority
        if name is not None:
            filters["name"] = name
        if submitted_from is not None:
            filters["submitted_from"] = submitted_from
        if submitted_before is not None:
            filters["submitted_before"] = submitted_before
        return command(*args, filters=filters, **options)

    for option in (
        click.option("--submitted-before", type=Moment(), help="Only older ones."),
        click.option("--submitted-from", type=Moment(), help="Only from this moment on."),
        click.option("--name", help="Only those of exactly this name."),
        click.option(
            "--priority",
            type=click.IntRange(1, LEVELS),
            multiple=True,
            metavar="N",
            help="Only of this priority; may be given several times.",
        ),
        click.option(
            "--state",
            type=click.Choice(STATES),
            multiple=True,
            help="Only in this state; may be given several times.",
        ),
        click.option("--customer", help="Only of this customer."),
    ):
        with_filters = option(with_filters)
    return with_filters
