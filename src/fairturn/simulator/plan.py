"""What happens beside the arrivals: workers that are lost, cancels, attempts that fail, limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LEASE_US = 30_000_000


class Cancel(NamedTuple):
    """A customer cancels a document. What has begun runs on, and is not tried again if it fails
    or its worker is lost."""

    at: int
    document: int


class Loss(NamedTuple):
    """So many workers vanish, those that are working first, and as many come back later."""

    at: int
    workers: int
    back_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many workers there are, and what goes wrong. Documents and customers are numbers.

    `failures` has, for each document that fails, the delay after each of its failed attempts. A
    document whose worker is lost waits again when its lease has run out. Nothing is ever dead: the
    simulator does not count attempts.
    """

    workers: int = 1
    limits: Mapping[int, int] = field(default_factory=dict)  # customer -> running at most
    failures: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cancels: tuple[Cancel, ...] = ()
    losses: tuple[Loss, ...] = ()
    lease_us: int = LEASE_US

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; it must be at least 1")
        if any(limit < 1 for limit in self.limits.values()):
            raise ValueError(f"a limit is {min(self.limits.values())}; it must be at least 1")
        missing = 0
        for _, change in self.changes():
            missing -= change
            if missing >= self.workers:
                raise ValueError(
                    f"all {self.workers} workers are lost at once; at least one must stay"
                )

    def changes(self) -> list[tuple[int, int]]:
        """(when, how many more workers there are), in order; those that come back are last."""
        lost = [(loss.at, -loss.workers) for loss in self.losses]
        return sorted(lost + [(loss.back_at, loss.workers) for loss in self.losses])

    def cancelled_at(self) -> dict[int, int]:
        """When each document is cancelled first."""
        return {document: at for at, document in sorted(self.cancels, reverse=True)}

    def alone_us(self, document: int, cost: int) -> int:
        """How long the document takes if nothing else is there: its attempts and its delays."""
        delays = self.failures.get(document, ())
        return cost * (1 + len(delays)) + sum(delays)
