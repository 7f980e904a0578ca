"""The history of a real queue as a trace: who sent what when, and how long it ran."""

import csv
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TextIO

from fairturn.clock import SECOND_US
from fairturn.model import Document
from fairturn.scheduling.flows import WEIGHT_ONE
from fairturn.simulator.trace import Trace

_ROWS_AT_ONCE = 10_000


def trace_of(
    newest_first: Iterable[Document], *, progress: Callable[[int], None] = lambda read: None
) -> Trace:
    """Completed documents, the newest first as a queue gives them, as a trace from 0 on.

    A document takes 24 bytes here. A clock that stepped back counts as no time passed, as in the
    rule; the cost is the run time of the last attempt, as its worker measured it. `progress` hears
    how many were read."""
    names: dict[str, int] = {}
    at, customer, cost = array("q"), array("l"), array("q")
    for document in newest_first:
        assert document.claimed_at is not None
        assert document.ended_at is not None
        at.append(document.submitted_at)
        customer.append(names.setdefault(document.customer, len(names)))
        cost.append(_took_us(document, document.ended_at - document.claimed_at))
        if len(at) % _ROWS_AT_ONCE == 0:
            progress(len(at))
    trace = Trace()
    trace.cost = cost[::-1]
    begun = last = at[-1] if at else 0
    for moment in reversed(at):
        last = max(last, moment)
        trace.at.append(last - begun)
    # Numbers as if the file were read: whoever sent first is the first customer.
    by_number = list(names)
    new: dict[int, int] = {}
    for number in reversed(customer):
        trace.customer.append(new.setdefault(number, len(new)))
    trace.names = [by_number[number] for number in new]
    return trace


def _took_us(document: Document, since_claimed_us: int) -> int:
    """How long it ran. If its worker did not say: the time from claim to outcome, which is longer
    for a document that was claimed ahead."""
    return max(0, since_claimed_us) if document.real_cost is None else document.real_cost


def anonymous(trace: Trace) -> None:
    """Put numbers in the place of names."""
    trace.names = [f"customer-{number}" for number in range(1, len(trace.names) + 1)]


def set_weights(trace: Trace, weights: Mapping[str, int]) -> None:
    """Let customers have these weights from their first document on; 1 needs no word."""
    wanted = {
        number: weights[name]
        for number, name in enumerate(trace.names)
        if weights.get(name, WEIGHT_ONE) != WEIGHT_ONE
    }
    for n, number in enumerate(trace.customer):
        if not wanted:
            break
        if number in wanted:
            trace.weight[n] = wanted.pop(number)


def write(
    trace: Trace, out: TextIO, *, progress: Callable[[int], None] = lambda written: None
) -> None:
    """Write the CSV that `fairturn replay` and `fairturn simulate` read."""
    # Before Python 3.13 a carriage return in a name is not reason enough for quotes.
    if any("\r" in name for name in trace.names):
        writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    else:
        writer = csv.writer(out, lineterminator="\n")
    columns = ["at_s", "customer", "cost_s"]
    writer.writerow([*columns, "weight"] if trace.weight else columns)
    rows = _rows(trace)
    written = 0
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        writer.writerows(some)
        written += len(some)
        progress(written)


def _rows(trace: Trace) -> Iterator[list[str]]:
    for n, (at, customer, cost) in enumerate(
        zip(trace.at, trace.customer, trace.cost, strict=True)
    ):
        row = [_seconds(at), trace.names[customer], _seconds(cost)]
        if trace.weight:
            weight = trace.weight.get(n)
            row.append("" if weight is None else f"{weight / WEIGHT_ONE:g}")
        yield row


def _seconds(us: int) -> str:
    whole, rest = divmod(us, SECOND_US)
    return f"{whole}.{rest:06}" if rest else str(whole)
