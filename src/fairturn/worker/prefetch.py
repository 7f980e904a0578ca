"""How many documents to claim: what can start at once, and a little more for a fast handler (pure).

A document that was claimed ahead is out of reach for a better turn that comes after it. So the work
ahead is bounded by time, as it was measured, and an unknown handler gets none.
"""

from fairturn.model import CLAIM_DOCUMENTS_MAX

AHEAD_S = 0.05  # of measured work, all slots together
_SHARE = 1 / 32  # of a new measurement in the mean
_KNOWN_AFTER = 2  # documents
_LEAST_S = 0.000_025  # to claim, hand over and record a document, whatever the handler does
_ROUNDING = 0.1  # of a document, so that one that takes 50 ms is not refused for a microsecond


class Pace:
    """The mean time that a handler takes, and what follows from it."""

    def __init__(self, *, refill: float = 0.5) -> None:
        # The share of what may wait at which more is claimed, and so much of it at a time: one part
        # is worked on while the other is fetched.
        self._refill = refill
        self._documents = 0
        self.mean_s = 0.0

    def add(self, seconds: float, documents: int = 1) -> None:
        """So long took so many documents, one after the other."""
        mean_s = seconds / documents
        self._documents = min(self._documents + documents, 1_000_000)
        # The first ones count in full. A document that took long counts in full as well: after it,
        # nothing is claimed ahead until the fast ones have outweighed it.
        share = max(1 - (1 - _SHARE) ** documents, documents / self._documents)
        self.mean_s += (mean_s - self.mean_s) * (1.0 if mean_s >= AHEAD_S else share)

    def forget(self) -> None:
        """The handler is not what it was: nothing is claimed ahead until it is known again."""
        self._documents = 0

    @property
    def ahead(self) -> int:
        """How many documents may wait inside the worker for a slot."""
        if self._documents < _KNOWN_AFTER:
            return 0
        return int(AHEAD_S / max(self.mean_s, _LEAST_S) + _ROUNDING)

    def wanted(self, free: int, unstarted: int) -> int:
        """How many to claim now, with so many slots free and so many documents not started."""
        ahead = self.ahead
        part = int(ahead * self._refill)
        wanted = max(0, min(CLAIM_DOCUMENTS_MAX, free + ahead - unstarted))
        if not part:
            return 0 if unstarted else wanted
        return 0 if unstarted - free > part else min(wanted, free + part)
