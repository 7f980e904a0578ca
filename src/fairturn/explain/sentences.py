"""Explanations as sentences. This is the only module that turns codes into text.

The English messages below are also the keys of the catalogues in `i18n/`. Sentences contain names
and errors unchanged: the caller escapes them for a terminal or a page.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fairturn.clock import SECOND_US
from fairturn.explain.analysis import Explanation
from fairturn.explain.reasons import Code, Reason, Value
from fairturn.i18n import Language, load
from fairturn.model import State


class Message(NamedTuple):
    """A sentence, with a plural form that the parameter named `by` selects."""

    one: str
    many: str | None = None
    by: str = ""


class StateTexts(NamedTuple):
    """The texts for a state: a label, the first sentence of an explanation, and the event of an
    ended state in a timeline."""

    label: Message
    sentence: Message
    event: Message | None = None


STATES = {
    State.DELAYED: StateTexts(
        Message("delayed"), Message("Document {id} does not wait for its turn yet.")
    ),
    State.WAITING: StateTexts(Message("waiting"), Message("Document {id} is waiting.")),
    State.RUNNING: StateTexts(Message("running"), Message("Document {id} is running.")),
    State.COMPLETED: StateTexts(
        Message("completed"), Message("Document {id} is completed."), Message("Completed")
    ),
    State.DEAD: StateTexts(
        Message("dead"), Message("Document {id} failed for good."), Message("Failed for good")
    ),
    State.CANCELLED: StateTexts(
        Message("cancelled"), Message("Document {id} was cancelled."), Message("Cancelled")
    ),
    State.EXPIRED: StateTexts(
        Message("expired"),
        Message("Document {id} expired before it could be processed."),
        Message("Expired"),
    ),
}

# By code; where a code has several messages, `_variant` chooses.
MESSAGES = {
    "priority_first": Message(
        "It has priority {priority}, because it was the first document of its customer since the "
        "last reset: the pending documents count was 0."
    ),
    "priority_counted": Message(
        "It has priority {priority}, because it was document number {document} of its customer "
        "since the last reset: the pending documents count was {count}."
    ),
    "priority_of_parent": Message(
        "It has priority {priority}, like document {parent}, which it was made from."
    ),
    "count_resets": Message(
        "The pending documents count of its customer is now {count}. If nothing more is submitted, "
        "it will be reset in {resets_in}."
    ),
    "count_resets_anyway": Message(
        "The pending documents count of its customer is now {count}. It will be reset in "
        "{resets_in}."
    ),
    "count_is_reset": Message(
        "The reset interval has passed: the pending documents count of its customer is 0 again."
    ),
    "mode_levels": Message("In this queue documents are started by priority, then by submission."),
    "mode_equal": Message(
        "In this queue customers take turns whatever the priority of their documents."
    ),
    "not_due": Message("It is not due yet, but in {due_in}."),
    "retried_later": Message(
        "After {attempts} failed attempt, it will be tried again in {due_in}.",
        "After {attempts} failed attempts, it will be tried again in {due_in}.",
        "attempts",
    ),
    "snoozed": Message("Its handler postponed it. It will be tried again in {due_in}."),
    "returned": Message(
        "A service that it needs was unavailable. It will be tried again in {due_in}."
    ),
    "expiry_passed": Message("Its time to start ran out {expired} ago."),
    "customer_paused": Message(
        "Its customer is paused. Until the pause ends, nothing of this customer is started."
    ),
    "limit_reached": Message(
        "The limit of {limit} running document for its customer is reached. It must end first.",
        "The limit of {limit} running documents for its customer is reached. One of them must end "
        "first.",
        "limit",
    ),
    "limit_ahead": Message(
        "Its customer may have {limit} document running at once, and others of this customer come "
        "before it.",
        "Its customer may have {limit} documents running at once, and others of this customer come "
        "before it.",
        "limit",
    ),
    "kind_paused": Message(
        "Its kind of work, {kind}, is paused. Until the pause ends, nothing of this kind is "
        "started."
    ),
    "kind_limit_reached": Message(
        "The limit of {limit} running document for its kind of work, {kind}, is reached. It must "
        "end first.",
        "The limit of {limit} running documents for its kind of work, {kind}, is reached. One of "
        "them must end first.",
        "limit",
    ),
    "kind_unserved": Message("No running worker serves its kind of work, {kind}."),
    "outage": Message(
        "It waits for {service}, which has been unavailable for {began}. The next attempt is in "
        "{probe_in}."
    ),
    "outage_probed_now": Message(
        "It waits for {service}, which has been unavailable for {began}. The next attempt is due."
    ),
    "outage_of_kind": Message(
        "It waits for a service that its kind of work, {kind}, needs and that has been unavailable "
        "for {began}. The next attempt is in {probe_in}."
    ),
    "outage_of_kind_probed_now": Message(
        "It waits for a service that its kind of work, {kind}, needs and that has been unavailable "
        "for {began}. The next attempt is due."
    ),
    "outage_over": Message(
        "It waits for {service}, which is available again. The work resumes step by step."
    ),
    "outage_of_kind_over": Message(
        "The service that its kind of work, {kind}, needs is available again. The work resumes "
        "step by step."
    ),
    "no_worker": Message("No worker is running."),
    "no_worker_since": Message("No worker is running. The last one was seen {seen} ago."),
    "lease_expired": Message("The worker that had it is gone. Another one will get it."),
    "lease_expired_last": Message("The worker that had it is gone. It will not be tried again."),
    "next": Message("It is the next document to be started."),
    "position": Message(
        "{documents} document will be started before it.",
        "{documents} documents will be started before it.",
        "documents",
    ),
    "position_between": Message(
        "Up to {most} document will be started before it, and at least {least}.",
        "Up to {most} documents will be started before it, and at least {least}.",
        "most",
    ),
    "before_better_levels": Message(
        "Before it: {documents} document of another customer with a better priority.",
        "Before it: {documents} documents of other customers with a better priority.",
        "documents",
    ),
    "before_other_customers": Message(
        "Before it: {documents} turn {of_others}.",
        "Before it: {documents} turns {of_others}.",
        "documents",
    ),
    "before_longest_waiting": Message(
        "Before it: {documents} turn for whoever has waited longest.",
        "Before it: {documents} turns for those who have waited longest.",
        "documents",
    ),
    "before_own": Message(
        "Before it: {documents} document of the same customer.",
        "Before it: {documents} documents of the same customer.",
        "documents",
    ),
    "between_limits": Message(
        "The exact number depends on when running documents of customers with a limit end."
    ),
    "between_costs": Message("The exact number depends on what each of the documents costs."),
    "between_many_turns": Message(
        "The number is not exact, because very many customers have waited long."
    ),
    "between_many_documents": Message(
        "The number is not exact, because there are too many documents to count."
    ),
    "between_unfolded": Message(
        "The number is not exact, because very much has happened since a worker last looked."
    ),
    "weight": Message("Turns are shared by weight, and its customer has weight {weight}."),
    "patience_over": Message(
        "Every tenth start is for whoever has waited longest. It has been the oldest document of "
        "its customer for {since}, and {customers} customer has waited even longer.",
        "Every tenth start is for whoever has waited longest. It has been the oldest document of "
        "its customer for {since}, and {customers} customers have waited even longer.",
        "customers",
    ),
    "patience_first": Message(
        "Every tenth start is for whoever has waited longest. It has been the oldest document of "
        "its customer for {since}, and nobody has waited longer."
    ),
    "starts_now": Message("It will start in a moment."),
    "starts_between": Message(
        "It will start in {earliest} to {latest} (with {confidence}% probability)."
    ),
    "starts_within": Message("It will start within {latest} (with {confidence}% probability)."),
    "starts_after": Message(
        "It will probably not start within {earliest}. When it will cannot be said, because as "
        "much comes in before it as is done."
    ),
    "starts_sometime": Message(
        "When it will start cannot be said, because as much comes in before it as is done."
    ),
    "start_unknown": Message(
        "When it will start cannot be said yet, because no document has ended so far."
    ),
    "workers": Message("Workers: {workers}. Documents running: {running}."),
    "expires": Message("It expires in {expires_in} unless it starts before."),
    "step": Message(
        "It has finished {step} step. The kind of work of the present one is {kind}.",
        "It has finished {step} steps. The kind of work of the present one is {kind}.",
        "step",
    ),
    "running": Message("It has been running for {running}."),
    "running_on": Message("It has been running for {running} on worker {worker}."),
    "stopping": Message("It was asked to stop."),
    "completed": Message("That was {ended} ago. The work took {took}."),
    "completed_on": Message("That was {ended} ago. The work took {took} on worker {worker}."),
    "dead": Message("That was {ended} ago. The error was: {error}"),
    "dead_without_error": Message("That was {ended} ago. No error was recorded."),
    "cancelled": Message("That was {ended} ago."),
    "expired": Message("That was {ended} ago. It had to start before then."),
    "attempts": Message(
        "It had {attempts} attempt; {attempts_max} are allowed.",
        "It had {attempts} attempts; {attempts_max} are allowed.",
        "attempts",
    ),
    "last_error": Message("The last error was: {error}"),
    "waited": Message("It waited {waited} for its start."),
    "waited_again": Message("Its last attempt began {waited} after it was submitted."),
    "served_meanwhile": Message(
        "Meanwhile {documents} document {of_customers} was started.",
        "Meanwhile {documents} documents {of_customers} were started.",
        "documents",
    ),
    "served_at_least": Message(
        "Meanwhile at least {documents} document {of_customers} was started.",
        "Meanwhile at least {documents} documents {of_customers} were started.",
        "documents",
    ),
}

PHRASES = {
    "of_others": Message("of another customer", "of {n} other customers"),
    "of_customers": Message("of one customer", "of {n} customers"),
    "largest": Message("By customer: {names}."),
    "largest_of_many": Message("By customer: {names} and others."),
    "under_a_second": Message("less than a second"),
    "two_units": Message("{first} {second}"),
    "second": Message("{n} second", "{n} seconds"),
    "minute": Message("{n} minute", "{n} minutes"),
    "hour": Message("{n} hour", "{n} hours"),
    "day": Message("{n} day", "{n} days"),
}
_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def tell(explanation: Explanation, language: str = "en") -> list[str]:
    """Return the explanation as sentences; the first states the state of the document."""
    formatter = _Formatter(load(language))
    sentences = [formatter.format(STATES[_state(explanation)].sentence, {"id": explanation.id})]
    for reason in explanation.reasons:
        sentences += formatter.sentences(reason)
    return sentences


def duration(us: int, language: Language) -> str:
    """Return a duration in words."""
    return _Formatter(language).duration(us)


class _Formatter:
    """Formats sentences in one language."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def sentences(self, reason: Reason) -> Iterator[str]:
        """Yield a reason as a sentence, and a second sentence with customers' names, if any."""
        values = reason.parameters
        message = MESSAGES[_variant(reason.code, values)]
        yield self.format(message, self._shown(values), values.get(message.by))
        largest = values.get("largest")
        if isinstance(largest, tuple) and largest:
            names = ", ".join(f"{name} ({self.number(n)})" for name, n in largest)
            phrase = "largest" if len(largest) == values["customers"] else "largest_of_many"
            yield self.format(PHRASES[phrase], {"names": names})

    def format(self, message: Message, values: Mapping[str, str], n: Value = 1) -> str:
        """Return the translated message with these values."""
        one, many, _ = message
        n = n if isinstance(n, int) else 1
        return self._language.find(one, many, n).format_map(values)

    def _shown(self, values: Mapping[str, Value]) -> dict[str, str]:
        """Return the parameters as text; the names of durations lose their unit."""
        shown: dict[str, str] = {}
        for name, value in values.items():
            if name.endswith("_us") and isinstance(value, int):
                shown[name.removesuffix("_us")] = self.duration(value)
            elif name == "confidence" and isinstance(value, float):
                shown[name] = f"{value:.0%}".rstrip("%")
            elif name == "customers" and isinstance(value, int):
                shown[name] = self.number(value)
                shown["of_others"] = self.counted("of_others", value)
                shown["of_customers"] = self.counted("of_customers", value)
            elif isinstance(value, int | float):
                shown[name] = self.number(value)
            elif isinstance(value, str):
                shown[name] = value
        return shown

    def counted(self, phrase: str, n: int) -> str:
        return self.format(PHRASES[phrase], {"n": self.number(n)}, n)

    def number(self, value: float) -> str:
        return self._language.number(value)

    def duration(self, us: int) -> str:
        """Return a duration in its two largest units, or one if its number is 10 or more."""
        seconds = round(us / SECOND_US)
        if seconds == 0:
            return self.format(PHRASES["under_a_second"], {})
        parts = []
        for unit, length in _UNITS:
            n, seconds = divmod(seconds, length)
            if n:
                parts.append(self.counted(unit, n))
            if n >= 10 or len(parts) == 2:
                break
        if len(parts) == 1:
            return parts[0]
        return self.format(PHRASES["two_units"], {"first": parts[0], "second": parts[1]})


