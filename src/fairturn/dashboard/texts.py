"""The texts that pages choose by a value, by key, in English. All others are in the templates."""

from collections.abc import Mapping

from fairturn.explain.sentences import STATES, Message

LABELS: Mapping[str, Message] = {
    # How priorities work.
    "rules_reset_idle": Message(
        "When more than {interval} have passed since your last document, the next one finds the "
        "count at 0 again. Every document starts the interval anew, so a pause is what resets it."
    ),
    "rules_reset_periodic": Message(
        "When more than {interval} have passed since the last reset, the next document finds the "
        "count at 0 again, also without a pause."
    ),
    "rules_turns_fair": Message(
        "Inside one priority, customers take turns: whoever has many documents waiting does not "
        "hold up those who have few. And every tenth start is for whoever has waited longest, so "
        "that nothing waits for ever."
    ),
    "rules_turns_equal": Message(
        "In this queue customers take turns whatever the priority of their documents: whoever has "
        "many documents waiting does not hold up those who have few."
    ),
    "rules_turns_levels": Message(
        "Inside one priority, documents are processed in the order in which they were submitted."
    ),
    # Now.
    "before_better": Message("{n} with a better priority", "{n} with better priorities"),
    "before_turns": Message("{n} turn of another customer", "{n} turns of other customers"),
    "before_longest": Message(
        "{n} turn for the longest waiting", "{n} turns for the longest waiting"
    ),
    "before_own": Message("{n} own, earlier", "{n} own, earlier ones"),
    "chart_paused": Message("{customer} is paused"),
    "chart_lost": Message("worker {customer} is gone"),
    "chart_dump": Message("{customer} submits {n}"),
    # Documents: states, events, filters, actions.
    **{f"state_{state}": texts.label for state, texts in STATES.items()},
    "event_submitted": Message("Submitted"),
    "event_level": Message("Priority {priority}: it found the count {count}"),
    "event_inherited": Message(
        "It has priority {priority}, like document {parent}, which it was made from."
    ),
    "event_due": Message("Not to be started before"),
    "event_overtaken": Message(
        "{n} other document was started while it waited",
        "{n} other documents were started while it waited",
    ),
    "event_overtaken_by": Message(
        "{n} other document was started while it waited: {names}",
        "{n} other documents were started while it waited: {names}",
    ),
    "event_claimed": Message("Attempt {n} began, after {waited}"),
    "event_claimed_by": Message("Attempt {n} began, after {waited}, on {worker}"),
    "event_running": Message("It is running"),
    "event_stopping": Message("It was asked to stop"),
    "event_failed": Message("The last error:"),
    **{f"event_{state}": texts.event for state, texts in STATES.items() if texts.event},
    "outcome_failed": Message("failed"),
    "outcome_lost": Message("worker gone"),
    "outcome_advanced": Message("step finished"),
    "filter_customer": Message("Customer"),
    "filter_name": Message("Name contains"),
    "filter_tag": Message("Tag"),
    "filter_kind": Message("Kind of work"),
    "filter_state": Message("State"),
    "filter_priority": Message("Priority"),
    "filter_submitted_from": Message("Submitted from (UTC)"),
    "filter_submitted_before": Message("Submitted before (UTC)"),
    "bulk_cancel": Message("Cancel all that match"),
    "bulk_retry": Message("Try all that match again"),
    "ask_cancel": Message("Cancel {n} document?", "Cancel {n} documents?"),
    "ask_retry": Message("Try {n} document again?", "Try {n} documents again?"),
    "bulk_how_cancel": Message(
        "Those that wait end at once; those that run are asked to stop. It cannot be taken back."
    ),
    "bulk_how_retry": Message(
        "Those that failed for good wait again, with their old priority and all attempts."
    ),
    "yes_cancel": Message("Cancel {n} document", "Cancel {n} documents"),
    "yes_retry": Message("Try {n} again"),
    # Done.
    "done_cancelled": Message("It was cancelled; if it runs, it was asked to stop."),
    "done_retried": Message("It waits for its turn again."),
    "done_saved": Message("It is in force now."),
    "done_revoked": Message("The key opens nothing any more."),
    # What if.
    "mode_fair": Message("fair: levels, then turns"),
    "mode_levels": Message("nine levels alone"),
    "mode_equal": Message("turns without levels"),
    "mode_fifo": Message("first come, first served"),
    "reset_idle": Message("after a pause of"),
    "reset_periodic": Message("periodically, every"),
    "group_small": Message("{n} small customer", "{n} small customers"),
    "group_large": Message("{n} large customer", "{n} large customers"),
}
