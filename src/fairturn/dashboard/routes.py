"""Adds the page to the application of the service."""

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
    login,
    now,
    rules,
    search,
    stream,
    whatif,
)
from fairturn.dashboard.comparison import Comparison
from fairturn.dashboard.customer_index import Directory
from fairturn.dashboard.demo import Demo
from fairturn.dashboard.language import all_tongues
from fairturn.dashboard.login import back_to
from fairturn.dashboard.renderer import HEADERS, STATIC, PageRoute, see_other, static_file, tell
from fairturn.dashboard.samples import Trail
from fairturn.dashboard.visitors import LANGUAGE_COOKIE, Anybody, Page
from fairturn.demo.traffic import Pace
from fairturn.errors import StoreError
from fairturn.service.problems import Code, Problem
from fairturn.service.service import Service

LOOK_S = 1.0
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
    whatif,
    demo,
    stream,
)
_YEAR_S = 365 * 86_400

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/page/{name}")
def get_file(name: str) -> Response:
    """A style sheet or a script. Its address has its version in it."""
    if name not in STATIC:
        raise Problem(Code.NOT_FOUND)
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(static_file(name), media_type=STATIC[name], headers=headers)


@router.get("/language")
def choose_language(
    request: Request, visitor: Anybody, to: Annotated[str, Query()], back: str = "/"
) -> Response:
    """Keep the language that was chosen."""
    response = see_other(request, back_to(back))
    if to in visitor.page.tongues:
        response.set_cookie(LANGUAGE_COOKIE, to, max_age=_YEAR_S, httponly=True, samesite="lax")
    return response


def install(app: FastAPI, *, works: bool = False, demo: Pace | None = None) -> None:
    """Let the application show pages beside its operations.

    `works`: the same command runs a worker. `demo`: how fast it works off the traffic of the demo.
    """
    service: Service = app.state.service
    store, clock = service.queue.store, service.clock
    page = Page(
        tongues=all_tongues(),
        trail=Trail(store, clock),
        directory=Directory(store, clock),
        example=now.Example(),
        runs=whatif.Runs(),
        demo=Demo(),
        works=works,
        comparison=None if demo is None else Comparison(demo),
    )
    app.state.page = page
    for routes in (router, *(each.router for each in PAGES)):
        app.include_router(routes)
    answer: Any = app.exception_handlers[HTTPException]

    async def show_or_answer(request: Request, error: Exception) -> Response:
        """To somebody with a browser, an address that leads nowhere is a page too."""
        missing = isinstance(error, HTTPException) and error.status_code == 404
        browsing = request.headers.get("sec-fetch-dest") == "document"
        if missing and browsing and request.method == "GET":
            return await service.run(tell, request, Problem(Code.NOT_FOUND))
        response: Response = await answer(request, error)
        return response

    app.add_exception_handler(HTTPException, show_or_answer)
    serving = app.router.lifespan_context

    @asynccontextmanager
    async def looking(app: FastAPI) -> AsyncIterator[Any]:
        async with serving(app) as state, anyio.create_task_group() as tasks:
            tasks.start_soon(_look, service, page)
            yield state
            page.demo.end()
            tasks.cancel_scope.cancel()

    app.router.lifespan_context = looking


async def _look(service: Service, page: Page) -> None:
    """Look once a second, for as long as anything changes or runs. What goes wrong here is told in
    the log, and must not end the service: it is only a page that knows less."""
    version = -1
    while not service.watch.closed:
        if version != service.watch.version or page.trail.is_stale():
            version = service.watch.version
            try:
                await service.run(page.trail.look)
            except StoreError:
                pass  # whoever looks at a page is told
            except Exception:
                _LOG.exception("the page could not look at the queue")
        await asyncio.sleep(LOOK_S)
