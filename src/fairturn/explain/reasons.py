"""The reasons in explanations: stable codes, and the parameters of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """The code of a reason. Codes are stable: programs may rely on them. `PARAMETERS` has the
    names of their parameters; timestamps end in `_at`, durations in `_us`."""

    # The priority.
    PRIORITY_FIRST = "priority_first"
    PRIORITY_COUNTED = "priority_counted"
    PRIORITY_OF_PARENT = "priority_of_parent"
    COUNT_RESETS = "count_resets"
    COUNT_IS_RESET = "count_is_reset"
    MODE_LEVELS = "mode_levels"
    MODE_EQUAL = "mode_equal"
    # Why it cannot start now.
    NOT_DUE = "not_due"
    RETRIED_LATER = "retried_later"
    CUSTOMER_PAUSED = "customer_paused"
    LIMIT_REACHED = "limit_reached"
    LIMIT_AHEAD = "limit_ahead"
    NO_WORKER = "no_worker"
    LEASE_EXPIRED = "lease_expired"
    LEASE_EXPIRED_LAST = "lease_expired_last"
    # The position.
    NEXT = "next"
    POSITION = "position"
    POSITION_BETWEEN = "position_between"
    BEFORE_BETTER_LEVELS = "before_better_levels"
    BEFORE_OTHER_CUSTOMERS = "before_other_customers"
    BEFORE_LONGEST_WAITING = "before_longest_waiting"
    BEFORE_OWN = "before_own"
    BETWEEN_LIMITS = "between_limits"
    BETWEEN_COSTS = "between_costs"
    BETWEEN_MANY_TURNS = "between_many_turns"
    BETWEEN_MANY_DOCUMENTS = "between_many_documents"
    BETWEEN_UNFOLDED = "between_unfolded"
    WEIGHT = "weight"
    PATIENCE_OVER = "patience_over"
    # The start.
    STARTS_NOW = "starts_now"
    STARTS_BETWEEN = "starts_between"
    STARTS_WITHIN = "starts_within"
    STARTS_AFTER = "starts_after"
    START_UNKNOWN = "start_unknown"
    WORKERS = "workers"
    # What happened.
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    ATTEMPTS = "attempts"
    LAST_ERROR = "last_error"
    WAITED = "waited"
    SERVED_MEANWHILE = "served_meanwhile"
    SERVED_AT_LEAST = "served_at_least"


Value = int | float | str | None | tuple[tuple[str, int], ...]

PARAMETERS: Mapping[Code, tuple[str, ...]] = {
    Code.PRIORITY_FIRST: ("priority",),
    Code.PRIORITY_COUNTED: ("priority", "count", "document"),
    Code.PRIORITY_OF_PARENT: ("priority", "count", "parent"),
    Code.COUNT_RESETS: ("count", "resets_at", "resets_in_us", "reset"),
    Code.COUNT_IS_RESET: (),
    Code.MODE_LEVELS: (),
    Code.MODE_EQUAL: (),
    Code.NOT_DUE: ("due_at", "due_in_us"),
    Code.RETRIED_LATER: ("due_at", "due_in_us", "attempts"),
    Code.CUSTOMER_PAUSED: (),
    Code.LIMIT_REACHED: ("limit",),
    Code.LIMIT_AHEAD: ("limit",),
    Code.NO_WORKER: ("seen_at", "seen_us"),
    Code.LEASE_EXPIRED: ("attempts",),
    Code.LEASE_EXPIRED_LAST: ("attempts",),
    Code.NEXT: (),
    Code.POSITION: ("documents",),
    Code.POSITION_BETWEEN: ("least", "most"),
    Code.BEFORE_BETTER_LEVELS: ("documents",),
    Code.BEFORE_OTHER_CUSTOMERS: ("documents", "customers", "largest"),
    Code.BEFORE_LONGEST_WAITING: ("documents",),
    Code.BEFORE_OWN: ("documents",),
    Code.BETWEEN_LIMITS: (),
    Code.BETWEEN_COSTS: (),
    Code.BETWEEN_MANY_TURNS: (),
    Code.BETWEEN_MANY_DOCUMENTS: (),
    Code.BETWEEN_UNFOLDED: (),
    Code.WEIGHT: ("weight",),
    Code.PATIENCE_OVER: ("since_at", "since_us", "customers"),
    Code.STARTS_NOW: (),
    Code.STARTS_BETWEEN: ("earliest_at", "earliest_us", "latest_at", "latest_us", "confidence"),
    Code.STARTS_WITHIN: ("latest_at", "latest_us", "confidence"),
    Code.STARTS_AFTER: ("earliest_at", "earliest_us", "confidence"),
    Code.START_UNKNOWN: (),
    Code.WORKERS: ("workers", "running"),
    Code.RUNNING: ("claimed_at", "running_us", "worker"),
    Code.STOPPING: (),
    Code.COMPLETED: ("claimed_at", "ended_at", "ended_us", "took_us", "worker"),
    Code.DEAD: ("claimed_at", "ended_at", "ended_us", "error", "worker"),
    Code.CANCELLED: ("ended_at", "ended_us"),
    Code.ATTEMPTS: ("attempts", "attempts_max"),
    Code.LAST_ERROR: ("error",),
    Code.WAITED: ("waited_us", "attempts"),
    Code.SERVED_MEANWHILE: ("documents", "customers", "largest"),
    Code.SERVED_AT_LEAST: ("documents", "customers", "largest"),
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One fact about a document: a code and its parameters."""

    code: Code
    parameters: Mapping[str, Value]


def reason(code: Code, **parameters: Value) -> Reason:
    """Return a reason with exactly the parameters of its code, in their order."""
    assert tuple(parameters) == PARAMETERS[code], code
    return Reason(code, parameters)
