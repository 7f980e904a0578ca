"""`Handlers`: the handlers of a worker, one for each kind of work.

A child imports this module, so it imports little.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from fairturn.validation.text import kind_name
from fairturn.worker.options import HandlerOptions, checked

if TYPE_CHECKING:
    from fairturn.worker.handler import ClaimedDocument

Handler = Callable[["ClaimedDocument"], object]
H = TypeVar("H", bound=Callable[..., object])


class RegisteredHandler(NamedTuple):
    """The handler of one kind, and its options."""

    function: Handler
    options: HandlerOptions


class Handlers:
    """The handlers of a worker, by kind of work.

        handlers = Handlers()

        @handlers("ocr", concurrency=1, time_limit_s=600)
        def ocr(document): ...

    `Worker(queue, handlers)` serves the registered kinds. Of a kind it runs at most `concurrency`
    documents at a time, within its own concurrency. `threads`, `time_limit_s`,
    `memory_limit_bytes` and `retry` are as in `Worker`, which has their defaults; `needs` names
    the services whose outage, reported with `Unavailable`, holds the kind.
    """

    def __init__(self) -> None:
        self._registered: dict[str, RegisteredHandler] = {}

    def __repr__(self) -> str:
        return f"<handlers of {', '.join(self._registered) or 'no kind'}>"

    def __call__(self, kind: str, **options: Unpack[HandlerOptions]) -> Callable[[H], H]:
        """Return a decorator that registers the handler of a kind and returns it unchanged.

        Raises `TypeError` or `ValueError` for an invalid kind or option, and for a kind that is
        already registered.
        """
        if callable(kind):
            raise TypeError('the handler has no kind of work; write @handlers("text") above it')
        kind_name(kind)
        given = checked(options)

        def register(function: H) -> H:
            if not callable(function):
                raise TypeError(f"the handler of kind {kind!r} is {function!r}, not a function")
            if kind in self._registered:
                known = self._registered[kind].function
                raise ValueError(
                    f"kind {kind!r} already has the handler {_shown(known)}; remove one of the "
                    f"two, or register {_shown(function)} for another kind"
                )
            self._registered[kind] = RegisteredHandler(function, given)
            return function

        return register

    @property
    def kinds(self) -> tuple[str, ...]:
        """The registered kinds, in the order of their registration."""
        return tuple(self._registered)

    def handler_of(self, kind: str) -> Handler:
        """Return the handler of a kind; raise `LookupError` if there is none."""
        try:
            return self._registered[kind].function
        except KeyError:
            registered = ", ".join(self._registered) or "none"
            raise LookupError(
                f"kind {kind!r} has no handler; the registered kinds are: {registered}"
            ) from None

    def options(self) -> dict[str, HandlerOptions]:
        """Return the options of each kind."""
        return {kind: handler.options for kind, handler in self._registered.items()}


def _shown(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(function)
