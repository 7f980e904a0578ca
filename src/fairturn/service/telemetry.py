"""OpenTelemetry traces of a document: its submission, its wait and its handler.

    queue.submit("acme", file="invoice.pdf", metadata=with_context({"pages": 3}))

    @traced
    def extract(document): ...

The context is propagated in the document's metadata, as a W3C `traceparent`; the service reads it
from the header of that name. Idempotency ignores it: each retry of a client has another one.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from fairturn.model import METADATA_BYTES_MAX, METADATA_KEYS_MAX, TRACEPARENT

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_CONTEXT_BYTES = 100  # in the metadata
_NAME = "fairturn"

Handler = TypeVar("Handler", bound=Callable[..., Any])


def with_context(metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the metadata with the context of the current span."""
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return dict(carrying(metadata, carrier.get(TRACEPARENT)) or {})


@contextmanager
def submitting(header: str | None) -> Iterator[str | None]:
    """Open a span around a submission with this `traceparent`; yield the context for the document.

    Without OpenTelemetry, that is the sender's context.
    """
    if header is None and "opentelemetry.sdk" not in sys.modules:
        yield None  # no SDK is loaded: avoid the cost of OpenTelemetry
        return
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        yield header if header is not None and _FORM.fullmatch(header) else None
        return
    above = None if header is None else propagate.extract({TRACEPARENT: header})
    tracer = trace.get_tracer(_NAME)
    with tracer.start_as_current_span("submit", above, trace.SpanKind.PRODUCER):
        yield with_context().get(TRACEPARENT)


def carrying(metadata: Mapping[str, Any] | None, context: str | None) -> Mapping[str, Any] | None:
    """Return the metadata with a context if it fits: a trace must not fail a submission."""
    if context is None or len(metadata or ()) >= METADATA_KEYS_MAX:
        return metadata
    if metadata and len(json.dumps(metadata, default=str)) > METADATA_BYTES_MAX - _CONTEXT_BYTES:
        return metadata
    return {TRACEPARENT: context, **(metadata or {})}


def traced(handler: Handler, *, tracer_provider: "TracerProvider | None" = None) -> Handler:
    """Return the handler with a span for each attempt and one for the wait before it, both children
    of the span of the submission."""
    run: Any
    if inspect.iscoroutinefunction(handler):

        @wraps(handler)
        async def run(document: Any) -> Any:
            with _attempt(document, tracer_provider):
                return await handler(document)
    else:

        @wraps(handler)
        def run(document: Any) -> Any:
            with _attempt(document, tracer_provider):
                return handler(document)

    traced_handler: Handler = run
    return traced_handler


@contextmanager
def _attempt(document: Any, provider: "TracerProvider | None") -> Iterator[None]:
    from opentelemetry import propagate, trace

    tracer = trace.get_tracer(_NAME, tracer_provider=provider)
    carried = str(document.metadata.get(TRACEPARENT, ""))
    above = propagate.extract({TRACEPARENT: carried})
    attributes = {
        "messaging.system": _NAME,
        "messaging.message.id": document.id,
        "fairturn.priority": document.priority,
        "fairturn.attempt": document.attempt,
    }
    submitted_ns = document.submitted_at_us * 1_000
    tracer.start_span("wait", above, attributes=attributes, start_time=submitted_ns).end()
    with tracer.start_as_current_span(
        "handle", above, trace.SpanKind.CONSUMER, attributes=attributes
    ):
        yield
