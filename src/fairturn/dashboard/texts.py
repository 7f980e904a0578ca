"""Every text of the pages, by key, in English. `i18n/` has the other languages."""

from collections.abc import Mapping

from fairturn.explain.sentences import STATES, Message

# On every page.
FRAME = {
    "nav": Message("Pages"),
    "nav_now": Message("Now"),
    "nav_customers": Message("Customers"),
    "nav_documents": Message("Documents"),
    "nav_what_if": Message("What if"),
    "nav_rules": Message("How priorities work"),
    "nav_own": Message("My documents"),
    "skip": Message("Skip to the content"),
    "find": Message("Find a document or customer"),
    "find_label": Message("Find by id, name or customer"),
    "language": Message("Language"),
    "log_in": Message("Log in"),
    "log_out": Message("Log out"),
    "live": Message("live"),
    "polling": Message("refreshed every few seconds"),
    "cut_off": Message("cut off"),
    "cut_off_long": Message(
        "The service does not answer. What you see is from {at}. This page tries again by itself."
    ),
    "workers_n": Message("{n} worker", "{n} workers", "n"),
    "documents_n": Message("{n} document", "{n} documents", "n"),
    "customers_n": Message("{n} customer", "{n} customers", "n"),
    "key_title": Message("Your access key"),
    "key_label": Message("Access key"),
    "key_help": Message(
        "It begins with ft_ and was shown to you once, when it was made. It is not kept in this "
        "browser."
    ),
    "token_help": Message(
        "There are no access keys yet. Enter the token that fairturn printed when it started."
    ),
    "key_refused": Message("This key is not known, or it has ended."),
    "session_ended": Message("Your session has ended. Log in again to go on."),
    "problem_back": Message("Back to the start"),
    "keys_title": Message("Keyboard"),
    "keys_search": Message("search"),
    "keys_list": Message("this list"),
    "close": Message("Close"),
    "table_behind": Message("The same as a table"),
}

# How priorities work.
RULES = {
    "rules_title": Message("How priorities work"),
    "rules_lead": Message(
        "Every document gets a priority from 1 to 9 when it is submitted. Documents of a better "
        "priority are processed before those of a worse one; 1 is the best. The rule is the same "
        "for every customer, and these are the settings in force here."
    ),
    "rules_count_title": Message("The pending documents count"),
    "rules_count": Message(
        "Each customer has a pending documents count. It starts at 0 and goes down by one with "
        "each document that is submitted. It does not rise when a document is done."
    ),
    "rules_reset_title": Message("The reset interval: {interval}"),
    "rules_reset_idle": Message(
        "When more than {interval} have passed since your last document, the next one finds the "
        "count at 0 again. Every document starts the interval anew, so a pause is what resets it."
    ),
    "rules_reset_periodic": Message(
        "When more than {interval} have passed since the last reset, the next document finds the "
        "count at 0 again, also without a pause."
    ),
    "rules_fixed_title": Message("A priority stays"),
    "rules_fixed": Message(
        "A document keeps the priority that it got when it was submitted. A reset does not change "
        "documents that already wait, and a document that is tried again costs nothing."
    ),
    "rules_turns_title": Message("What turns add"),
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
    "rules_table_title": Message("The nine priorities"),
    "rules_table_lead": Message(
        "Find the count on the left. On the right it says which documents that is, if many are "
        "submitted one after another without a pause."
    ),
    "rules_col_count": Message("Pending documents count"),
    "rules_col_priority": Message("Priority"),
    "rules_col_documents": Message("Documents without a pause"),
    "rules_and_below": Message("{count} and below"),
    "rules_and_later": Message("{document} and later"),
    "rules_from_to": Message("{first} to {last}"),
    "rules_no_document": Message("no document"),
    "calc_title": Message("Which priorities will my documents get?"),
    "calc_lead": Message(
        "With the settings of this queue, beginning with a count that has just been reset."
    ),
    "calc_documents": Message("How many documents"),
    "calc_apart": Message("Seconds between two documents"),
    "calc_go": Message("Work it out"),
    "calc_all_best": Message(
        "All {n} get priority 1: they are far enough apart for the count to be reset each time."
    ),
    "calc_range": Message("The first gets priority 1, the last gets priority {last}."),
    "calc_one": Message("One document gets priority 1."),
    "calc_resets": Message(
        "The count is reset {n} time in between.", "The count is reset {n} times in between.", "n"
    ),
    "calc_first": Message("from number {first} on"),
}

