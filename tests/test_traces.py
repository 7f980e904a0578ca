"""Traces: one from the submission, through the wait, to the handler, in whichever processes."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fairturn import ClaimedDocument, Queue, Worker
from fairturn.model import METADATA_KEYS_MAX
from fairturn.service.app import make_app
from fairturn.service.telemetry import traced, with_context
from tests.http_server import TOKEN, asked, bearer, code_of
from tests.test_handlers import AT_ONCE

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue(":memory:") as queue:
        yield queue


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider


def pages(document: ClaimedDocument) -> int:
    return 3


async def pages_later(document: ClaimedDocument) -> int:
    return 3


def fail(document: ClaimedDocument) -> int:
    raise ValueError("no pages")


def work(queue: Queue, handler: Callable[[ClaimedDocument], object]) -> None:
    Worker(queue, handler, threads=True, retry=AT_ONCE).run(until_empty=True)


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


@pytest.mark.parametrize("handler", [pages, pages_later])
def test_the_handler_is_part_of_the_trace_of_the_submission(
    queue: Queue, provider: TracerProvider, spans: InMemorySpanExporter, handler: Any
) -> None:
    with provider.get_tracer("app").start_as_current_span("upload") as upload:
        id = queue.submit("acme", payload=1, metadata=with_context({"pages": 3})).id

    work(queue, traced(handler, tracer_provider=provider))

    submitted, waited, handled = spans.get_finished_spans()
    assert [span.name for span in (submitted, waited, handled)] == ["upload", "wait", "handle"]
    assert {trace_of(span) for span in (submitted, waited, handled)} == {trace_of(submitted)}
    for span in (waited, handled):
        assert span.parent is not None
        assert span.parent.span_id == upload.get_span_context().span_id
        assert span.attributes is not None
        assert span.attributes["messaging.message.id"] == id
    document = queue.get(id)
    assert waited.start_time == document.submitted_at_us * 1_000
    assert document.metadata["pages"] == 3


def test_a_handler_that_fails_is_seen_to_fail(
    queue: Queue, provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    queue.configure(attempts_max=2)
    queue.submit("acme", payload=1)

    work(queue, traced(fail, tracer_provider=provider))

    handled = [span for span in spans.get_finished_spans() if span.name == "handle"]
    assert [span.attributes and span.attributes["fairturn.attempt"] for span in handled] == [1, 2]
    assert all(not span.status.is_ok for span in handled)


def test_the_service_takes_the_trace_from_the_header(queue: Queue) -> None:
    app = make_app(queue, token=TOKEN)

    for path in ("/v1/documents?customer=acme", '/v1/documents?customer=acme&metadata={"a":1}'):
        id = asked(app, "POST", path, json=1, headers={**SENT, **bearer(TOKEN)}).json()["id"]
        assert queue.get(id).metadata["traceparent"].startswith(f"00-{TRACE}-")

    strange = asked(
        app,
        "POST",
        "/v1/documents?customer=acme",
        json=1,
        headers={"traceparent": "x" * 900, **bearer(TOKEN)},
    )
    assert queue.get(strange.json()["id"]).metadata == {}


def test_each_document_of_a_batch_takes_the_trace_from_the_header(queue: Queue) -> None:
    app = make_app(queue, token=TOKEN)
    own = f"00-{'1' * 32}-{'2' * 16}-01"
    lines = [
        '{"customer": "acme", "payload": 1}',
        '{"customer": "acme", "payload": 1, "metadata": {"a": 1}}',
        f'{{"customer": "acme", "payload": 1, "metadata": {{"traceparent": "{own}"}}}}',
    ]

    def submit(*lines: str) -> httpx.Response:
        headers = {**SENT, **bearer(TOKEN), "Content-Type": "application/x-ndjson"}
        content = "\n".join(lines)
        return asked(app, "POST", "/v1/documents/batch", content=content, headers=headers)

    first, second, third = (
        queue.get(receipt["id"]).metadata for receipt in submit(*lines).json()["receipts"]
    )

    assert first["traceparent"].startswith(f"00-{TRACE}-")
    assert second == {"a": 1, "traceparent": first["traceparent"]}
    assert third == {"traceparent": own}
    wrong = submit('{"customer": "acme", "payload": 1, "metadata": 3}')
    assert code_of(wrong) == (422, "invalid")
    assert "metadata" in wrong.json()["detail"]


def test_another_trace_does_not_make_it_another_document(queue: Queue) -> None:
    app = make_app(queue, token=TOKEN)
    other = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}

    def submit(trace: dict[str, str], body: int = 1) -> httpx.Response:
        headers = {**trace, **bearer(TOKEN), "Idempotency-Key": "k"}
        return asked(app, "POST", "/v1/documents?customer=acme", json=body, headers=headers)

    answers = [submit(SENT), submit(other), submit({})]

    assert [answer.status_code for answer in answers] == [201, 200, 200]
    assert code_of(submit(SENT, 2)) == (422, "key_reused")


def test_a_trace_is_no_reason_to_refuse_a_document(queue: Queue) -> None:
    full = {f"k{n}": n for n in range(METADATA_KEYS_MAX)}

    with TracerProvider().get_tracer("app").start_as_current_span("upload"):
        assert with_context(full) == full
        large = {"text": "x" * 65_500}
        assert with_context(large) == large
