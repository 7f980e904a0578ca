"""The service in a process of its own, for `benchmarks/http.py`, with one operation more: an empty
POST, which says what the server and its framework take by themselves.

    python -m benchmarks.http_server DATABASE
"""

import sys

from fastapi import FastAPI, Response

from fairturn import Queue
from fairturn.service.app import make_app
from fairturn.service.options import Plan
from fairturn.service.server import Address, Server


def add_empty(app: FastAPI) -> None:
    """`POST /empty`: everything that every request goes through, and nothing else."""

    @app.post("/empty")
    async def empty() -> Response:
        return Response(status_code=204)

    app.router.routes.insert(0, app.router.routes.pop())  # found first, like a submission


def main() -> None:
    with Queue(sys.argv[1]) as queue:
        app = make_app(queue, Plan(rate="100000000/second", streams_per_key_max=2_000))
        add_empty(app)
        Server(app, Address(port=0), on_started=lambda url: print(url, flush=True)).run()


if __name__ == "__main__":
    main()
