"""A call in a thread, for tests that block it and observe other processes meanwhile."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from fairturn.errors import FairturnError

CALL_S = 20.0  # no call may take longer, whatever happens to its connection


class Attempt:
    """A call in a thread, with its result or error."""

    def __init__(self, call: Callable[[], Any], at_end: threading.Event | None = None) -> None:
        self.answer: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._at_end = at_end
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except BaseException as error:
            self.error = error
        if self._at_end is not None:
            self._at_end.set()

    def ended(self, within_s: float = CALL_S) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def problems(self, what: str, *allowed: type[BaseException]) -> Iterator[str]:
        """Yield what is wrong with how the call ended. `FairturnError`s are always allowed."""
        if not self.ended():
            yield f"{what} has not returned after {CALL_S:g} s"
        elif self.error is not None and not isinstance(self.error, (FairturnError, *allowed)):
            yield f"{what} raised {type(self.error).__name__}: {self.error}"
