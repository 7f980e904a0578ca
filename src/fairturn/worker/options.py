"""The options of handlers, and their ranges. A child imports this module, so it imports little."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict, cast

from fairturn.scheduling.outages import OF_KIND
from fairturn.worker.results import service_name

if TYPE_CHECKING:
    from fairturn.worker.backoff import Backoff

CONCURRENCY_MAX = 1_000
TIME_LIMIT_S_MIN, TIME_LIMIT_S_MAX = 0.001, 1e9
BYTES_LIMIT_MAX = 1 << 60
SERVICES_MAX = 16  # as in `model`, which a child does not import


class HandlerOptions(TypedDict, total=False):
    """The options of the handler of one kind. One that is not given is that of the worker; None
    lifts a limit."""

    concurrency: int
    threads: bool
    time_limit_s: float | None
    memory_limit_bytes: int | None
    retry: "Backoff"
    needs: Iterable[str]


def checked(given: HandlerOptions) -> HandlerOptions:
    """Return the options of a handler; raise `TypeError` or `ValueError` for a wrong one."""
    options: dict[str, Any] = dict(given)
    for name in options:
        if name not in HandlerOptions.__annotations__:
            known = ", ".join(HandlerOptions.__annotations__)
            raise TypeError(f"{name!r} is not an option of a handler; the options are: {known}")
    if "concurrency" in options:
        check_whole("concurrency", options["concurrency"], 1, CONCURRENCY_MAX)
    if not isinstance(options.get("threads", False), bool):
        raise TypeError(f"threads is {options['threads']!r}; it must be True or False")
    check_limits(options.get("time_limit_s"), options.get("memory_limit_bytes"))
    if "retry" in options:
        from fairturn.worker.backoff import Backoff, check

        options["retry"] = check(Backoff(*options["retry"]))
    if "needs" in options:
        options["needs"] = _services(options["needs"])
    return cast("HandlerOptions", options)


def check_limits(time_limit_s: float | None, memory_limit_bytes: int | None) -> None:
    if time_limit_s is not None:
        check_seconds("time_limit_s", time_limit_s, TIME_LIMIT_S_MIN, TIME_LIMIT_S_MAX)
    if memory_limit_bytes is not None:
        check_whole("memory_limit_bytes", memory_limit_bytes, 1, BYTES_LIMIT_MAX)


def check_whole(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be from {least:,} to {most:,}")


def check_seconds(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be from {least:g} to {most:g} seconds")


def _services(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"needs is {names!r}; it must be a set of names, as in {{{names!r}}}")
    services = tuple(sorted({service_name(name) for name in names}))
    for service in services:
        if service.startswith(OF_KIND):
            raise ValueError(f"service {service!r} is reserved; choose one without {OF_KIND!r}")
    if len(services) > SERVICES_MAX:
        raise ValueError(f"needs has {len(services)} services; at most {SERVICES_MAX} are allowed")
    return services
