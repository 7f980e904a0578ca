"""The kinds of work that a worker serves, and how it runs the documents of each."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from fairturn.validation.text import kind_name
from fairturn.worker.backoff import Backoff
from fairturn.worker.options import HandlerOptions, checked


class InvalidKinds(ValueError):
    """A worker is to serve a kind that its registry does not have, or with options that exclude
    each other."""


class KindOptions(NamedTuple):
    """How a worker runs the documents of one kind."""

    concurrency: int
    threads: bool
    time_limit_s: float | None
    memory_limit_bytes: int | None
    retry: Backoff
    needs: tuple[str, ...] = ()

    @property
    def where(self) -> "HandlerGroup":
        return HandlerGroup(self.threads, None if self.threads else self.memory_limit_bytes)


class HandlerGroup(NamedTuple):
    """Where handlers run: in threads, or in children with this memory limit. Kinds of one group
    share its threads or children."""

    threads: bool
    memory_limit_bytes: int | None


class ServedKinds:
    """The kinds that a worker serves, with their options."""

    def __init__(
        self,
        default: KindOptions,
        names: Sequence[str] | None = None,
        registered: Mapping[str, HandlerOptions] | None = None,
    ) -> None:
        """Serve these kinds; None stands for all that are registered, or without a registry for
        every kind. Registered options replace those of `default`.

        Raises `InvalidKinds` if there is no registered kind, if one of `names` is not registered,
        or if the options of a kind exclude each other.
        """
        self._default = default
        self.names = None if names is None else _names(names)
        self._registered: dict[str, KindOptions] = {}
        if registered is not None:
            if not registered:
                raise InvalidKinds(
                    'no handler is registered; register one with @handlers("text"), in a module '
                    "that is imported with the registry"
                )
            self.names = self.names or tuple(registered)
            for kind in self.names:
                if kind not in registered:
                    raise InvalidKinds(
                        f"kinds has {kind!r}, which has no handler; the registered kinds are: "
                        f"{', '.join(registered)}"
                    )
                self._registered[kind] = _options(kind, default, registered[kind])

    def of(self, kind: str) -> KindOptions:
        """Return the options of a kind."""
        return self._registered.get(kind, self._default)

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """The services that each registered kind needs."""
        return {kind: options.needs for kind, options in self._registered.items()}

    @property
    def capped(self) -> dict[str, int]:
        """The kinds of which fewer documents may run than the worker has slots, and how many."""
        return {
            kind: options.concurrency
            for kind, options in self._registered.items()
            if options.concurrency < self._default.concurrency
        }

    def groups(self) -> dict[HandlerGroup, list[str]]:
        """Return the groups of the kinds, with their kinds; no kinds if every kind is served."""
        groups: dict[HandlerGroup, list[str]] = {}
        for kind in self.names or ():
            groups.setdefault(self.of(kind).where, []).append(kind)
        return groups or {self._default.where: []}

    def slots_of(self, kinds: Sequence[str]) -> int:
        """Return how many documents of a group with these kinds can run at a time."""
        most = self._default.concurrency
        return min(most, sum(self.of(kind).concurrency for kind in kinds) if kinds else most)


def _names(given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError(f"kinds is {given!r}; it must be a list of kinds, as in [{given!r}]")
    names = tuple(dict.fromkeys(kind_name(name) for name in given))
    if not names:
        raise ValueError("kinds is empty; name a kind, or leave it out to serve all")
    return names


def _options(kind: str, default: KindOptions, given: HandlerOptions) -> KindOptions:
    options = default._replace(**cast("dict[str, Any]", checked(given)))
    options = options._replace(concurrency=min(options.concurrency, default.concurrency))
    if options.threads:
        for name in ("time_limit_s", "memory_limit_bytes"):
            if given.get(name) is not None:
                raise InvalidKinds(
                    f"kind {kind!r} has {name}, which does not apply to threads; remove it, or "
                    "register the kind with threads=False"
                )
        options = options._replace(time_limit_s=None, memory_limit_bytes=None)
    return options
