"""The page of the kinds of work: documents, workers, limits, expiry, pauses."""

from typing import Annotated, Any

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Operator, Overseer
from fairturn.model import ATTEMPTS_MAX, KIND_BYTES_MAX, KINDS_MAX, RUNNING_MAX
from fairturn.service.problems import refusing_misuse

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/kinds")
def show_kinds(request: Request, visitor: Overseer, done: str | None = None) -> Response:
    queue = visitor.service.queue
    return render(
        request,
        visitor,
        "kinds.html",
        kinds=queue.kinds(),
        attempts_max=queue.settings.attempts_max,
        done=done if done == "saved" else None,
        name_max=KIND_BYTES_MAX,
        kinds_max=KINDS_MAX,
        limit_max=RUNNING_MAX,
        attempts_limit=ATTEMPTS_MAX,
    )


@router.post("/kinds")
def change_kind(
    request: Request,
    visitor: Operator,
    *,
    name: Annotated[str, Form(max_length=KIND_BYTES_MAX)],
    limits: Annotated[bool, Form()] = False,
    limit: Annotated[str | None, Form()] = None,
    attempts_max: Annotated[str | None, Form()] = None,
    expires_in_s: Annotated[str | None, Form()] = None,
    paused: Annotated[bool | None, Form()] = None,
) -> Response:
    """Set the limits and the expiry if `limits` is true, or the pause, or create a kind. An empty
    one removes it."""
    changes: dict[str, Any] = {}
    with refusing_misuse():
        if limits:
            changes["limit"] = int(limit) if limit else None
            changes["attempts_max"] = int(attempts_max) if attempts_max else None
            changes["expires_in_s"] = float(expires_in_s) if expires_in_s else None
        if paused is not None:
            changes["paused"] = paused
        visitor.service.queue.set_kind(name, **changes)
    return see_other(request, "/kinds", done="saved")