# Now.
NOW = {
    "banner_no_worker": Message("No worker is running. Documents are accepted, and wait."),
    "banner_died": Message(
        "{shown} document died within the last 5 minutes.",
        "{shown} documents died within the last 5 minutes.",
        "n",
    ),
    "banner_retrying": Message(
        "{shown} document failed and will be retried.",
        "{shown} documents failed and will be retried.",
        "n",
    ),
    "banner_paused": Message("{n} customer is paused:", "{n} customers are paused:", "n"),
    "tile_waiting": Message("Waiting"),
    "tile_waiting_most": Message("{n} of them: {customer}"),
    "tile_waiting_none": Message("nothing waits"),
    "tile_running": Message("Running"),
    "tile_of": Message("of {n}"),
    "tile_completed": Message("Completed per minute"),
    "tile_served": Message("{n} customer served", "{n} customers served", "n"),
    "tile_quiet": Message("Quiet customers wait (p99)"),
    "tile_first_come": Message("first come, first served: ≈ {wait}"),
    "tile_first_come_how": Message("Estimated: what waits, at the pace of the last minute."),
    "tile_first_come_unknown": Message("within the last 5 minutes"),
    "tile_oldest": Message("Oldest waiting"),
    "tile_oldest_level": Message("in level {level}"),
    "tile_dead": Message("Dead"),
    "tile_retrying": Message(
        "{shown} document will be retried", "{shown} documents will be retried", "n"
    ),
    "lanes_title": Message("Who is next"),
    "lanes_lead": Message(
        "Nine priorities, best first. Documents leave on the right; inside a level customers take "
        "turns."
    ),
    "lanes_foot": Message(
        "Left: how many wait. Right: how long the oldest of them has waited. Two letters and a "
        "colour stand for a customer."
    ),
    "lane_oldest": Message("The oldest of them has waited so long"),
    "priority_n": Message("Priority {n}"),
    "running_title": Message("In the workers"),
    "running_lead": Message("{n} of {slots} slots busy"),
    "running_none": Message("Nothing is running."),
    "why_title": Message("Why does this document wait?"),
    "why_place": Message("Number {n} in line"),
    "before_better": Message("{n} with a better priority", "{n} with better priorities", "n"),
    "before_turns": Message("{n} turn of another customer", "{n} turns of other customers", "n"),
    "before_longest": Message(
        "{n} turn for the longest waiting", "{n} turns for the longest waiting", "n"
    ),
    "before_own": Message("{n} own, earlier", "{n} own, earlier ones", "n"),
    "waits_title": Message("How long documents wait"),
    "waits_lead": Message(
        "Last {n} minutes, logarithmic; thick p99, thin p50; from what this service has seen. "
        "Quiet: less than their fair share of the work of the last 5 minutes. First come, first "
        "served is estimated: what waits, at the pace of the last minute."
    ),
    "waits_none": Message("Nothing has been started yet."),
    "chart_quiet": Message("quiet p99"),
    "chart_busy": Message("busy p99"),
    "chart_quiet_name": Message("quiet"),
    "chart_busy_name": Message("busy"),
    "chart_oldest": Message("oldest"),
    "chart_first_come": Message("first come"),
    "chart_paused": Message("{customer} is paused"),
    "chart_lost": Message("worker {customer} is gone"),
    "loads_title": Message("The workers and their load"),
    "chart_dump": Message("{customer} submits {n}"),
    "col_time": Message("Time"),
    "col_customer": Message("Customer"),
    "col_count": Message("Pending documents count"),
    "col_next": Message("Next"),
    "col_share": Message("Share"),
    "col_p95": Message("p95 wait"),
    "col_resets": Message("Resets in"),
    "share_lead": Message(
        "Share of the work of the last 5 minutes; the line marks the fair share."
    ),
    "share_exact": Message("{share} of the work; {fair} would be fair"),
    "customers_none": Message("No customer has submitted anything lately."),
    "empty_title": Message("Nothing has been submitted yet"),
    "empty_lead": Message("Three steps, and this page shows who is served, and why."),
    "empty_submit": Message("Submit a document"),
    "empty_work": Message("Let a worker run your function on each document"),
    "empty_key": Message("Before others use it, make an access key"),
    "copy": Message("Copy"),
    "copied": Message("Copied"),
}

