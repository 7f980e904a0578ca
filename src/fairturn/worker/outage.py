"""An outage of the store: calls are retried with exponential backoff and jitter."""

from collections.abc import Callable

PAUSE_S, PAUSE_S_MAX = 0.05, 5.0


class Outage:
    """When the store failed first, and when it is called again."""

    def __init__(self, random: Callable[[], float]) -> None:
        self.until_s = 0.0  # no calls before this
        self._random = random
        self._pause_s = 0.0
        self._since_s: float | None = None
        self._last_s = 0.0  # the last failure

    def go_on(self, now_s: float) -> float:
        """Record a failure; return the pause before the next call."""
        if self._since_s is None:
            self._since_s = now_s
        self._last_s = now_s
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S, self._pause_s * 2))
        pause_s = self._pause_s * (1 + self._random() / 2)
        self.until_s = now_s + pause_s
        return pause_s

    def end(self, now_s: float, begun_s: float) -> float | None:
        """Record the success of a call; return how long the outage lasted if this ends one.

        A call that began before the last failure ends none.
        """
        if self._since_s is None or begun_s < self._last_s:
            return None
        away_s, self._since_s, self._pause_s = now_s - self._since_s, None, 0.0
        return away_s
