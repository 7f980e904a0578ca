"""Options that several commands share, and their types."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import wraps
from typing import Any, TypeVar

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use, wrong_use
from fairturn.cli.settings import FILE_METAVAR, SettingDefinition, flag_of, option_settings
from fairturn.clock import from_datetime, microseconds
from fairturn.model import PAGE_MAX, State
from fairturn.priority import LEVELS, Reset, Rule

SECONDS_MAX = 1_000_000_000
_UNITS = {"min": 60, "s": 1, "h": 3_600, "d": 86_400}
Flags = Mapping[str, Any]  # the options of settings by name; None for an omitted one
T = TypeVar("T")


class ReaderType(click.ParamType[T]):
    """The type of an option whose value a function reads; its `ValueError` is the message."""

    def __init__(self, name: str, read: Callable[[Any], T]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


def seconds_of(value: Any) -> float:
    """Convert a number of seconds. Raises `ValueError`."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number of seconds") from None
    if not 0 <= number <= SECONDS_MAX:  # also false for NaN
        raise ValueError(f"{value} is not between 0 and {SECONDS_MAX:,} seconds")
    return number


def _duration_of(value: Any) -> float:
    text = str(value)
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        number = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except ValueError:
        raise ValueError(f"{value!r} is not a duration, such as 90s, 30min, 2h or 7d") from None
    if not 0 < number <= SECONDS_MAX:  # also false for NaN
        raise ValueError(f"{value} is not positive and at most {SECONDS_MAX:,} seconds")
    return number


def _thresholds_of(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers such as -2,-4,-6") from None


def timestamp_of(text: str) -> int:
    """Parse a timestamp in ISO 8601; raise `ValueError` if it has no time zone."""
    try:
        return from_datetime(datetime.fromisoformat(text))
    except (ValueError, TypeError):
        raise ValueError(
            f"{text!r} is not a timestamp with a time zone, such as 2030-01-31T08:00Z "
            "or 2030-01-31T09:00+01:00"
        ) from None


SECONDS = ReaderType("seconds", seconds_of)
DURATION = ReaderType("duration", _duration_of)
THRESHOLDS = ReaderType("a,b,…", _thresholds_of)
TIMESTAMP = ReaderType("timestamp", timestamp_of)


def choice(values: Iterable[StrEnum]) -> click.Choice[str]:
    """Return a choice of enum values; given members, click would show their names in capitals."""
    return click.Choice([value.value for value in values])


def rule_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the rule; the command gets those that were given as `rule_given`."""

    @wraps(command)
    def with_rule(*args: Any, **options: Any) -> Any:
        names = ("reset", "reset_interval", "bounds")
        given = {name: value for name in names if (value := options.pop(name)) is not None}
        return command(*args, rule_given=given, **options)

    for option in (
        click.option(
            "--bounds",
            type=THRESHOLDS,
            help="The eight thresholds; -2,-4,-6,-8,-10,-12,-14,-20 by default.",
        ),
        click.option(
            "--reset-interval",
            type=SECONDS,
            help="Reset interval in seconds; 1500 by default.",
        ),
        click.option(
            "--reset",
            type=choice(Reset),
            help="Start of the reset interval: the last document (idle) or the last reset "
            "(periodic); idle by default.",
        ),
    ):
        with_rule = option(with_rule)
    return with_rule


def rule_of(given: Mapping[str, Any]) -> Rule:
    """Return the rule with the given options, and the defaults of the others."""
    changes = dict(given)
    if "reset_interval" in changes:
        changes["reset_interval_us"] = microseconds(changes.pop("reset_interval"))
    if "reset" in changes:
        changes["reset"] = Reset(changes["reset"])
    with misuse_is_wrong_use():
        return Rule(**changes)


def page_options(
    default: int, things: str, after: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a list; the command gets `after`, and as `wanted` how many to print at
    most, or None for all."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_page(*args: Any, limit: int | None, everything: bool, **options: Any) -> Any:
            if everything and limit is not None:
                wrong_use("--all and --limit contradict each other; leave one of them out")
            wanted = None if everything else limit or default
            return command(*args, wanted=wanted, **options)

        decorated: Callable[..., Any] = with_page
        for option in (
            click.option("--after", metavar=after, help=f"Continue after this {after}."),
            click.option("--all", "everything", is_flag=True, help=f"All {things}."),
            click.option(
                "--limit",
                type=click.IntRange(1),
                metavar="N",
                help=f"At most N; {default} by default.",
            ),
        ):
            decorated = option(decorated)
        return decorated

    return add


def entities(
    fetch: Callable[..., tuple[Sequence[T], str | None]], after: str | None, wanted: int | None
) -> Iterator[T]:
    """Fetch pages, and iterate over `wanted` entities, or over all if it is None."""
    while True:
        page, after = fetch(after=after, size=PAGE_MAX if wanted is None else min(wanted, PAGE_MAX))
        yield from page
        wanted = None if wanted is None else wanted - len(page)
        if after is None or wanted == 0:
            return


def refuse_before_subcommand(ctx: click.Context) -> None:
    """Refuse options between a group and its subcommand, which would be lost."""
    given = click.core.ParameterSource.COMMANDLINE
    if any(ctx.get_parameter_source(name) is given for name in ctx.params):
        wrong_use(f"options come last: {ctx.command_path} {ctx.invoked_subcommand} … --OPTION")


def removable_settings(**given: tuple[Any, bool]) -> dict[str, Any]:
    """Return the settings to change, from the values of --SETTING and --no-SETTING; None removes a
    setting."""
    changes = {}
    for setting, (value, is_removed) in given.items():
        if value is not None and is_removed:
            option = setting.removesuffix("_s").replace("_", "-")  # units are in the value
            wrong_use(f"--{option} and --no-{option} contradict each other; leave one of them out")
        if value is not None or is_removed:
            changes[setting] = value
    return changes


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON Lines.")
    return option(command)


def setting_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of settings; the command gets their values as `flags`, None for an omitted
    option."""
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


def _option_of(
    name: str, known: SettingDefinition
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option of a setting, or the argument `handler`; `resolve` checks its value."""
    if name == "handler":
        return click.argument(name, required=False, metavar=known.metavar)
    flag = flag_of(name)
    if isinstance(known.default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=known.about)
    return click.option(
        *(("-d", flag) if name == "database" else (flag,)),
        name,
        # click.Path lets the shell complete paths.
        type=click.Path() if FILE_METAVAR in str(known.metavar) else str,
        multiple=isinstance(known.default, tuple),
        metavar=known.metavar,
        help=known.about,
    )


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the filters of documents; the command gets their values as `filters`."""
    from fairturn.validation.filters import FILTERS, FilterType

    known = [each for each in FILTERS if each.is_option]
    types: dict[FilterType, dict[str, Any]] = {
        FilterType.STATE: {"type": choice(State)},
        FilterType.PRIORITY: {"type": click.IntRange(1, LEVELS), "metavar": "N"},
        FilterType.TIMESTAMP: {"type": TIMESTAMP},
    }

    @wraps(command)
    def with_filters(*args: Any, **options: Any) -> Any:
        given = {each.name: options.pop(each.parameter) for each in known}
        filters = {name: value for name, value in given.items() if value not in (None, ())}
        return command(*args, filters=filters, **options)

    for each in reversed(known):
        again = "; may be given several times" if each.several else ""
        with_filters = click.option(
            f"--{each.parameter.replace('_', '-')}",
            multiple=bool(each.several),
            help=f"{each.description}{again}.",
            **types.get(each.type, {}),
        )(with_filters)
    return with_filters
