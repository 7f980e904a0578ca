"""Routes that manage access keys, for operators."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from fairturn.access.keys import KEY_NAME_BYTES_MAX, Role
from fairturn.access.registry import OVERLAP_S_MAX, NewKey
from fairturn.errors import WrongState
from fairturn.service import shapes
from fairturn.service.callers import Operator
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import service_of
from fairturn.wire import ACCESS_KEY, to_json

router = APIRouter(tags=["keys"])


AccessKeyJson = shapes.json_model("AccessKeyJson", "An access key, without its secret.", ACCESS_KEY)


class NewKeyJson(AccessKeyJson):  # type: ignore[misc, valid-type]  # a model made from a list
    """A new access key, with its secret."""

    shown: Annotated[str, Field(description="The key itself. It is never returned again.")]


class AccessKeysJson(shapes.ResponseJson):
    """A page of access keys, ordered by id."""

    keys: list[AccessKeyJson]  # type: ignore[valid-type]
    next: str | None


class KeysQuery(shapes.RequestFields):
    customer: shapes.CustomerName | None = None
    after: Annotated[str | None, Field(description="The `next` of the previous page.")] = None
    size: shapes.PageSize = 100


class KeyRequestJson(shapes.RequestFields):
    role: Role
    customer: Annotated[
        shapes.CustomerName | None,
        Field(description="The customer of the key; required for the role `customer`."),
    ] = None
    name: Annotated[
        str, Field(max_length=KEY_NAME_BYTES_MAX, description="A label for operators.")
    ] = ""


class RotationJson(shapes.RequestFields):
    overlap_s: Annotated[
        shapes.Number,
        Field(ge=0, le=OVERLAP_S_MAX, description="Seconds until the old key expires."),
    ] = 0.0


@router.get("/v1/keys", response_model=AccessKeysJson, responses=problems())
def list_keys(request: Request, caller: Operator, query: Annotated[KeysQuery, Query()]) -> Any:
    """List access keys, including expired and revoked ones, without their secrets."""
    with refusing_misuse():
        keys = service_of(request).keys.list(
            customer=query.customer, after=query.after, size=query.size
        )
    next_id = keys[-1].id if len(keys) == query.size else None
    return AccessKeysJson(keys=[to_json(ACCESS_KEY, key) for key in keys], next=next_id)


@router.post("/v1/keys", status_code=201, response_model=NewKeyJson, responses=problems(409))
def make_key(request: Request, caller: Operator, body: KeyRequestJson) -> Any:
    """Create an access key. The key itself is only in this response."""
    keys = service_of(request).keys
    if caller.key is None and body.role is not Role.OPERATOR:
        raise WrongState(
            f"the first key has the role {body.role}; create an operator's key first: "
            "only operators can create keys"
        )
    with refusing_misuse():
        made = keys.make(body.role, name=body.name, customer=body.customer)
    return _shown(made)


@router.post(
    "/v1/keys/{id}/rotate", status_code=201, response_model=NewKeyJson, responses=problems(404, 409)
)
def rotate_key(request: Request, caller: Operator, id: str, rotation: RotationJson) -> Any:
    """Replace an access key. The old key expires after `overlap_s`."""
    with refusing_misuse():
        made = service_of(request).keys.rotate(id, overlap_s=rotation.overlap_s)
    return _shown(made)


@router.post("/v1/keys/{id}/revoke", response_model=AccessKeyJson, responses=problems(404))
def revoke_key(request: Request, caller: Operator, id: str) -> Any:
    """Revoke an access key immediately."""
    return to_json(ACCESS_KEY, service_of(request).keys.revoke(id))


def _shown(made: NewKey) -> NewKeyJson:
    return NewKeyJson(**to_json(ACCESS_KEY, made.key), shown=made.shown)
