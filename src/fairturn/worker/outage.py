"""A store that does not answer: it is asked again after pauses that grow."""

from collections.abc import Callable

PAUSE_S, PAUSE_S_MAX = 0.05, 5.0


class Outage:
    """Since when the store does not answer, and when it is asked again."""

    def __init__(self, random: Callable[[], float]) -> None:
        self.until_s = 0.0  # before this it is not asked
        self._random = random
        self._pause_s = 0.0
        self._since_s: float | None = None
        self._last_s = 0.0  # when it was seen last

    def go_on(self, now_s: float) -> float:
        """It has not answered, perhaps not for the first time; how long the pause is now."""
        if self._since_s is None:
            self._since_s = now_s
        self._last_s = now_s
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S, self._pause_s * 2))
        pause_s = self._pause_s * (1 + self._random() / 2)
        self.until_s = now_s + pause_s
        return pause_s

    def end(self, now_s: float, begun_s: float) -> float | None:
        """It has answered a call that was begun then; for how long it had not, if it had not. What
        was begun before says nothing."""
        if self._since_s is None or begun_s < self._last_s:
            return None
        away_s, self._since_s, self._pause_s = now_s - self._since_s, None, 0.0
        return away_s