# Documents, one and many, and the search.
DOCUMENTS = {
    **{f"state_{state}": texts.label for state, texts in STATES.items()},
    "what_happened": Message("What happened"),
    "why_here": Message("Why is it where it is?"),
    "why_place_between": Message("Number {least} to {most} in line"),
    "starts_in": Message("starts in"),
    "timeline_title": Message("Timeline"),
    "event_submitted": Message("Submitted"),
    "event_level": Message("Priority {priority}: it found the count {count}"),
    "event_inherited": Message(
        "It has priority {priority}, like document {parent}, which it was made from."
    ),
    "event_due": Message("Not to be started before"),
    "event_overtaken": Message(
        "{n} other document was started while it waited",
        "{n} other documents were started while it waited",
        "n",
    ),
    "event_overtaken_by": Message(
        "{n} other document was started while it waited: {names}",
        "{n} other documents were started while it waited: {names}",
        "n",
    ),
    "event_claimed": Message("Attempt {n} began, after {waited}"),
    "event_claimed_by": Message("Attempt {n} began, after {waited}, on {worker}"),
    "event_running": Message("It is running"),
    "event_stopping": Message("It was asked to stop"),
    "event_failed": Message("The last error:"),
    **{f"event_{state}": texts.event for state, texts in STATES.items() if texts.event},
    "result_title": Message("Result"),
    "metadata_title": Message("Metadata"),
    "document_title": Message("The document"),
    "fact_parent": Message("Made from"),
    "download": Message("Download"),
    "download_result": Message("Download the result"),
    "retry": Message("Try again"),
    "cancel": Message("Cancel the document"),
    "done_cancelled": Message("It was cancelled; if it runs, it was asked to stop."),
    "done_retried": Message("It waits for its turn again."),
    "col_document": Message("Document"),
    "col_state": Message("State"),
    "col_size": Message("Size"),
    "col_attempts": Message("Attempts"),
    "col_wait": Message("Wait"),
    "col_submitted": Message("Submitted at"),
    "documents_none": Message("No document matches."),
    "search_title": Message("Search:"),
    "search_how": Message("With this in their name, the newest first."),
    "looking": Message("Looking…"),
    "filter": Message("Show"),
    "any": Message("any"),
    "filter_customer": Message("Customer"),
    "filter_name": Message("Name contains"),
    "filter_tag": Message("Tag"),
    "filter_state": Message("State"),
    "filter_priority": Message("Priority"),
    "filter_submitted_from": Message("Submitted from (UTC)"),
    "filter_submitted_before": Message("Submitted before (UTC)"),
    "newest_first": Message("The newest first"),
    "older": Message("Older ones"),
    "looked_at": Message("Looked at the newest {n} documents so far."),
    "bulk_cancel": Message("Cancel all that match"),
    "bulk_retry": Message("Try all that match again"),
    "ask_cancel": Message("Cancel {n} document?", "Cancel {n} documents?", "n"),
    "ask_retry": Message("Try {n} document again?", "Try {n} documents again?", "n"),
    "bulk_how_cancel": Message(
        "Those that wait end at once; those that run are asked to stop. It cannot be taken back."
    ),
    "bulk_how_retry": Message(
        "Those that failed for good wait again, with their old priority and all attempts."
    ),
    "bulk_more": Message("There are more; {n} at a time can be changed."),
    "yes_cancel": Message("Cancel {n} document", "Cancel {n} documents", "n"),
    "yes_retry": Message("Try {n} again"),
    "did_cancel": Message("{n} document was cancelled.", "{n} documents were cancelled.", "n"),
    "did_retry": Message("{n} document waits again.", "{n} documents wait again.", "n"),
    "back": Message("Back"),
}

# Customers, all and one.
CUSTOMERS = {
    "customers_search": Message("Name contains"),
    "customers_by_name": Message("By name, while all are being read"),
    "customers_as_of": Message("Read {ago} ago."),
    "customers_not_found": Message("No customer matches."),
    "col_p50": Message("p50 wait"),
    "col_weight": Message("Weight"),
    "col_limit": Message("Limit"),
    "change": Message("Change"),
    "save": Message("Save"),
    "no_limit": Message("no limit"),
    "col_bytes_max": Message("Bytes of documents"),
    "limit_of_queue": Message("limit of the queue"),
    "pause": Message("Pause"),
    "paused": Message("paused"),
    "resume": Message("Resume"),
    "cancel_all": Message("Cancel all…"),
    "page_before": Message("Page before"),
    "page_after": Message("Next page"),
    "page_of": Message("Page {page} of {pages}"),
    "count_title": Message("The pending documents count over time"),
    "count_lead": Message(
        "Each document lowers it by one; dotted lines are resets; the bands are the priorities, "
        "1 at the top. From the newest 500 documents."
    ),
    "count_none": Message("There are too few documents to draw."),
    "settings_title": Message("Settings"),
    "settings_lead": Message(
        "The weight is its share of turns; the limit is how many of its documents may run at once."
    ),
    "done_saved": Message("It is in force now."),
    "done_revoked": Message("The key opens nothing any more."),
    "keys_of_title": Message("Access keys"),
    "keys_of_lead": Message("Each submits and sees the documents of this customer alone."),
    "keys_first": Message(
        "The first key is an operator's. Make it on the command line: fairturn keys make"
    ),
    "key_name": Message("For what"),
    "key_make": Message("Make a key"),
    "key_made": Message("The new key"),
    "key_made_how": Message("It is shown this once. Copy it now."),
    "key_used": Message("last used {ago} ago"),
    "key_unused": Message("never used"),
    "key_ended": Message("ended"),
    "revoke": Message("Revoke"),
    "newest_documents": Message("Newest documents"),
    "all_documents": Message("All documents"),
    "standing_reset": Message("it has been reset"),
    "standing_resets_in": Message("reset in"),
    "standing_next": Message("Priority of the next document"),
    "standing_next_note": Message("1 is served first, 9 last"),
    "standing_delayed": Message("{n} more delayed"),
    "standing_limit": Message("{n} at most"),
    "standing_wait": Message("Wait (p95)"),
}

