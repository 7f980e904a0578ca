"""How priorities work: for customers, from the settings in force. It takes no key."""

from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fairturn.clock import SECOND_US
from fairturn.dashboard.renderer import PageRoute, render
from fairturn.dashboard.visitors import Anybody
from fairturn.priority import LEVELS, Count, Rule

DOCUMENTS_MAX = 10_000
APART_S_MAX = 1_000_000.0

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Row(NamedTuple):
    """One priority: the counts that lead to it, and which documents of a burst those are."""

    priority: int
    highest: int
    lowest: int | None
    first: int
    last: int | None


class Share(NamedTuple):
    """How many of the documents get a priority, and which is the first."""

    priority: int
    documents: int
    first: int | None


class Calculated(NamedTuple):
    """What the rule makes of a row of documents."""

    documents: int
    apart_s: float
    shares: tuple[Share, ...]
    resets: int
    most: int  # documents of one priority
    last: int  # the priority of the last one


def rows_of(rule: Rule) -> list[Row]:
    """The table of the nine priorities."""
    rows: list[Row] = []
    highest = 0
    for priority, bound in enumerate((*rule.bounds, None), 1):
        last = None if bound is None else 1 - bound
        rows.append(Row(priority, highest, bound, 1 - highest, last))
        highest = 0 if bound is None else bound - 1
    return rows


def calculate(rule: Rule, documents: int, apart_s: float) -> Calculated:
    """The priorities of so many documents, one after another, so far apart."""
    apart_us = round(apart_s * SECOND_US)
    found: list[list[int]] = [[] for _ in range(LEVELS)]
    last: Count | None = None
    resets, priority = 0, 1
    for number in range(documents):
        before, last = last, rule.check(last, number * apart_us)
        resets += before is not None and last.value == 0
        priority = rule.priority(last.value)
        found[priority - 1].append(number + 1)
    shares = tuple(
        Share(level, len(numbers), numbers[0] if numbers else None)
        for level, numbers in enumerate(found, 1)
    )
    most = max(share.documents for share in shares)
    return Calculated(documents, apart_s, shares, resets, most, priority)


@router.get("/priorities")
def show_rules(
    request: Request,
    visitor: Anybody,
    documents: Annotated[int, Query(ge=1, le=DOCUMENTS_MAX)] = 30,
    apart_s: Annotated[float, Query(ge=0, le=APART_S_MAX)] = 10.0,
) -> Response:
    """The rule in words and as a table, and a calculator."""
    settings = visitor.service.queue.settings
    return render(
        request,
        visitor,
        "rules.html",
        settings=settings,
        rows=rows_of(settings.rule),
        interval_us=settings.rule.reset_interval_us,
        calculated=calculate(settings.rule, documents, apart_s),
        documents_max=DOCUMENTS_MAX,
        apart_s_max=APART_S_MAX,
    )
