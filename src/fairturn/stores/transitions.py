"""The next state of a document when an attempt ends or its lease expires. Pure.

A store reads an `Attempt`, writes an `Ending` and records its event. PostgreSQL does the same in
`functions/finish.sql` and `functions/fold.sql`; tests compare both.
"""

from typing import NamedTuple

from fairturn.model import (
    ERROR_BYTES_MAX,
    LEASE_RAN_OUT,
    LEASE_US_MAX,
    Completed,
    Failed,
    Outcome,
    Released,
    Settings,
    State,
    kept_cost,
    real_cost_within,
)
from fairturn.scheduling.flows import Costs, Ended, Event, Finished, Returned
from fairturn.validation.text import description


class Attempt(NamedTuple):
    """A document that is running, and what its turn was charged."""

    customer: int
    level: int
    order: int
    attempts: int  # this one included
    cancelled: bool  # somebody asked it to stop
    claimed_at: int = 0
    cost: int | None = None
    weight: int | None = None
    charge: int | None = None


class Ending(NamedTuple):
    """Its state afterwards: it has ended, is delayed until `due_at`, or waits again."""

    state: State
    event: Event
    error: str | None = None
    real_cost: int | None = None
    due_at: int = 0


def end_of(attempt: Attempt, outcome: Outcome, settings: Settings, now: int) -> Ending:
    """An attempt ended in this way. If the document waits again, the attempt does not count."""
    ended = Ended(attempt.customer, attempt.level, 1)
    if isinstance(outcome, Completed):
        event = _finished(attempt, outcome, now) if settings.costs is Costs.LEARNED else ended
        return Ending(State.COMPLETED, event, real_cost=kept_cost(outcome))
    if isinstance(outcome, Failed):
        error = description(outcome.error, ERROR_BYTES_MAX)
        if attempt.cancelled:
            return Ending(State.CANCELLED, ended, error)
        if outcome.retry_in_us is None or attempt.attempts >= settings.attempts_max:
            return Ending(State.DEAD, ended, error)
        return Ending(State.DELAYED, ended, error, due_at=now + max(0, outcome.retry_in_us))
    if isinstance(outcome, Released) and not attempt.cancelled:
        return Ending(State.WAITING, _returned(attempt, attempt.charge or 0))
    return Ending(State.CANCELLED, ended)


def end_of_lease(attempt: Attempt, settings: Settings) -> Ending:
    """A lease ran out. If the document waits again, the attempt counts."""
    ended = Ended(attempt.customer, attempt.level, 1)
    if attempt.cancelled:
        return Ending(State.CANCELLED, ended)
    if attempt.attempts >= settings.attempts_max:
        return Ending(State.DEAD, ended, LEASE_RAN_OUT)
    return Ending(State.WAITING, _returned(attempt, 0), LEASE_RAN_OUT)


def has_ended(lease_until: int, at: int | None) -> bool:
    """Whether a lease has ended at this moment; None: it is of an earlier boot of the machine.

    A lease that ends further ahead than the longest lease counts as ended: the clock that it was
    given by has stepped back since.
    """
    return at is None or not at < lease_until <= at + LEASE_US_MAX


def _returned(attempt: Attempt, refund: int) -> Returned:
    return Returned(attempt.customer, attempt.level, attempt.order, refund)


def _finished(attempt: Attempt, outcome: Completed, now: int) -> Finished:
    real = now - attempt.claimed_at if outcome.real_cost is None else outcome.real_cost
    return Finished(
        attempt.customer, attempt.level, attempt.cost, attempt.weight, real_cost_within(real)
    )
