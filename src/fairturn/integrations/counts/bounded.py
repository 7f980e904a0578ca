"""A timeout for calls that have none."""

import threading
from collections.abc import Callable
from typing import TypeVar

from fairturn.errors import StoreUnavailable

T = TypeVar("T")


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Return what the call returns or raise what it raises; `StoreUnavailable` after a timeout.

    Drivers have no timeout for some waits, such as name resolution or a server that accepts a
    connection and never responds. The call runs in a thread; a late result is discarded.
    """
    done = threading.Event()
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    # A daemon thread, so that the process can exit while it waits.
    threading.Thread(target=run, name="fairturn-counts", daemon=True).start()
    if not done.wait(seconds):
        raise StoreUnavailable(f"{what} did not respond within {seconds * 1000:.0f} ms")
    if raised:
        raise raised[0]
    return returned[0]