# A customer's own view.
OWN = {
    "own_lead": Message("Only you see this page: it shows the documents of your key alone."),
    "upload_title": Message("Submit documents"),
    "upload_how": Message("Drop files here, or choose them."),
    "upload_choose": Message("Choose files"),
    "upload_go": Message("Submit"),
    "upload_limit": Message("Up to {size} each."),
    "upload_waiting": Message("waits for the one before"),
    "upload_sending": Message("being sent"),
    "upload_done": Message("submitted"),
    "upload_failed": Message("not submitted"),
    "upload_too_large": Message("not submitted: too large"),
    "submitted_one": Message("Submitted."),
    "own_documents": Message("My documents, the newest first"),
    "own_none": Message("You have not submitted anything yet."),
    "own_newest": Message("The newest {n} are shown. Others can be found by their id or name."),
    "col_place": Message("In line"),
    "col_starts": Message("Starts in"),
    "place_nth": Message("number {n}"),
}

# What if, and the demo.
WHAT_IF = {
    "whatif_lead": Message(
        "The documents that this queue has completed, up to the newest {n}, are served again by "
        "a simulator: once as now, once as you choose. Nothing of the queue is changed."
    ),
    "whatif_choose": Message("What would you change?"),
    "whatif_mode": Message("Order"),
    "whatif_workers": Message("Worker slots"),
    "whatif_reset": Message("Reset"),
    "whatif_interval": Message("Reset interval in seconds"),
    "whatif_weights": Message("Weights, one customer a line"),
    "whatif_go": Message("Simulate"),
    "whatif_running": Message("The simulation runs"),
    "whatif_nothing": Message("There is no history yet"),
    "whatif_nothing_how": Message("It is made of completed documents, and there are none."),
    "whatif_failed": Message("The simulation could not be done"),
    "whatif_failed_how": Message(
        "A weight names a customer who is not in the history, or is out of bounds."
    ),
    "whatif_outcome": Message("How long customers would have waited"),
    "whatif_simulated": Message(
        "Simulated: {n} documents of {customers} customers, from submission to start."
    ),
    "whatif_before": Message("As now"),
    "whatif_after": Message("As chosen"),
    "whatif_p99": Message("p99, before and after"),
    "mode_fair": Message("fair: levels, then turns"),
    "mode_levels": Message("nine levels alone"),
    "mode_equal": Message("turns without levels"),
    "mode_fifo": Message("first come, first served"),
    "reset_idle": Message("after a pause of"),
    "reset_periodic": Message("periodically, every"),
    "slots_n": Message("{n} slot", "{n} slots", "n"),
    "group_small": Message("{n} small customer", "{n} small customers", "n"),
    "group_large": Message("{n} large customer", "{n} large customers", "n"),
    "demo_load": Message("Load the demo"),
    "demo_load_how": Message(
        "In memory, beside this queue: one customer dumps 2,000 documents, ten quiet ones go on."
    ),
    "demo_remove": Message("Remove the demo"),
    "demo_title": Message("The demo: zeppelin dumps 2,000 documents, ten quiet customers go on"),
    "demo_lead": Message(
        "It runs in memory, with two slots in a worker of its own, and touches nothing of your "
        "queue. The reset interval is little more than a second here. It ends by itself after ten "
        "minutes."
    ),
    "demo_compared": Message("How long the quiet customers wait (p99)"),
    "demo_compared_how": Message(
        "One customer has dumped 2,000 documents, ten quiet ones send one a second. The same "
        "arrivals in three orders."
    ),
    "demo_fifo": Message("First come, first served"),
    "demo_levels": Message("Nine levels alone"),
    "demo_fair": Message("Fair, as here"),
    "simulated": Message("simulated"),
    "measured": Message("measured now"),
}

TEXTS: Mapping[str, Message] = {**FRAME, **RULES, **NOW, **DOCUMENTS, **CUSTOMERS, **OWN, **WHAT_IF}
