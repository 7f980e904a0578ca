"""The page that explains the priority rule to customers, by the current settings, without a key."""

from functools import lru_cache
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, Response

from fairturn.clock import SECOND_US
from fairturn.dashboard.renderer import PageRoute, render
from fairturn.dashboard.visitors import Anybody, Visitor
from fairturn.model import Settings
from fairturn.priority import LEVELS, Count, Rule

DOCUMENTS_MAX = 10_000
APART_S_MAX = 1_000_000.0
PAGES_MAX = 100  # in the cache

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class LevelRow(NamedTuple):
    """One priority: its range of counts, and its range of documents in one upload."""

    priority: int
    highest: int
    lowest: int | None
    first: int
    last: int | None


class LevelShare(NamedTuple):
    priority: int
    documents: int
    first: int | None  # number of the first document with this priority


class RuleCalculation(NamedTuple):
    documents: int
    apart_s: float
    shares: tuple[LevelShare, ...]
    resets: int
    most: int  # documents of one priority
    last: int  # priority of the last document


def rows_of(rule: Rule) -> list[LevelRow]:
    rows: list[LevelRow] = []
    highest = 0
    for priority, bound in enumerate((*rule.bounds, None), 1):
        last = None if bound is None else 1 - bound
        rows.append(LevelRow(priority, highest, bound, 1 - highest, last))
        highest = 0 if bound is None else bound - 1
    return rows


@lru_cache(1_000)
def calculate(rule: Rule, documents: int, apart_s: float) -> RuleCalculation:
    """Return the priorities of documents submitted at intervals of `apart_s`."""
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
        LevelShare(level, len(numbers), numbers[0] if numbers else None)
        for level, numbers in enumerate(found, 1)
    )
    most = max(share.documents for share in shares)
    return RuleCalculation(documents, apart_s, shares, resets, most, priority)


@router.get("/priorities")
def show_rules(
    request: Request,
    visitor: Anybody,
    documents: Annotated[int, Query(ge=1, le=DOCUMENTS_MAX)] = 30,
    apart_s: Annotated[float, Query(ge=0, le=APART_S_MAX)] = 10.0,
) -> Response:
    settings = visitor.service.queue.settings
    if visitor.caller is not None:
        return _render(request, visitor, settings, documents, apart_s)
    # Every client can request it, and it is the same for all of them.
    pages = visitor.page.rule_pages
    shown = (
        visitor.tongue.name,
        request.scope.get("root_path", ""),
        str(request.url.query),
        settings,
    )
    page = pages.pop(shown, None) or _render(request, visitor, settings, documents, apart_s)
    pages[shown] = page
    while len(pages) > PAGES_MAX:
        pages.pop(next(iter(pages)), None)
    return HTMLResponse(page.body, headers=dict(page.headers))


def _render(
    request: Request, visitor: Visitor, settings: Settings, documents: int, apart_s: float
) -> Response:
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
