"""The reasons in explanations: stable codes, and the parameters of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """The code of a reason, and the names of its parameters: timestamps end in `_at`, durations in
    `_us`. Codes are stable: programs may rely on them."""

    parameters: tuple[str, ...]

    def __new__(cls, code: str, *parameters: str) -> "Code":
        member = str.__new__(cls, code)
        member._value_ = code
        member.parameters = parameters
        return member

    # The priority.
    PRIORITY_FIRST = "priority_first", "priority"
    PRIORITY_COUNTED = "priority_counted", "priority", "count", "document"
    PRIORITY_OF_PARENT = "priority_of_parent", "priority", "count", "parent"
    COUNT_RESETS = "count_resets", "count", "resets_at", "resets_in_us", "reset"
    COUNT_IS_RESET = "count_is_reset"
    MODE_LEVELS = "mode_levels"
    MODE_EQUAL = "mode_equal"
    # Why it cannot start now.
    NOT_DUE = "not_due", "due_at", "due_in_us"
    RETRIED_LATER = "retried_later", "due_at", "due_in_us", "attempts"
    SNOOZED = "snoozed", "due_at", "due_in_us"
    RETURNED = "returned", "due_at", "due_in_us"
    EXPIRY_PASSED = "expiry_passed", "expires_at", "expired_us"
    CUSTOMER_PAUSED = "customer_paused"
    LIMIT_REACHED = "limit_reached", "limit"
    LIMIT_AHEAD = "limit_ahead", "limit"
    KIND_PAUSED = "kind_paused", "kind"
    KIND_LIMIT_REACHED = "kind_limit_reached", "kind", "limit"
    KIND_UNSERVED = "kind_unserved", "kind"
    OUTAGE = "outage", "service", "kind", "began_at", "began_us", "probe_at", "probe_in_us"
    OUTAGE_OVER = "outage_over", "service", "kind"
    NO_WORKER = "no_worker", "seen_at", "seen_us"
    LEASE_EXPIRED = "lease_expired", "attempts"
    LEASE_EXPIRED_LAST = "lease_expired_last", "attempts"
    # The position.
    NEXT = "next"
    POSITION = "position", "documents"
    POSITION_BETWEEN = "position_between", "least", "most"
    BEFORE_BETTER_LEVELS = "before_better_levels", "documents"
    BEFORE_OTHER_CUSTOMERS = "before_other_customers", "documents", "customers", "largest"
    BEFORE_LONGEST_WAITING = "before_longest_waiting", "documents"
    BEFORE_OWN = "before_own", "documents"
    BETWEEN_LIMITS = "between_limits"
    BETWEEN_COSTS = "between_costs"
    BETWEEN_MANY_TURNS = "between_many_turns"
    BETWEEN_MANY_DOCUMENTS = "between_many_documents"
    BETWEEN_UNFOLDED = "between_unfolded"
    WEIGHT = "weight", "weight"
    PATIENCE_OVER = "patience_over", "since_at", "since_us", "customers"
    # The start.
    STARTS_NOW = "starts_now"
    STARTS_BETWEEN = (
        "starts_between",
        "earliest_at",
        "earliest_us",
        "latest_at",
        "latest_us",
        "confidence",
    )
    STARTS_WITHIN = "starts_within", "latest_at", "latest_us", "confidence"
    STARTS_AFTER = "starts_after", "earliest_at", "earliest_us", "confidence"
    START_UNKNOWN = "start_unknown"
    WORKERS = "workers", "workers", "running"
    EXPIRES = "expires", "expires_at", "expires_in_us"
    # What happened.
    STEP = "step", "step", "kind"
    RUNNING = "running", "claimed_at", "running_us", "worker"
    STOPPING = "stopping"
    COMPLETED = "completed", "claimed_at", "ended_at", "ended_us", "took_us", "worker"
    DEAD = "dead", "claimed_at", "ended_at", "ended_us", "error", "worker"
    CANCELLED = "cancelled", "ended_at", "ended_us"
    EXPIRED = "expired", "expires_at", "ended_at", "ended_us"
    ATTEMPTS = "attempts", "attempts", "attempts_max"
    LAST_ERROR = "last_error", "error"
    WAITED = "waited", "waited_us", "attempts", "step"
    SERVED_MEANWHILE = "served_meanwhile", "documents", "customers", "largest"
    SERVED_AT_LEAST = "served_at_least", "documents", "customers", "largest"


Value = int | float | str | None | tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """One fact about a document: a code and its parameters."""

    code: Code
    parameters: Mapping[str, Value]


def reason(code: Code, **parameters: Value) -> Reason:
    """Return a reason with exactly the parameters of its code, in their order."""
    assert tuple(parameters) == code.parameters, code
    return Reason(code, parameters)
