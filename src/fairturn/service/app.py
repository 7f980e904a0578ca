"""The application: routes, problems and limits around a queue."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from fairturn.access.registry import Keys
from fairturn.clock import Clock, SystemClock
from fairturn.queue import Queue
from fairturn.service import (
    access_keys,
    administration,
    api_docs,
    bulk,
    customers,
    documents,
    events,
    health,
    metrics,
    ndjson,
    problems,
    room,
    shapes,
    submissions,
)
from fairturn.service.batcher import Collector
from fairturn.service.change_feed import Watch
from fairturn.service.logs import Served
from fairturn.service.middleware import Guard
from fairturn.service.options import Plan
from fairturn.service.rates import Rates
from fairturn.service.service import Service

_ABOUT = """
A queue for documents that gives every customer a fair turn.

Show an access key as `Authorization: Bearer ft_…`. Moments are microseconds since 1970 UTC. Errors
are problem documents (RFC 9457): `code` stays, `title` is a sentence in the language that
`Accept-Language` asks for (en, de, es, pl, pt).
"""


class _Described(FastAPI):
    """An application whose description has the form of a problem, which no operation returns."""

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        _, form = models_json_schema(
            [(shapes.Problem, "serialization")], ref_template="#/components/schemas/{model}"
        )
        for name, schema in form["$defs"].items():
            description["components"]["schemas"].setdefault(name, schema)
        return description


def make_app(
    queue: Queue,
    plan: Plan | None = None,
    *,
    clock: Clock | None = None,
    on_served: Callable[[Served], None] | None = None,
) -> FastAPI:
    """The service of a queue, as an ASGI application. `on_served` hears of every request."""
    from importlib.metadata import version

    plan, clock = plan or Plan(), clock or SystemClock()
    service = Service(
        queue=queue,
        keys=Keys(queue.store, clock=clock),
        clock=clock,
        plan=plan,
        rates=Rates(plan.rate, clock),
        watch=Watch(queue.store),
    )

    @asynccontextmanager
    async def watching(app: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.watch.run)
            yield
            service.watch.close()
            tasks.cancel_scope.cancel()

    app = _Described(
        title="fairturn",
        version=version("fairturn"),
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # where to would be taken from a header of the caller
        lifespan=watching,
        separate_input_output_schemas=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    app.state.collector = Collector(service)
    app.state.looks = events.Looks(service)
    app.state.readiness = health.Readiness(service)
    problems.install(app)
    for routes in (
        submissions,
        ndjson,
        documents,
        bulk,
        customers,
        room,
        administration,
        access_keys,
        events,
        health,
        metrics,
        api_docs,
    ):
        app.include_router(routes.router)
    # Found first, and without what the framework does where it reads the parameters itself.
    app.router.routes.insert(0, Route("/v1/documents", submissions.submit, methods=["POST"]))
    app.add_middleware(Guard, plan=plan, on_served=on_served, clock=clock)
    return app
