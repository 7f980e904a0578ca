"""Routes about customers. Names are in queries and bodies, never in a path, because they may
contain any character."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from fairturn.errors import NotFound
from fairturn.model import BYTES_MAX, RUNNING_MAX, CustomerSummary
from fairturn.service import shapes
from fairturn.service.callers import Anybody, Operator, Overseer
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.validation.changes import UNCHANGED
from fairturn.wire import CUSTOMER_SUMMARY, to_json

router = APIRouter(tags=["customers"])


@router.get("/v1/me", response_model=shapes.IdentityJson, responses=problems())
def get_me(request: Request, caller: Anybody) -> Any:
    """Retrieve the identity behind the access key.

    For a customer's key this includes the pending documents count and when it resets, the priority
    of the next document, and the numbers of waiting and running documents.
    """
    summary = None
    if caller.customer is not None:
        summary = summary_of(service_of(request), caller.customer)
    return shapes.IdentityJson(
        role=caller.role,
        key=caller.key,
        key_name=caller.key_name,
        customer=summary,
        version=request.app.version,
    )


def summary_of(service: Service, name: str) -> dict[str, Any]:
    """Return the fields of `CustomerSummaryJson`; an unknown customer has no documents."""
    try:
        customer = service.queue.customer(name)
    except NotFound:
        return to_json(CUSTOMER_SUMMARY, CustomerSummary(name, 0))
    rule, now = service.queue.settings.rule, service.clock.now()
    return to_json(CUSTOMER_SUMMARY, CustomerSummary.of(customer, rule, now))


class CustomersQuery(shapes.RequestFields):
    name: Annotated[shapes.CustomerName | None, Field(description="Return only this customer.")] = (
        None
    )
    after: Annotated[
        shapes.CustomerName | None, Field(description="The `next` of the previous page.")
    ] = None
    size: shapes.PageSize = 100


@router.get("/v1/customers", response_model=shapes.CustomersJson, responses=problems())
def list_customers(
    request: Request, caller: Overseer, query: Annotated[CustomersQuery, Query()]
) -> Any:
    """List customers, ordered by name."""
    service = service_of(request)
    if query.name is None:
        with refusing_misuse():
            page = service.queue.customers(after=query.after, size=query.size)
    else:
        page = service.queue.queries.customers(names=[query.name])
    rule, now = service.queue.settings.rule, service.clock.now()
    return shapes.CustomersJson(
        customers=[shapes.customer_json(each, rule, now) for each in page.customers], next=page.next
    )


class CustomerChangeJson(shapes.RequestFields):
    name: shapes.CustomerName
    weight: Annotated[
        shapes.Number | None,
        Field(ge=0.01, le=100, description="Its share of the turns, relative to other customers."),
    ] = None
    limit: Annotated[
        shapes.Whole | None,
        Field(ge=0, le=RUNNING_MAX, description="Most running documents; 0 removes the limit."),
    ] = None
    paused: shapes.YesOrNo | None = None
    bytes_max: Annotated[
        shapes.Whole | None,
        Field(
            ge=0,
            le=BYTES_MAX,
            description="Maximum size of its stored documents, in bytes; "
            "0: `bytes_per_customer_max`.",
        ),
    ] = None


@router.post("/v1/customers", response_model=shapes.CustomerJson, responses=problems())
def set_customer(request: Request, caller: Operator, change: CustomerChangeJson) -> Any:
    """Create a customer, or change its weight, limits or pause. Omitted fields do not change."""
    service = service_of(request)
    with refusing_misuse():
        customer = service.queue.set_customer(
            change.name,
            weight=UNCHANGED if change.weight is None else change.weight,
            limit=UNCHANGED if change.limit is None else change.limit or None,
            paused=UNCHANGED if change.paused is None else change.paused,
            bytes_max=UNCHANGED if change.bytes_max is None else change.bytes_max or None,
        )
    return shapes.customer_json(customer, service.queue.settings.rule, service.clock.now())


class PurgeJson(shapes.RequestFields):
    name: shapes.CustomerName
    dry_run: Annotated[
        shapes.YesOrNo, Field(description="Report what would be deleted, and delete nothing.")
    ] = True


class PurgeResultJson(shapes.ResponseJson):
    name: str
    dry_run: bool
    waiting: int
    delayed: int
    running: int


@router.post("/v1/customers/purge", response_model=PurgeResultJson, responses=problems(404))
def purge_customer(request: Request, caller: Operator, purge: PurgeJson) -> Any:
    """Delete a customer with all its documents, settings, counts and keys.

    Running documents lose their leases. Nothing is deleted unless `dry_run` is false. The response
    has the numbers of documents before the deletion.
    """
    queue = service_of(request).queue
    waiting = delayed = running = 0
    try:
        with refusing_misuse():
            customer = queue.customer(purge.name)
        waiting, delayed, running = customer.waiting, customer.delayed, customer.running
    except NotFound:
        if not queue.keys.list(customer=purge.name, size=1):
            raise
    if not purge.dry_run:
        queue.purge(purge.name)
    return PurgeResultJson(
        name=purge.name, dry_run=purge.dry_run, waiting=waiting, delayed=delayed, running=running
    )
