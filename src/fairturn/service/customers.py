"""Customers: each one's own view, and what operators set for them. Names are in queries and bodies
and never in a path, because a name may have any character in it."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from fairturn.errors import NotFound
from fairturn.model import RUNNING_MAX
from fairturn.service import shapes
from fairturn.service.callers import Anybody, Operator, Overseer
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.validation.changes import UNCHANGED

router = APIRouter(tags=["customers"])


@router.get("/v1/me", response_model=shapes.Me, responses=problems())
def get_me(request: Request, caller: Anybody) -> Any:
    """Who the key says that I am: for a customer with the pending documents count, the priority of
    the next document, what waits and runs, and when the count resets."""
    standing = None
    if caller.customer is not None:
        standing = standing_of(service_of(request), caller.customer)
    return shapes.Me(
        role=caller.role,
        key=caller.key,
        key_name=caller.key_name,
        customer=standing,
        version=request.app.version,
    )


def standing_of(service: Service, name: str) -> shapes.Standing:
    """Where a customer stands; one who is not known has nothing here."""
    try:
        customer = service.queue.customer(name)
    except NotFound:
        return shapes.Standing.of_nobody_known(name)
    return shapes.Standing.of(customer, service.queue.settings.rule, service.clock.now())


class WantedCustomers(shapes.Asked):
    name: Annotated[shapes.CustomerName | None, Field(description="Only this one.")] = None
    after: Annotated[shapes.CustomerName | None, Field(description="The page after this.")] = None
    size: shapes.PageSize = 100


@router.get("/v1/customers", response_model=shapes.Customers, responses=problems())
def list_customers(
    request: Request, caller: Overseer, wanted: Annotated[WantedCustomers, Query()]
) -> Any:
    """List customers by name, or look one up."""
    service = service_of(request)
    if wanted.name is None:
        with refusing_misuse():
            page = service.queue.customers(after=wanted.after, size=wanted.size)
    else:
        page = service.queue.store.customers(names=[wanted.name])
    rule, now = service.queue.settings.rule, service.clock.now()
    return shapes.Customers(
        customers=[shapes.Customer.seen(each, rule, now) for each in page.customers],
        next=page.next,
    )


class CustomerChange(shapes.Asked):
    name: shapes.CustomerName
    weight: Annotated[shapes.Number | None, Field(ge=0.01, le=100, description="Its share.")] = None
    limit: Annotated[
        shapes.Whole | None,
        Field(ge=0, le=RUNNING_MAX, description="Of documents running at once; 0 for no limit."),
    ] = None
    paused: shapes.YesOrNo | None = None


@router.post("/v1/customers", response_model=shapes.Customer, responses=problems())
def set_customer(request: Request, caller: Operator, change: CustomerChange) -> Any:
    """Create a customer, or change its weight, its limit or its pause. What is not given stays as
    it is."""
    service = service_of(request)
    with refusing_misuse():
        customer = service.queue.set_customer(
            change.name,
            weight=UNCHANGED if change.weight is None else change.weight,
            limit=UNCHANGED if change.limit is None else change.limit or None,
            paused=UNCHANGED if change.paused is None else change.paused,
        )
    return shapes.Customer.seen(customer, service.queue.settings.rule, service.clock.now())


class Purge(shapes.Asked):
    name: shapes.CustomerName
    dry_run: Annotated[shapes.YesOrNo, Field(description="Only say what would be deleted.")] = True


class Purged(shapes.Shape):
    name: str
    dry_run: bool
    waiting: int
    delayed: int
    running: int


@router.post("/v1/customers/purge", response_model=Purged, responses=problems(404))
def purge_customer(request: Request, caller: Operator, purge: Purge) -> Any:
    """Delete a customer with every document, setting, count and key; running work is lost.

    Nothing happens unless `dry_run` is false. The answer says what there was.
    """
    queue = service_of(request).queue
    with refusing_misuse():
        customer = queue.customer(purge.name)
    if not purge.dry_run:
        queue.purge(purge.name)
    return Purged(
        name=customer.name,
        dry_run=purge.dry_run,
        waiting=customer.waiting,
        delayed=customer.delayed,
        running=customer.running,
    )
