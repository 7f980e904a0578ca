"""How many documents to claim: one for each idle slot, and a prefetch for fast handlers (pure).

A prefetched document keeps its place although a document with a better turn may arrive. So the
prefetch is limited to `AHEAD_S` of measured work, and is 0 for a handler that was not measured yet.
"""

from fairturn.model import CLAIM_DOCUMENTS_MAX

AHEAD_S = 0.05  # of work, all slots together
_SHARE = 1 / 32  # weight of a new measurement in the mean
_KNOWN_AFTER = 2  # measured documents
_LEAST_S = 0.000_025  # overhead of a document: claim, hand over, record
_ROUNDING = 0.1  # of a document, so that one of 50 ms and a microsecond is still prefetched


class PrefetchPolicy:
    """The mean duration of a handler, and the prefetch that follows from it."""

    def __init__(self, *, refill: float = 0.5) -> None:
        # Claim when the prefetched documents fall to this share of `ahead`, and that share at once,
        # so that the handlers have work during the claim.
        self._refill = refill
        self._documents = 0
        self.mean_s = 0.0

    def add(self, seconds: float, documents: int = 1) -> None:
        """Add a measurement: the documents took `seconds` in total."""
        mean_s = seconds / documents
        self._documents = min(self._documents + documents, 1_000_000)
        # The first measurements have full weight, and so has a slow document: it stops the prefetch
        # until fast ones outweigh it.
        share = max(1 - (1 - _SHARE) ** documents, documents / self._documents)
        self.mean_s += (mean_s - self.mean_s) * (1.0 if mean_s >= AHEAD_S else share)

    def forget(self) -> None:
        """Stop the prefetch until the handler has been measured again."""
        self._documents = 0

    @property
    def ahead(self) -> int:
        """How many documents may be prefetched."""
        if self._documents < _KNOWN_AFTER:
            return 0
        return int(AHEAD_S / max(self.mean_s, _LEAST_S) + _ROUNDING)

    def wanted(self, free: int, unstarted: int) -> int:
        """Return how many documents to claim, given the idle slots and the unstarted documents."""
        ahead = self.ahead
        part = int(ahead * self._refill)
        wanted = max(0, min(CLAIM_DOCUMENTS_MAX, free + ahead - unstarted))
        if not part:
            return 0 if unstarted else wanted
        return 0 if unstarted - free > part else min(wanted, free + part)
