"""The banners of services that hold kinds of work, and their button."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from fairturn.dashboard.renderer import PageRoute, see_other
from fairturn.dashboard.visitors import Operator
from fairturn.errors import NotFound
from fairturn.model import RESUMABLE_BYTES_MAX, ServiceOutage
from fairturn.scheduling.outages import service_of_kind
from fairturn.service.problems import refusing_misuse

BANNERS_MAX = 5

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class OutageBanner(NamedTuple):
    outage: ServiceOutage
    name: str | None  # None: the hold is of a kind alone, which needs a service without a name

    @property
    def resumes(self) -> bool:
        return self.outage.resumed_at_us is not None


def banners_of(outages: Sequence[ServiceOutage]) -> list[OutageBanner]:
    """Return the banners, those of held services first."""
    banners = [OutageBanner(outage, _name_of(outage)) for outage in outages]
    return sorted(banners, key=lambda banner: (banner.resumes, banner.outage.began_at_us))


def _name_of(outage: ServiceOutage) -> str | None:
    is_of_kind = any(outage.service == service_of_kind(kind) for kind in outage.kinds)
    return None if is_of_kind else outage.service


@router.post("/outages/resume")
def resume_service(
    request: Request,
    visitor: Operator,
    service: Annotated[str, Form(min_length=1, max_length=RESUMABLE_BYTES_MAX)],
) -> Response:
    with refusing_misuse(), suppress(NotFound):  # the hold may have ended meanwhile
        visitor.service.queue.resume(service)
    return see_other(request, "/")
