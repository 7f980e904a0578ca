"""The table of customers, and the page of one customer with its count over time."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Form, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from fairturn.access.keys import Role
from fairturn.access.registry import NewKey
from fairturn.dashboard.login import back_to
from fairturn.dashboard.now import CustomerRow, row_of
from fairturn.dashboard.renderer import PageRoute, link_to, render, see_other
from fairturn.dashboard.samples import RecentActivity, quantile
from fairturn.dashboard.visitors import Operator, Overseer, Visitor
from fairturn.errors import NotFound
from fairturn.model import CUSTOMER_BYTES_MAX, RUNNING_MAX, Customer, Document, Filter
from fairturn.priority import Count, Rule
from fairturn.service.problems import Problem, ProblemCode, refusing_misuse
from fairturn.service.shapes import CustomerName
from fairturn.simulator.charts.series import count_chart
from fairturn.validation.text import description

SIZE = 50
HISTORY = 500  # of the newest documents, in the chart of the count
DOCUMENTS_SHOWN = 15

router = APIRouter(route_class=PageRoute, include_in_schema=False)
Name = Annotated[CustomerName, Query()]
FormName = Annotated[CustomerName, Form()]


class SortColumn(StrEnum):
    NAME = "name"
    COUNT = "count"
    NEXT = "next"
    WAITING = "waiting"
    RUNNING = "running"
    P50 = "p50"
    P95 = "p95"
    SHARE = "share"
    WEIGHT = "weight"
    LIMIT = "limit"
    RESETS = "resets"


# Single numbers, because a request may sort 200,000 customers. The sort is stable, so that equal
# customers stay ordered by name.
_KEYS: dict[SortColumn, Callable[[Customer], float]] = {
    SortColumn.COUNT: lambda c: c.count,
    SortColumn.NEXT: lambda c: c.count,  # the lower the count, the worse the next priority
    SortColumn.WAITING: lambda c: -c.waiting,
    SortColumn.RUNNING: lambda c: -c.running,
    SortColumn.WEIGHT: lambda c: -c.settings.weight,
    SortColumn.LIMIT: lambda c: c.settings.limit or RUNNING_MAX + 1,
    SortColumn.RESETS: lambda c: -(c.count_updated_at_us or 0) if c.count else 1,
}
_SAMPLES: dict[SortColumn, Callable[[RecentActivity, str], float]] = {
    SortColumn.P50: lambda lately, name: quantile(lately.waits.get(name, ()), 0.5) or 0,
    SortColumn.P95: lambda lately, name: quantile(lately.waits.get(name, ()), 0.95) or 0,
    SortColumn.SHARE: lambda lately, name: lately.shares[name].share,
}
# Columns in ascending order by default.
_UP = (SortColumn.NAME, SortColumn.COUNT, SortColumn.LIMIT)


class SortOrder(NamedTuple):
    sort: SortColumn
    turned: bool = False  # the reverse of the column's default

    @property
    def up(self) -> bool:
        return (self.sort in _UP) != self.turned

    def query(self) -> dict[str, str]:
        """Return the query parameters."""
        return {"sort": self.sort.value, **({"turned": "1"} if self.turned else {})}

    def by(self, name: str) -> "SortOrder":
        """Return the order after a click on the header of this column."""
        return SortOrder(SortColumn(name), turned=self.sort == name and not self.turned)


class CustomerTable(NamedTuple):
    """One page of customers."""

    rows: list[CustomerRow]
    total: int | None  # None: the list of all customers is not read yet
    at: int | None  # when the list was read
    page: int
    pages: int | None
    after: str | None  # where the next page by name begins


@router.get("/customers")
def show_customers(
    request: Request,
    visitor: Overseer,
    *,
    q: Annotated[str, Query(max_length=CUSTOMER_BYTES_MAX)] = "",
    sort: SortColumn = SortColumn.WAITING,
    turned: bool = False,
    page: Annotated[int, Query(ge=1, le=100_000)] = 1,
    after: Annotated[str, Query(max_length=CUSTOMER_BYTES_MAX)] = "",
) -> Response:
    order = SortOrder(sort, turned)
    q, after = (description(text, CUSTOMER_BYTES_MAX) for text in (q.strip(), after))
    table = _table(visitor, q, order, page, after)
    if table.total is None:
        order = SortOrder(SortColumn.NAME)
    return render(request, visitor, "customers.html", table=table, q=q, order=order)


def _table(visitor: Visitor, q: str, order: SortOrder, page: int, after: str) -> CustomerTable:
    listed, lately = visitor.page.directory.listed(), visitor.page.trail.lately()
    rule, now = visitor.service.queue.settings.rule, visitor.service.clock.now()
    if listed is None:
        return _by_name(visitor, q, after)
    found = listed.customers
    if q:
        part = q.casefold()
        found = [customer for customer in found if part in customer.name.casefold()]
    begin = (page - 1) * SIZE
    ordered = _ordered(found, order, lately)[begin : begin + SIZE]
    rows = [row_of(c, lately, rule, now) for c in ordered]
    pages = max(1, -(-len(found) // SIZE))
    return CustomerTable(rows, len(found), listed.at, page, pages, None)


def _ordered(found: list[Customer], order: SortOrder, lately: RecentActivity) -> list[Customer]:
    ordered = found
    if order.sort in _KEYS:
        ordered = sorted(found, key=_KEYS[order.sort])
    elif order.sort in _SAMPLES:
        sample = _SAMPLES[order.sort]
        # Only recently active customers have samples; they come first.
        values = {name: -sample(lately, name) for name in lately.shares}
        ordered = sorted(found, key=lambda customer: values.get(customer.name, 1))
    return ordered[::-1] if order.turned else ordered


def _by_name(visitor: Visitor, q: str, after: str) -> CustomerTable:
    """Return customers by name with the prefix `q`, while the list is read for the first time."""
    store, lately = visitor.service.queue.queries, visitor.page.trail.lately()
    rule, now = visitor.service.queue.settings.rule, visitor.service.clock.now()
    found = store.customers(names=[q]).customers if q and not after else []
    page = store.customers(after=after or q or None, size=SIZE)
    found += [c for c in page.customers if c.name.startswith(q) and c.name != q]
    more = page.next if found and found[-1].name.startswith(q) else None
    return CustomerTable([row_of(c, lately, rule, now) for c in found], None, None, 1, None, more)


@router.get("/customer")
def show_customer(
    request: Request, visitor: Overseer, name: Name, done: str | None = None
) -> Response:
    return _customer(request, visitor, name, done=done)


def _customer(
    request: Request,
    visitor: Visitor,
    name: str,
    *,
    done: str | None = None,
    made: NewKey | None = None,
) -> Response:
    service = visitor.service
    store, rule = service.queue.queries, service.queue.settings.rule
    customer = service.queue.customer(name)
    documents = store.find(Filter(customer=name), size=HISTORY).documents
    keys = service.keys.list(customer=name, size=100) if visitor.operates else []
    # The response to a POST cannot be reloaded at its own URL.
    reload_from: dict[str, Any] = (
        {} if made is None else {"live_from": link_to(request, "/customer", name=name)}
    )
    return render(
        request,
        visitor,
        "customer.html",
        row=row_of(customer, visitor.page.trail.lately(), rule, service.clock.now()),
        documents=documents[:DOCUMENTS_SHOWN],
        history=documents,
        chart=count_drawn(documents, rule, service.clock.now()),
        keys=keys,
        made=made,
        done=done if done in ("saved", "revoked") else None,
        **reload_from,
    )


def count_drawn(documents: list[Document], rule: Rule, now: int) -> Markup | None:
    """Return a chart of the counts of these documents; None for fewer than two."""
    points = [(d.submitted_at_us, d.count) for d in reversed(documents) if d.parent is None]
    if len(points) < 2:
        return None
    last = Count(points[-1][1], points[-1][0])
    if now > rule.resets_at(last):
        points.append((rule.resets_at(last), 0))
    return Markup(count_chart(points, rule.bounds, now))


@router.post("/customer")
def change_customer(
    request: Request,
    visitor: Operator,
    *,
    name: FormName,
    weight: Annotated[float | None, Form()] = None,
    limit: Annotated[str | None, Form()] = None,
    bytes_max: Annotated[str | None, Form()] = None,
    paused: Annotated[bool | None, Form()] = None,
    back: Annotated[str, Form()] = "",
) -> Response:
    """Set weight and limits, or the pause. An empty limit removes it."""
    queue = visitor.service.queue
    with refusing_misuse():
        if weight is not None:
            queue.set_customer(
                name,
                weight=weight,
                limit=int(limit) if limit else None,
                bytes_max=int(bytes_max) if bytes_max else None,
            )
        if paused is not None:
            queue.set_customer(name, paused=paused)
    visitor.page.directory.changed()
    if back:
        return see_other(request, back_to(back))
    return see_other(request, "/customer", name=name, done="saved")


@router.post("/customer/keys")
def make_key(
    request: Request,
    visitor: Operator,
    *,
    customer: FormName,
    name: Annotated[str, Form(max_length=255)] = "",
) -> Response:
    """Create a key of this customer and show it once."""
    keys = visitor.service.keys
    if visitor.caller is None or visitor.caller.key is None:
        raise Problem(
            ProblemCode.WRONG_STATE,
            'the first key must be an operator\'s: run "fairturn keys make --role operator"',
        )
    visitor.service.queue.customer(customer)
    with refusing_misuse():
        made = keys.make(Role.CUSTOMER, name=name, customer=customer)
    return _customer(request, visitor, customer, made=made)


@router.post("/customer/keys/revoke")
def revoke_key(request: Request, visitor: Operator, id: Annotated[str, Form()]) -> Response:
    key = visitor.service.keys.revoke(id)
    if key.customer is None:
        raise NotFound(f"key {id} does not belong to a customer")
    return see_other(request, "/customer", name=key.customer, done="revoked")