_NOT_DUE = {Code.NOT_DUE, Code.RETRIED_LATER, Code.SNOOZED, Code.RETURNED}


def _state(explanation: Explanation) -> State:
    """Return the state after the next claim has folded due documents, expired leases and expired
    documents."""
    codes = {reason.code for reason in explanation.reasons}
    if Code.EXPIRY_PASSED in codes:
        return State.EXPIRED
    late = explanation.state is State.DELAYED and not codes & _NOT_DUE
    return State.WAITING if late or Code.LEASE_EXPIRED in codes else explanation.state


def _variant(code: Code, values: Mapping[str, Value]) -> str:
    """Return the key of the message for a reason, which may depend on its parameters."""
    if code is Code.COUNT_RESETS and values["reset"] == "periodic":
        return "count_resets_anyway"
    if code is Code.NO_WORKER and values["seen_us"] is not None:
        return "no_worker_since"
    if code is Code.PATIENCE_OVER and values["customers"] == 0:
        return "patience_first"
    if code is Code.RUNNING and values["worker"] is not None:
        return "running_on"
    if code is Code.COMPLETED and values["worker"] is not None:
        return "completed_on"
    if code is Code.STARTS_AFTER and not _at_least_a_second(values["earliest_us"]):
        return "starts_sometime"
    if code is Code.DEAD and values["error"] is None:
        return "dead_without_error"
    if code is Code.WAITED and (values["attempts"] != 1 or values["step"] != 0):
        return "waited_again"
    if code is Code.OUTAGE_OVER and values["service"] is None:
        return "outage_of_kind_over"
    if code is Code.OUTAGE:
        name = "outage_of_kind" if values["service"] is None else "outage"
        return name if values["probe_in_us"] else f"{name}_probed_now"
    return code


def _at_least_a_second(us: Value) -> bool:
    return isinstance(us, int) and us >= SECOND_US
