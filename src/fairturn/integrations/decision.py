"""What the rule says about one message of a customer, whatever becomes of the counts.

A publisher must not fail because a priority cannot be found out. Where the counts do not answer,
the message gets the priority `fallback`, it is counted, and for a second nobody asks them again, so
that a long outage costs the publishers next to nothing.
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
PAUSE_S = 1.0  # between two attempts to reach counts that did not answer
SILENCE_S = 60.0  # between two lines of the log about the same trouble

# Whose message it is, by its name, args and kwargs; None if it is nobody's.
Customer = Callable[[str, Sequence[Any], Mapping[str, Any]], object]
# Where counts are: an address, the name of a file, or counts that were opened.
Place = str | os.PathLike[str] | Counts

logger = logging.getLogger("fairturn.integrations")


class Decision(NamedTuple):
    """Count and priority of one message, and where they come from."""

    customer: str | None
    count: int | None  # type: ignore[assignment]  # the rule's word; nobody counts a tuple's items
    priority: int
    by: str  # "check", "parent" or "fallback"

    def as_header(self) -> dict[str, str | int | None]:
        """As it travels with the message."""
        customer, count, priority, by = self
        return {"customer": customer, "count": count, "priority": priority, "by": by}

    @staticmethod
    def of_header(header: object) -> "Decision | None":
        """What a header says, if it is one of ours."""
        if not isinstance(header, dict) or set(header) != set(Decision._fields):
            return None
        return Decision(**header)


class Totals(NamedTuple):
    """How many messages this process has published, by how their priority came about."""

    checked: int = 0  # the rule decided
    reset: int = 0  # of these, how many found the count at 0: new customers, pauses, lost counts
    inherited: int = 0  # from the message that was being worked on
    fallback: int = 0  # the counts did not answer, or the customer could not be told
    by_hand: int = 0  # the caller gave a priority, or it was a retry
    without_customer: int = 0


class Decider:
    """The rule, its counts, and what happens when they do not answer."""

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
        self._totals = dict.fromkeys(Totals._fields, 0)
        self._ask_again_at = 0.0
        self._silent_until: dict[str, float] = {}

    def totals(self) -> Totals:
        """What happened so far in this process."""
        with self._lock:
            return Totals(**self._totals)

    def add(self, name: str) -> None:
        """Count one message."""
        with self._lock:
            self._totals[name] += 1

    def decide(
        self, customer: Customer, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Decision | None:
        """The decision over a message, or None if it has no customer."""
        try:
            known = customer_name(customer(name, args, kwargs))
        except Exception as error:
            return self.fall_back(None, error)
        if known is None:
            self.add("without_customer")
            return None
        return self.begin(known)()

    def begin(self, customer: str) -> Callable[[], Decision]:
        """Begin to decide; what comes back waits for the decision."""
        if self._ask_again_at and self._pauses():
            pause = StoreUnavailable("the counts did not answer a moment ago")
            return lambda: self.fall_back(customer, pause)
        try:
            answer = self.counts.begin(customer)
        except Exception as error:
            failure = self._pause_after(error)
            return lambda: self.fall_back(customer, failure)
        return partial(self._decide, customer, answer)

    def concern(self, error: StoreError) -> str:
        """What it means for an operator that the counts do not answer."""
        if self._fallback is None:
            meaning = "nothing that has a customer can be published"
        else:
            meaning = f"all that has a customer is published with priority {self._fallback}"
        return f"no counts: {error} (until they answer, {meaning}; is counts= the right place?)"

    def inherit(self, parent: Decision, made: int) -> Decision | None:
        """What a message takes over from the one whose work made it, as the first of 20."""
        if made >= CHILDREN_UNCHECKED_MAX:
            return None
        self.add("inherited")
        return parent._replace(by="parent")

    def fall_back(self, customer: str | None, error: Exception) -> Decision:
        """The decision without a count; or the error, where that is what was asked for."""
        self.add("fallback")
        if self._fallback is None:
            raise error
        self._say_sometimes(error)
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
        if self._ask_again_at:
            self._go_on()
        return Decision(customer, count, self._rule.priority(count), "check")

    def _pauses(self) -> bool:
        """Whether the counts are left alone for another moment, after they did not answer."""
        with self._lock:
            if not self._ask_again_at:
                return False  # another thread has just been answered
            now = stopwatch()
            if now < self._ask_again_at:
                return True
            self._ask_again_at = now + PAUSE_S  # one asks, and the others wait for how that goes
            return False

    def _go_on(self) -> None:
        """The counts have answered after a pause."""
        with self._lock:
            back, self._ask_again_at = self._ask_again_at > 0, 0.0
        if back:
            logger.warning("the counts answer again: the rule decides over priorities")

    def _pause_after(self, error: Exception) -> StoreError:
        """Pause, and return what to report. Whatever the counts raise, also by a defect of theirs,
        a publication goes on without a count."""
        with self._lock:
            self._ask_again_at = stopwatch() + PAUSE_S
        if isinstance(error, StoreError):
            return error
        failure = StoreUnavailable(f"the counts failed: {error!r}")
        failure.__cause__ = error
        return failure

    def _say_sometimes(self, error: Exception) -> None:
        kind = type(error).__name__
        with self._lock:
            now = stopwatch()
            if now < self._silent_until.get(kind, 0.0):
                return
            self._silent_until[kind] = now + SILENCE_S
        # A KeyError says nothing but the key.
        said = error if isinstance(error, StoreError) else f"customer= told no customer: {error!r}"
        logger.warning(
            "published with priority %s, because there was no count: %s "
            "(said once a minute; the totals have them all)",
            self._fallback,
            said,
        )


def customer_name(value: object) -> str | None:
    """A customer as text: numbers and UUIDs as they are written; None and "" mean that there is
    none."""
    if value is None or value == "":
        return None
    return identity(value if isinstance(value, str) else str(value), "customer", CUSTOMER_BYTES_MAX)
