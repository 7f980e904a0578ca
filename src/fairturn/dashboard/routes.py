"""Adds the pages to the application of the service."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, FastAPI, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fairturn.dashboard import (
    customer_page,
    customers,
    demo,
    document_list,
    documents,
    kinds,
    login,
    now,
    outages,
    rules,
    search,
    stream,
    whatif,
)
from fairturn.dashboard.customer_index import CustomerIndex
from fairturn.dashboard.demo import Demo, DemoComparison
from fairturn.dashboard.language import all_tongues
from fairturn.dashboard.login import back_to
from fairturn.dashboard.renderer import HEADERS, STATIC, PageRoute, see_other, static_file, tell
from fairturn.dashboard.samples import ActivitySampler
from fairturn.dashboard.visitors import LANGUAGE_COOKIE, Anybody, PageContext
from fairturn.errors import StoreError
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.service import Service
from fairturn.simulator.demo.traffic import DemoPace

SAMPLE_EVERY_S = 1.0
_LOG = logging.getLogger("fairturn.dashboard")
PAGES = (
    login,
    rules,
    now,
    documents,
    search,
    document_list,
    customers,
    customer_page,
    kinds,
    outages,
    whatif,
    demo,
    stream,
)
_YEAR_S = 365 * 86_400

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/page/{name}")
def get_file(name: str) -> Response:
    if name not in STATIC:
        raise Problem(ProblemCode.NOT_FOUND)
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(static_file(name), media_type=STATIC[name], headers=headers)


@router.get("/language")
def choose_language(
    request: Request, visitor: Anybody, to: Annotated[str, Query()], back: str = "/"
) -> Response:
    """Store the language in a cookie."""
    response = see_other(request, back_to(back))
    if to in visitor.page.tongues:
        response.set_cookie(LANGUAGE_COOKIE, to, max_age=_YEAR_S, httponly=True, samesite="lax")
    return response


def install(app: FastAPI, *, works: bool = False, demo: DemoPace | None = None) -> None:
    """Add the pages to an application.

    `works`: the same command runs a worker. `demo`: the pace of the worker, if the command submits
    the traffic of the demo.
    """
    service: Service = app.state.service
    store, clock = service.queue.queries, service.clock
    page = PageContext(
        tongues=all_tongues(),
        trail=ActivitySampler(store, clock),
        directory=CustomerIndex(store, clock),
        example=now.ExampleCache(),
        runs=whatif.WhatIfRuns(),
        demo=Demo(),
        works=works,
        comparison=None if demo is None else DemoComparison(demo),
    )
    app.state.page = page
    for routes in (router, *(each.router for each in PAGES)):
        app.include_router(routes)
    respond: Any = app.exception_handlers[HTTPException]

    async def show_or_respond(request: Request, error: Exception) -> Response:
        """Render a 404 as a page for browsers."""
        missing = isinstance(error, HTTPException) and error.status_code == 404
        browsing = request.headers.get("sec-fetch-dest") == "document"
        if missing and browsing and request.method == "GET":
            return await service.run(tell, request, Problem(ProblemCode.NOT_FOUND))
        response: Response = await respond(request, error)
        return response

    app.add_exception_handler(HTTPException, show_or_respond)
    service_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with service_lifespan(app) as state, anyio.create_task_group() as tasks:
            tasks.start_soon(_sample, service, page)
            yield state
            page.demo.end()
            tasks.cancel_scope.cancel()

    app.router.lifespan_context = lifespan


async def _sample(service: Service, page: PageContext) -> None:
    """Sample the queue once a second while it changes. Errors are logged and must not stop the
    service: only the page depends on the samples."""
    version = -1
    while not service.watch.closed:
        if version != service.watch.version or page.trail.is_stale():
            version = service.watch.version
            try:
                await service.run(page.trail.sample)
            except StoreError:
                pass  # the pages show that the store is unavailable
            except Exception:
                _LOG.exception("the page could not sample the queue")
        await asyncio.sleep(SAMPLE_EVERY_S)
