"""`/openapi.json`, and `/docs`: Swagger UI for it, served from the package fastapi-offline.

The page loads nothing from other hosts and contains no inline script.
"""

import json
import threading
from functools import cache
from importlib import resources

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from fairturn.service.callers import Public
from fairturn.service.problems import Problem, ProblemCode
from fairturn.wire import JSON

router = APIRouter(include_in_schema=False, dependencies=[Public])

# Swagger UI loads some of its images from data: URLs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY}
_FILES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon.png": "image/png",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fairturn: the HTTP API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon.png">
</head>
<body>
<div id="docs"></div>
<noscript>The description of the API is at <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/begin.js"></script>
</body>
</html>
"""
_BEGIN = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null
});
"""


class CachedDescription:
    """A cache of the OpenAPI description as JSON: generating it takes 0.1 s, and any client can
    request it without a key."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._encoded: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def encoded(self, root_path: str) -> bytes:
        """Return the description. The first call takes long: run it in a thread."""
        with self._lock:
            if root_path not in self._encoded:
                description = self._app.openapi()
                if root_path:
                    description = {**description, "servers": [{"url": root_path}]}
                self._encoded[root_path] = json.dumps(description).encode()
            return self._encoded[root_path]


@router.get("/openapi.json")
def get_openapi(request: Request) -> Response:
    description: CachedDescription = request.app.state.description
    root_path = request.scope.get("root_path", "").rstrip("/")
    return Response(description.encoded(root_path), media_type=JSON)


@router.get("/docs")
async def get_docs() -> Response:
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@router.get("/docs/{name}")
def get_docs_file(name: str) -> Response:
    if name == "begin.js":
        return Response(_BEGIN, media_type="text/javascript", headers=_HEADERS)
    if name not in _FILES:
        raise Problem(ProblemCode.NOT_FOUND)
    headers = {**_HEADERS, "Cache-Control": "public, max-age=86400"}
    return Response(_file(name), media_type=_FILES[name], headers=headers)


@cache
def _file(name: str) -> bytes:
    return (resources.files("fastapi_offline") / "static" / name).read_bytes()
