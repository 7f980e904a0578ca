"""The history of a real queue as a trace: arrivals, customers, kinds of work, run times."""

import csv
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TextIO

from fairturn.clock import SECOND_US
from fairturn.model import DEFAULT_KIND_NAME, Document
from fairturn.scheduling.flows import WEIGHT_ONE
from fairturn.simulator.trace import Growing, Trace

_ROWS_AT_ONCE = 10_000


def trace_of(
    newest_first: Iterable[Document], *, progress: Callable[[int], None] = lambda read: None
) -> Trace:
    """Return a trace of completed documents, starting at 0.

    It uses 32 bytes per document. Where the clock stepped back, no time passes, as in the rule. The
    cost is the run time of the last attempt, measured by its worker. If all documents are of the
    default kind, the trace has no kinds. `progress` is called with the number of documents read."""
    names: dict[str, int] = {}
    kinds: dict[str, int] = {}
    at, customer, cost, kind = array("q"), array("l"), array("q"), array("l")
    for document in newest_first:
        assert document.claimed_at_us is not None
        assert document.ended_at_us is not None
        at.append(document.submitted_at_us)
        customer.append(names.setdefault(document.customer, len(names)))
        kind.append(kinds.setdefault(document.kind, len(kinds)))
        # Without a reported run time, the time from claim to outcome, which is longer for a
        # prefetched document.
        since_claimed_us = max(0, document.ended_at_us - document.claimed_at_us)
        cost.append(since_claimed_us if document.real_cost is None else document.real_cost)
        if len(at) % _ROWS_AT_ONCE == 0:
            progress(len(at))
    growing, by_number = Growing(), list(names)
    kind_names: list[str | None] = [None] if kinds.keys() <= {DEFAULT_KIND_NAME} else list(kinds)
    begun = last = at[-1] if at else 0
    for timestamp, number, cost_us, kind_number in zip(
        reversed(at), reversed(customer), reversed(cost), reversed(kind), strict=True
    ):
        last = max(last, timestamp)
        growing.add(last - begun, by_number[number], cost_us, kind_names[kind_number])
    return growing.trace


def anonymous(trace: Trace) -> None:
    """Replace names by numbers."""
    trace.names = [f"customer-{number}" for number in range(1, len(trace.names) + 1)]


def set_weights(trace: Trace, weights: Mapping[str, int]) -> None:
    """Set weights from each customer's first document on. Weights of 1 are omitted."""
    by_number = ((number, weights.get(name)) for number, name in enumerate(trace.names))
    trace.set_weights({number: w for number, w in by_number if w not in (None, WEIGHT_ONE)})


def write(
    trace: Trace, out: TextIO, *, progress: Callable[[int], None] = lambda written: None
) -> None:
    """Write the CSV that `fairturn replay` and `fairturn simulate` read."""
    # Before Python 3.13, csv does not quote a field with a carriage return.
    quoted = any("\r" in name for name in trace.names)
    writer = csv.writer(
        out, lineterminator="\n", quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
    )
    optional = {"weight": trace.weight, "kind": trace.kinds}
    writer.writerow(["at_s", "customer", "cost_s", *(name for name in optional if optional[name])])
    rows = _rows(trace)
    written = 0
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        writer.writerows(batch)
        written += len(batch)
        progress(written)


def _rows(trace: Trace) -> Iterator[list[str]]:
    for n, (at, customer, cost) in enumerate(
        zip(trace.at, trace.customer, trace.cost, strict=True)
    ):
        row = [_seconds(at), trace.names[customer], _seconds(cost)]
        if trace.weight:
            weight = trace.weight.get(n)
            row.append("" if weight is None else f"{weight / WEIGHT_ONE:g}")
        if trace.kinds:
            row.append(trace.kinds[trace.kind[n]])
        yield row


def _seconds(us: int) -> str:
    whole, rest = divmod(us, SECOND_US)
    return f"{whole}.{rest:06}" if rest else str(whole)
