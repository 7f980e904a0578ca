"""Access keys over HTTP: for operators."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from fairturn.access.keys import KEY_NAME_BYTES_MAX, AccessKey, Role
from fairturn.access.registry import OVERLAP_S_MAX
from fairturn.access.registry import NewKey as MadeKey
from fairturn.errors import WrongState
from fairturn.service import shapes
from fairturn.service.callers import Operator
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import service_of

router = APIRouter(tags=["keys"])


class Key(shapes.Shape):
    """An access key, without its secret."""

    id: str
    role: Role
    customer: str | None
    name: str
    made_at: shapes.Moment
    used_at: shapes.Moment | None
    ends_at: shapes.Moment | None

    @staticmethod
    def of(key: AccessKey) -> "Key":
        return Key(**{name: getattr(key, name) for name in Key.model_fields})


class NewKey(Key):
    """A key that was made just now."""

    shown: Annotated[str, Field(description="The key itself. It is shown this once.")]


class Keys(shapes.Shape):
    """One page, by id."""

    keys: list[Key]
    next: str | None


class WantedKeys(shapes.Asked):
    customer: shapes.CustomerName | None = None
    after: Annotated[str | None, Field(description="The `next` of the page before.")] = None
    size: shapes.PageSize = 100


class KeyToMake(shapes.Asked):
    role: Role
    customer: Annotated[
        shapes.CustomerName | None, Field(description="For the role customer: whose.")
    ] = None
    name: Annotated[str, Field(max_length=KEY_NAME_BYTES_MAX, description="For people.")] = ""


class Rotation(shapes.Asked):
    overlap_s: Annotated[
        shapes.Number,
        Field(ge=0, le=OVERLAP_S_MAX, description="How long the old key still opens."),
    ] = 0.0


@router.get("/v1/keys", response_model=Keys, responses=problems())
def list_keys(request: Request, caller: Operator, wanted: Annotated[WantedKeys, Query()]) -> Any:
    """List access keys, also those that have ended, without their secrets."""
    with refusing_misuse():
        keys = service_of(request).keys.list(
            customer=wanted.customer, after=wanted.after, size=wanted.size
        )
    next_one = keys[-1].id if len(keys) == wanted.size else None
    return Keys(keys=[Key.of(key) for key in keys], next=next_one)


@router.post("/v1/keys", status_code=201, response_model=NewKey, responses=problems(409))
def make_key(request: Request, caller: Operator, wanted: KeyToMake) -> Any:
    """Make an access key. It is shown in this answer and never again."""
    keys = service_of(request).keys
    if caller.key is None and wanted.role is not Role.OPERATOR:
        raise WrongState("the first key is an operator's: without one nobody could make another")
    with refusing_misuse():
        made = keys.make(wanted.role, name=wanted.name, customer=wanted.customer)
    return _shown(made)


@router.post(
    "/v1/keys/{id}/rotate",
    status_code=201,
    response_model=NewKey,
    responses=problems(404, 409),
)
def rotate_key(request: Request, caller: Operator, id: str, rotation: Rotation) -> Any:
    """Make a new key in place of one; the old one ends after the overlap."""
    with refusing_misuse():
        made = service_of(request).keys.rotate(id, overlap_s=rotation.overlap_s)
    return _shown(made)


@router.post("/v1/keys/{id}/revoke", response_model=Key, responses=problems(404))
def revoke_key(request: Request, caller: Operator, id: str) -> Any:
    """Let a key end now."""
    return Key.of(service_of(request).keys.revoke(id))


def _shown(made: MadeKey) -> NewKey:
    return NewKey(**Key.of(made.key).model_dump(), shown=made.shown)
