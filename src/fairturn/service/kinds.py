"""Routes about kinds of work. A kind's name has no character that a path would have to escape."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from fairturn.model import ATTEMPTS_MAX, RUNNING_MAX, SECONDS_MAX
from fairturn.service import shapes
from fairturn.service.callers import Operator, Overseer
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import service_of
from fairturn.validation.changes import UNCHANGED

router = APIRouter(tags=["kinds"])


@router.get("/v1/kinds", response_model=shapes.KindsJson, responses=problems())
def list_kinds(request: Request, caller: Overseer) -> Any:
    """List all kinds of work, ordered by name."""
    kinds = service_of(request).queue.kinds()
    return shapes.KindsJson(kinds=[shapes.kind_json(each) for each in kinds])


@router.get("/v1/kinds/{name}", response_model=shapes.KindJson, responses=problems(404))
def get_kind(request: Request, caller: Overseer, name: shapes.KindName) -> Any:
    """Retrieve one kind of work."""
    return shapes.kind_json(service_of(request).queue.kind(name))


class KindChangeJson(shapes.RequestFields):
    limit: Annotated[
        shapes.Whole | None,
        Field(
            ge=0,
            le=RUNNING_MAX,
            description="Most running documents, over all machines; 0 removes the limit.",
        ),
    ] = None
    paused: shapes.YesOrNo | None = None
    attempts_max: Annotated[
        shapes.Whole | None,
        Field(ge=0, le=ATTEMPTS_MAX, description="Attempts of a document; 0: those of the queue."),
    ] = None
    expires_in_s: Annotated[
        shapes.Number | None,
        Field(
            ge=0,
            le=SECONDS_MAX,
            description="After what time its documents expire, from when they are due, if they are "
            "submitted without an expiry; 0: never.",
        ),
    ] = None


@router.patch("/v1/kinds/{name}", response_model=shapes.KindJson, responses=problems())
def change_kind(
    request: Request, caller: Operator, name: shapes.KindName, change: KindChangeJson
) -> Any:
    """Change the limit, the pause, the attempts or the expiry of a kind of work. A new name creates
    the kind.

    Omitted fields do not change.
    """
    with refusing_misuse():
        kind = service_of(request).queue.set_kind(
            name,
            limit=UNCHANGED if change.limit is None else change.limit or None,
            paused=UNCHANGED if change.paused is None else change.paused,
            attempts_max=UNCHANGED if change.attempts_max is None else change.attempts_max or None,
            expires_in_s=UNCHANGED if change.expires_in_s is None else change.expires_in_s or None,
        )
    return shapes.kind_json(kind)
