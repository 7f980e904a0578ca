"""The priority of one message of a customer, with a fallback for unavailable counts.

A publish must not fail because its priority is unknown. While the counts are unavailable,
messages get the priority `fallback`, and the counts are called once a second at most, so that a
long outage costs publishers little.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fairturn.clock import stopwatch
from fairturn.config import open_counts
from fairturn.errors import StoreError, StoreUnavailable
from fairturn.integrations.counts import Answer, Counts
from fairturn.model import CHILDREN_UNCHECKED_MAX, CUSTOMER_BYTES_MAX
from fairturn.priority import LEVELS, Rule
from fairturn.validation.text import identity

FALLBACK = 5
PAUSE_S = 1.0  # between two calls of counts that are unavailable
SILENCE_S = 60.0  # between two log lines about the same type of error

# Returns the customer of a message by its name, args and kwargs, or None.
Customer = Callable[[str, Sequence[Any], Mapping[str, Any]], object]
# Where counts are: a URL, a file, or an open `Counts`.
Place = str | os.PathLike[str] | Counts

logger = logging.getLogger("fairturn.integrations")


class Decision(NamedTuple):
    """Count and priority of one message, and their source."""

    customer: str | None
    count: int | None  # type: ignore[assignment]  # hides tuple.count, which is not needed
    priority: int
    by: str  # "check", "parent" or "fallback"

    def as_header(self) -> dict[str, str | int | None]:
        """Return the header of a message."""
        customer, count, priority, by = self
        return {"customer": customer, "count": count, "priority": priority, "by": by}

    @staticmethod
    def of_header(header: object) -> "Decision | None":
        """Return the decision in a header; None if it is not a header of `as_header`."""
        if not isinstance(header, dict) or set(header) != set(Decision._fields):
            return None
        return Decision(**header)


class DecisionTotals(NamedTuple):
    """Messages that this process has published, by the source of their priority."""

    checked: int = 0  # by the rule
    reset: int = 0  # of these, with count 0: new customers, pauses, lost counts
    inherited: int = 0  # from the message whose handler published them
    fallback: int = 0  # the counts were unavailable, or `customer` raised
    by_hand: int = 0  # explicit priorities and retries
    without_customer: int = 0


class Decider:
    """Applies the rule to messages; falls back while the counts are unavailable."""

    def __init__(
        self, counts: Place, *, rule: Rule | None = None, fallback: int | None = FALLBACK
    ) -> None:
        if fallback is not None and not 1 <= fallback <= LEVELS:
            raise ValueError(f"fallback is {fallback}; it must be from 1 to {LEVELS}, or None")
        self._rule = rule or Rule()
        if isinstance(counts, str | os.PathLike):
            counts = open_counts(counts, rule=self._rule)
        self.counts = counts
        self._fallback = fallback
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(DecisionTotals._fields, 0)
        self._retry_at = 0.0
        self._silent_until: dict[str, float] = {}

    def totals(self) -> DecisionTotals:
        with self._lock:
            return DecisionTotals(**self._totals)

    def add(self, name: str) -> None:
        with self._lock:
            self._totals[name] += 1

    def decide(
        self, customer: Customer, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Decision | None:
        """Return the decision for a message, or None if it has no customer."""
        try:
            known = customer_name(customer(name, args, kwargs))
        except Exception as error:
            return self.fall_back(None, error)
        if known is None:
            self.add("without_customer")
            return None
        return self.begin(known)()

    def begin(self, customer: str) -> Callable[[], Decision]:
        """Request the count; return a function that waits for the decision."""
        if self._retry_at and self._is_paused():
            pause = StoreUnavailable(f"the counts failed less than {PAUSE_S:g} s ago")
            return lambda: self.fall_back(customer, pause)
        try:
            answer = self.counts.begin(customer)
        except Exception as error:
            failure = self._pause_after(error)
            return lambda: self.fall_back(customer, failure)
        return partial(self._decide, customer, answer)

    def concern(self, error: StoreError) -> str:
        """Return a warning about unavailable counts, with its consequence."""
        if self._fallback is None:
            effect = "tasks with a customer cannot be published"
        else:
            effect = f"tasks with a customer are published with priority {self._fallback}"
        return f"no counts: {error}; until they are available, {effect}. Check the URL in counts="

    def inherit(self, parent: Decision, made: int) -> Decision | None:
        """Return the decision of a child, if it is one of the parent's first 20 children."""
        if made >= CHILDREN_UNCHECKED_MAX:
            return None
        self.add("inherited")
        return parent._replace(by="parent")

    def fall_back(self, customer: str | None, error: Exception) -> Decision:
        """Return the fallback decision; raise the error if there is no fallback."""
        self.add("fallback")
        if self._fallback is None:
            raise error
        self._log(error)
        return Decision(customer, None, self._fallback, "fallback")

    def _decide(self, customer: str, answer: Answer) -> Decision:
        try:
            count = answer()
        except Exception as error:
            return self.fall_back(customer, self._pause_after(error))
        totals = self._totals
        with self._lock:
            totals["checked"] += 1
            if not count:
                totals["reset"] += 1
        if self._retry_at:
            self._resume()
        return Decision(customer, count, self._rule.priority(count), "check")

    def _is_paused(self) -> bool:
        with self._lock:
            if not self._retry_at:
                return False  # another thread has resumed
            now = stopwatch()
            if now < self._retry_at:
                return True
            self._retry_at = now + PAUSE_S  # this thread retries; the others stay paused
            return False

    def _resume(self) -> None:
        with self._lock:
            was_paused, self._retry_at = self._retry_at > 0, 0.0
        if was_paused:
            logger.warning("the counts are available again; the rule determines priorities")

    def _pause_after(self, error: Exception) -> StoreError:
        """Start a pause; return the error as a `StoreError`, even if it is a bug of the counts."""
        with self._lock:
            self._retry_at = stopwatch() + PAUSE_S
        if isinstance(error, StoreError):
            return error
        failure = StoreUnavailable(f"the counts failed: {error!r}")
        failure.__cause__ = error
        return failure

    def _log(self, error: Exception) -> None:
        kind = type(error).__name__
        with self._lock:
            now = stopwatch()
            if now < self._silent_until.get(kind, 0.0):
                return
            self._silent_until[kind] = now + SILENCE_S
        cause = error if isinstance(error, StoreError) else f"customer= failed: {error!r}"
        logger.warning(
            "published with priority %s without a count: %s "
            "(logged once a minute; totals() counts all)",
            self._fallback,
            cause,
        )


class DecidingMiddleware:
    """The parameters of the middleware of Dramatiq and Taskiq, and its totals."""

    def __init__(
        self,
        *,
        customer: Customer,
        counts: Place,
        rule: Rule | None = None,
        fallback: int = FALLBACK,
    ) -> None:
        super().__init__()
        self._customer = customer
        self._decider = Decider(counts, rule=rule, fallback=fallback)

    def totals(self) -> DecisionTotals:
        """Return how many messages this process has sent, by the source of their priority."""
        return self._decider.totals()


def customer_name(value: object) -> str | None:
    """Convert a customer to text, such as a number or a UUID; None and "" to None."""
    if value is None or value == "":
        return None
    return identity(value if isinstance(value, str) else str(value), "customer", CUSTOMER_BYTES_MAX)
