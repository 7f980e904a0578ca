"""Traces of a document with OpenTelemetry: from whoever submits it, over its wait, to its handler.

    queue.submit("acme", file="invoice.pdf", metadata=with_context({"pages": 3}))

    @traced
    def extract(document): ...

The context travels in the metadata of the document, as the `traceparent` of the W3C. The service
takes it from the header of that name. It takes no part in whether an idempotency key fits: each try
of a client has another one.
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
_ROOM_BYTES = 100  # that a context takes at most, as a part of the metadata
_NAME = "fairturn"

Handler = TypeVar("Handler", bound=Callable[..., Any])


def with_context(metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The metadata, with the context of the span that is current."""
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return dict(carrying(metadata, carrier.get(TRACEPARENT)) or {})


@contextmanager
def submitting(header: str | None) -> Iterator[str | None]:
    """Around a submission that came with this `traceparent`: the context that the document is to
    carry. Without OpenTelemetry, or without anybody who listens, that is the sender's own."""
    if header is None and "opentelemetry.sdk" not in sys.modules:
        yield None  # nobody listens: this is the common case, and to ask OpenTelemetry takes longer
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
    """The metadata with a context, if there is room: a trace is no reason to refuse a document."""
    if context is None or len(metadata or ()) >= METADATA_KEYS_MAX:
        return metadata
    if metadata and len(json.dumps(metadata, default=str)) > METADATA_BYTES_MAX - _ROOM_BYTES:
        return metadata
    return {TRACEPARENT: context, **(metadata or {})}


def traced(handler: Handler, *, tracer_provider: "TracerProvider | None" = None) -> Handler:
    """The handler, with a span for each attempt and one for the wait before it. Both are children
    of the span in which the document was submitted."""
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
    submitted_ns = document.submitted_at * 1_000
    tracer.start_span("wait", above, attributes=attributes, start_time=submitted_ns).end()
    with tracer.start_as_current_span(
        "handle", above, trace.SpanKind.CONSUMER, attributes=attributes
    ):
        yield
