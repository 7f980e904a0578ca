"""Customers: all of them in a table, and one with its count over time."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Form, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from fairturn.access.keys import Role
from fairturn.access.registry import NewKey
from fairturn.dashboard.charts import count_chart
from fairturn.dashboard.login import back_to
from fairturn.dashboard.now import Row, row_of
from fairturn.dashboard.renderer import PageRoute, link_to, render, see_other
from fairturn.dashboard.samples import Lately, quantile
from fairturn.dashboard.visitors import Operator, Overseer, Visitor
from fairturn.errors import NotFound
from fairturn.model import CUSTOMER_BYTES_MAX, RUNNING_MAX, Customer, Document, Filter
from fairturn.priority import Count, Rule
from fairturn.service.problems import Code, Problem, refusing_misuse

SIZE = 50
HISTORY = 500  # of the newest documents, in the chart of the count
DOCUMENTS_SHOWN = 15

router = APIRouter(route_class=PageRoute, include_in_schema=False)
Name = Annotated[str, Query(min_length=1, max_length=CUSTOMER_BYTES_MAX)]


class Sort(StrEnum):
    """By which column. Names go up; numbers begin with the largest."""

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


# One number each: a hundred thousand customers are sorted while somebody waits. They come by name,
# and stay so where the numbers are equal.
_KEYS: dict[Sort, Callable[[Customer], float]] = {
    Sort.COUNT: lambda c: c.count,
    Sort.NEXT: lambda c: c.count,  # the lower the count, the worse the next priority
    Sort.WAITING: lambda c: -c.waiting,
    Sort.RUNNING: lambda c: -c.running,
    Sort.WEIGHT: lambda c: -c.settings.weight,
    Sort.LIMIT: lambda c: c.settings.limit or RUNNING_MAX + 1,
    Sort.RESETS: lambda c: -(c.count_updated_at or 0) if c.count else 1,
}


# Which columns begin with the smallest; all others with the largest.
_UP = (Sort.NAME, Sort.COUNT, Sort.LIMIT)


class Order(NamedTuple):
    """By which column, and whether the other way round."""

    sort: Sort
    turned: bool = False

    @property
    def up(self) -> bool:
        return (self.sort in _UP) != self.turned

    def query(self) -> dict[str, str]:
        """As it stands in an address."""
        return {"sort": self.sort.value, **({"turned": "1"} if self.turned else {})}

    def by(self, name: str) -> "Order":
        """What a click on the head of this column gives."""
        return Order(Sort(name), turned=self.sort == name and not self.turned)


class Table(NamedTuple):
    """One page of customers."""

    rows: list[Row]
    total: int | None  # None: only names were read
    at: int | None  # when all were read
    page: int
    pages: int | None
    after: str | None  # where the next page by name begins


@router.get("/customers")
def show_customers(
    request: Request,
    visitor: Overseer,
    *,
    q: Annotated[str, Query(max_length=CUSTOMER_BYTES_MAX)] = "",
    sort: Sort = Sort.WAITING,
    turned: bool = False,
    page: Annotated[int, Query(ge=1, le=100_000)] = 1,
    after: Annotated[str, Query(max_length=CUSTOMER_BYTES_MAX)] = "",
) -> Response:
    """A page of the table."""
    order = Order(sort, turned)
    table = _table(visitor, q.strip(), order, page, after)
    if table.total is None:
        order = Order(Sort.NAME)
    return render(request, visitor, "customers.html", table=table, q=q, order=order)


def _table(visitor: Visitor, q: str, order: Order, page: int, after: str) -> Table:
    listed, lately = visitor.page.directory.listed(), visitor.page.trail.lately()
    rule, now = visitor.service.queue.settings.rule, visitor.service.clock.now()
    if listed is None:
        return _by_name(visitor, q, after)
    found = listed.customers
    if q:
        wanted = q.casefold()
        found = [customer for customer in found if wanted in customer.name.casefold()]
    begin = (page - 1) * SIZE
    ordered = _ordered(found, order, lately)[begin : begin + SIZE]
    rows = [row_of(c, lately, rule, now) for c in ordered]
    pages = max(1, -(-len(found) // SIZE))
    return Table(rows, len(found), listed.at, page, pages, None)


def _ordered(found: list[Customer], order: Order, lately: Lately) -> list[Customer]:
    ordered = _by(order.sort, found, lately)
    return ordered[::-1] if order.turned else ordered


def _by(sort: Sort, found: list[Customer], lately: Lately) -> list[Customer]:
    if sort is Sort.NAME:
        return found
    if sort in _KEYS:
        return sorted(found, key=_KEYS[sort])
    # What was seen lately is known of a few: they come first.
    known = {c.name for c in found if c.name in lately.shares}
    values = {name: _seen(name, sort, lately) for name in known}
    first = sorted((c for c in found if c.name in known), key=lambda c: -values[c.name])
    return first + [c for c in found if c.name not in known]


def _seen(name: str, sort: Sort, lately: Lately) -> float:
    if sort is Sort.SHARE:
        return lately.shares[name].share
    share = 0.5 if sort is Sort.P50 else 0.95
    return quantile(lately.waits.get(name, ()), share) or 0


def _by_name(visitor: Visitor, q: str, after: str) -> Table:
    """While the list is made for the first time: by name, those that begin so."""
    store, lately = visitor.service.queue.store, visitor.page.trail.lately()
    rule, now = visitor.service.queue.settings.rule, visitor.service.clock.now()
    found = store.customers(names=[q]).customers if q and not after else []
    page = store.customers(after=after or q or None, size=SIZE)
    found += [c for c in page.customers if c.name.startswith(q) and c.name != q]
    more = page.next if found and found[-1].name.startswith(q) else None
    return Table([row_of(c, lately, rule, now) for c in found], None, None, 1, None, more)


@router.get("/customer")
def show_customer(
    request: Request, visitor: Overseer, name: Name, done: str | None = None
) -> Response:
    """One customer."""
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
    store, rule = service.queue.store, service.queue.settings.rule
    customer = service.queue.customer(name)
    documents = store.find(Filter(customer=name), size=HISTORY).documents
    keys = service.keys.list(customer=name, size=100) if visitor.operates else []
    # A page that answers a form cannot be asked for again where it stands.
    address: dict[str, Any] = (
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
        **address,
    )


def count_drawn(documents: list[Document], rule: Rule, now: int) -> Markup | None:
    """The count over time, from what the newest documents found; None if there are too few."""
    points = [(d.submitted_at, d.count) for d in reversed(documents) if d.parent is None]
    if len(points) < 2:
        return None
    last = Count(points[-1][1], points[-1][0])
    if now > rule.resets_at(last):
        points.append((rule.resets_at(last), 0))
    return count_chart(points, rule.bounds, now)


@router.post("/customer")
def change_customer(
    request: Request,
    visitor: Operator,
    *,
    name: Annotated[str, Form(min_length=1, max_length=CUSTOMER_BYTES_MAX)],
    weight: Annotated[float | None, Form()] = None,
    limit: Annotated[str | None, Form()] = None,
    paused: Annotated[bool | None, Form()] = None,
    back: Annotated[str, Form()] = "",
) -> Response:
    """Weight and limit, or the pause. An empty limit is none."""
    queue = visitor.service.queue
    with refusing_misuse():
        if weight is not None:
            queue.set_customer(name, weight=weight, limit=int(limit) if limit else None)
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
    customer: Annotated[str, Form(min_length=1, max_length=CUSTOMER_BYTES_MAX)],
    name: Annotated[str, Form(max_length=255)] = "",
) -> Response:
    """Make a key of this customer, and show it this once."""
    keys = visitor.service.keys
    if visitor.caller is None or visitor.caller.key is None:
        raise Problem(Code.WRONG_STATE, "the first key is an operator's: fairturn keys make")
    visitor.service.queue.customer(customer)
    with refusing_misuse():
        made = keys.make(Role.CUSTOMER, name=name, customer=customer)
    return _customer(request, visitor, customer, made=made)


@router.post("/customer/keys/revoke")
def revoke_key(request: Request, visitor: Operator, id: Annotated[str, Form()]) -> Response:
    """Let a key end now."""
    key = visitor.service.keys.revoke(id)
    if key.customer is None:
        raise NotFound("the key is not that of a customer")
    return see_other(request, "/customer", name=key.customer, done="revoked")
