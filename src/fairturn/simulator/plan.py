"""The workers of a simulation, limits, and what goes wrong: lost workers, outages, cancels,
failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from fairturn.model import Settings
from fairturn.scheduling.outages import PROBE_US
from fairturn.simulator.trace import Trace

LEASE_US = 30_000_000
ATTEMPTS = Settings().attempts_max
FAILS_AFTER_US = 1_000_000


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


class Outage(NamedTuple):
    """A service that these kinds of work need is unavailable until `back_at`. An attempt that
    starts meanwhile reports it after `fails_after_us`. Attempts in flight are not affected."""

    kinds: tuple[int, ...]
    at: int
    back_at: int
    fails_after_us: int = FAILS_AFTER_US
    retry_after_us: int = PROBE_US  # what the report asks for


class WorkerGroup(NamedTuple):
    """Workers that serve the same kinds."""

    kinds: tuple[int, ...]
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The workers and limits, and what goes wrong. Documents, customers and kinds are numbers.

    `workers` serve all kinds; `workers_for` are groups of workers that serve one kind each, and are
    never lost. `failures` has the delays after the failed attempts of a document, less than
    `attempts_max` each. A document whose worker is lost waits again when its lease expires. A
    document is dead after `attempts_max` attempts that failed, lost their worker, or reported an
    outage when its reports count.
    """

    workers: int = 1
    workers_for: tuple[tuple[int, int], ...] = ()  # kind, workers; asked in this order
    limits: Mapping[int, int] = field(default_factory=dict)  # by customer, of running documents
    kind_limits: Mapping[int, int] = field(default_factory=dict)  # by kind, of running documents
    failures: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cancels: tuple[Cancel, ...] = ()
    losses: tuple[Loss, ...] = ()
    outages: tuple[Outage, ...] = ()
    attempts_max: int = ATTEMPTS
    lease_us: int = LEASE_US

    def __post_init__(self) -> None:
        if self.workers < (0 if self.workers_for else 1):
            raise ValueError(f"workers is {self.workers}; it must be at least 1")
        limits = [*self.limits.values(), *self.kind_limits.values()]
        if any(limit < 1 for limit in limits):
            raise ValueError(f"a limit is {min(limits)}; it must be at least 1")
        for document, delays in self.failures.items():
            if len(delays) >= self.attempts_max:
                raise ValueError(
                    f"document {document} fails {len(delays)} times; with {self.attempts_max} "
                    "attempts it must fail less often"
                )
        missing = 0
        for _, change in self.changes():
            missing -= change
            if missing >= self.workers and missing:
                raise ValueError(
                    f"all {self.workers} workers are lost at once; at least one must remain"
                )
        for outage in self.outages:
            if outage.back_at <= outage.at:
                raise ValueError("an outage ends before it begins; give its times as FROM..TO")

    @property
    def is_unheld(self) -> bool:
        """Whether no kind is ever held: kinds have no limits, and there are no outages."""
        return not (self.kind_limits or self.outages)

    def groups(self, kinds: int) -> list[WorkerGroup]:
        """Return the groups of workers, in the order in which they are asked, for a trace with this
        number of kinds. The workers that serve all kinds are the last group."""
        groups = [WorkerGroup((kind,), workers) for kind, workers in self.workers_for]
        return [*groups, WorkerGroup(tuple(range(kinds)), self.workers)]

    def outage_at(self, kind: int, at: int) -> Outage | None:
        """Return the outage that an attempt of a kind finds if it starts at this time."""
        return next((o for o in self.outages if kind in o.kinds and o.at <= at < o.back_at), None)

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


def plan_of(trace: Trace, workers: int, workers_for: Sequence[tuple[str, int]] = ()) -> Plan:
    """Return a plan in which nothing fails: `workers` serve all kinds; `workers_for` has groups of
    workers that serve one kind each.

    Raises `ValueError` without workers, for a group whose kind no document has, and for a kind that
    no worker serves.
    """
    groups = tuple((trace.kind_number(kind), n) for kind, n in workers_for)
    plan = Plan(workers=workers, workers_for=groups)
    check_served(trace, plan)
    return plan


def check_served(trace: Trace, plan: Plan) -> None:
    """Raise `ValueError` if no worker serves a kind of the trace."""
    served = {kind for kind, workers in plan.workers_for if workers > 0}
    for number, kind in enumerate(trace.kind_names if len(trace) else ()):
        if plan.workers == 0 and number not in served:
            raise ValueError(
                f"no worker serves kind {kind!r}; add workers for it, or workers that serve all "
                "kinds"
            )
