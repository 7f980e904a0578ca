"""`/docs`: Swagger UI for the OpenAPI description, served from the package fastapi-offline.

The page loads nothing from other hosts and contains no inline script.
"""

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from fairturn.service.problems import Problem, ProblemCode

router = APIRouter(include_in_schema=False)

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


@router.get("/docs")
def get_docs() -> Response:
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@router.get("/docs/{name}")
def get_docs_file(name: str) -> Response:
    if name == "begin.js":
        return Response(_BEGIN, media_type="text/javascript", headers=_HEADERS)
    if name not in _FILES:
        raise Problem(ProblemCode.NOT_FOUND)
    file = resources.files("fastapi_offline") / "static" / name
    headers = {**_HEADERS, "Cache-Control": "public, max-age=86400"}
    return Response(file.read_bytes(), media_type=_FILES[name], headers=headers)
