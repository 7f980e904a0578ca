"""The service in a separate process, for `benchmarks/http.py`, with an additional empty POST that
measures the server and its framework alone.

    python -m benchmarks.http_server DATABASE
"""

import sys

from fastapi import FastAPI, Response

from fairturn import Queue
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from fairturn.service.server import ListenAddress, Server


def add_empty(app: FastAPI) -> None:
    """Add `POST /empty`, which runs only the code that every request runs."""

    @app.post("/empty")
    async def empty() -> Response:
        return Response(status_code=204)

    app.router.routes.insert(0, app.router.routes.pop())  # matched first, like a submission


def main() -> None:
    with Queue(sys.argv[1]) as queue:
        limits = ServiceLimits(
            rate="100000000/second", streams_per_key_max=2_000, connections_per_address_max=2_000
        )
        app = make_app(queue, limits)
        add_empty(app)
        Server(app, ListenAddress(port=0), on_started=lambda url: print(url, flush=True)).run()


if __name__ == "__main__":
    main()
