"""A call that may take for ever, waited for only so long."""

import threading
from collections.abc import Callable
from typing import TypeVar

from fairturn.errors import StoreUnavailable

T = TypeVar("T")


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """What the call gives or raises, if it does so in time.

    Some waits have no limit that a driver could be told: the name of a host that is looked up, a
    server that takes a connection and says nothing. A thread takes them over. What it gets after
    all is thrown away.
    """
    done = threading.Event()
    given: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(call())
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    # A daemon, so that a process can end while it waits.
    threading.Thread(target=run, name="fairturn-counts", daemon=True).start()
    if not done.wait(seconds):
        raise StoreUnavailable(f"{what} did not answer within {seconds * 1000:.0f} ms")
    if raised:
        raise raised[0]
    return given[0]
