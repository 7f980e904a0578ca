"""Events of a simulation other than arrivals: lost workers, cancels, failures; and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

LEASE_US = 30_000_000


class Step(IntEnum):
    """Events of an agenda, in the order of one instant; arrivals and finishes are not in it."""

    LEASE = 0
    CANCEL = 1
    DUE = 2
    WORKERS = 3


class Cancel(NamedTuple):
    """A customer cancels a document. A running document continues, and is not retried if it fails
    or its worker is lost."""

    at: int
    document: int


class Loss(NamedTuple):
    """Workers are lost, busy ones first, and as many return later."""

    at: int
    workers: int
    back_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The number of workers, and what fails. Documents, customers and kinds are numbers.

    `workers` serve all kinds; `workers_for` are groups of workers that serve one kind each, and are
    never lost. `failures` has the delays after the failed attempts of a document. A document whose
    worker is lost waits again when its lease expires. No document becomes dead: attempts are not
    limited.
    """

    workers: int = 1
    workers_for: tuple[tuple[int, int], ...] = ()  # kind, workers; asked in this order
    limits: Mapping[int, int] = field(default_factory=dict)  # by customer, of running documents
    failures: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cancels: tuple[Cancel, ...] = ()
    losses: tuple[Loss, ...] = ()
    lease_us: int = LEASE_US

    def __post_init__(self) -> None:
        if self.workers < (0 if self.workers_for else 1):
            raise ValueError(f"workers is {self.workers}; it must be at least 1")
        if any(limit < 1 for limit in self.limits.values()):
            raise ValueError(f"a limit is {min(self.limits.values())}; it must be at least 1")
        missing = 0
        for _, change in self.changes():
            missing -= change
            if missing >= self.workers and missing:
                raise ValueError(
                    f"all {self.workers} workers are lost at once; at least one must remain"
                )

    def changes(self) -> list[tuple[int, int]]:
        """Return timestamps and changes of the number of workers, in order; losses come first."""
        lost = [(loss.at, -loss.workers) for loss in self.losses]
        return sorted(lost + [(loss.back_at, loss.workers) for loss in self.losses])

    def agenda(self) -> list[tuple[int, Step, int]]:
        """Return the cancels and the changes of the number of workers, in order: the timestamp, the
        step, and the document or the change."""
        agenda = [(cancel.at, Step.CANCEL, cancel.document) for cancel in self.cancels]
        return sorted(agenda + [(at, Step.WORKERS, change) for at, change in self.changes()])

    def cancelled_at(self) -> dict[int, int]:
        """Return the first cancel of each document."""
        return {document: at for at, document in sorted(self.cancels, reverse=True)}

    def alone_us(self, document: int, cost: int) -> int:
        """Return the time of a document in an empty system: its attempts and its delays."""
        delays = self.failures.get(document, ())
        return cost * (1 + len(delays)) + sum(delays)
