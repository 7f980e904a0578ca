"""Contents in object storage: written completely or not at all, checked when read, swept when
orphaned; and their use by workers and the service. The server is a real one, in another process."""

import hashlib
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fairturn import Queue, Worker
from fairturn.clock import SystemClock
from fairturn.config import open_contents
from fairturn.contents.local import SWEEP_AGE_US, Folder, sweep
from fairturn.contents.s3 import PART_BYTES, Bucket
from fairturn.errors import ContentDamaged, StoreError, StoreRefused, StoreUnavailable
from fairturn.model import ContentRef, NewDocument, Receipt
from fairturn.service.app import make_app
from fairturn.stores.sqlite import SqliteStore
from tests import handlers
from tests.http_server import asked, bearer, client_of, code_of, key_for
from tests.servers import objects
from tests.servers.objects import Objects
from tests.test_handlers import AT_ONCE

EVER = 1 << 62
KINDS = pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])


@pytest.fixture(scope="module")
def running() -> Iterator[Objects]:
    with objects.started() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def connected(running: Objects) -> Iterator[Bucket]:
    """Shared by all tests, because creating an AWS client takes half a second."""
    bucket = Bucket(f"s3://{running.bucket}/invoices")
    yield bucket
    bucket.close()


@pytest.fixture
def server(running: Objects) -> Objects:
    running.clear()
    return running


@pytest.fixture
def bucket(connected: Bucket, server: Objects) -> Bucket:
    return connected


@pytest.fixture
def queue(bucket: Bucket, tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db", contents=bucket) as queue:
        yield queue


def stored(server: Objects) -> list[str]:
    answer = server.client.list_objects_v2(Bucket=server.bucket)
    return [each["Key"] for each in answer.get("Contents", ())]


def unfinished(server: Objects) -> list[str]:
    answer = server.client.list_multipart_uploads(Bucket=server.bucket)
    return [each["Key"] for each in answer.get("Uploads", ())]


def read(bucket: Bucket, ref: ContentRef) -> bytes:
    with bucket.open(ref) as stream:
        return stream.read()


# ── Writing and reading ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 10, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 5])
def test_what_was_put_in_pieces_comes_back_whole(
    server: Objects, bucket: Bucket, size: int
) -> None:
    whole = (bytes(range(251)) * (size // 251 + 1))[:size]
    pieces = [whole[start : start + 3_000_000] for start in range(0, size, 3_000_000)]

    ref = bucket.put(pieces)

    assert read(bucket, ref) == whole
    assert ref[1:] == (size, hashlib.sha256(whole).digest())
    assert stored(server) == [f"invoices/{ref.name}"]
    assert unfinished(server) == []


def test_a_content_has_its_name_only_when_it_is_whole(server: Objects, bucket: Bucket) -> None:
    writing = bucket.begin()
    writing.write(b"x" * (PART_BYTES + 1))
    assert (stored(server), len(unfinished(server))) == ([], 1)

    writing.finish()
    writing.abandon()

    assert (len(stored(server)), unfinished(server)) == (1, [])


@pytest.mark.parametrize("size", [10, PART_BYTES + 1])
def test_what_is_abandoned_leaves_nothing(server: Objects, bucket: Bucket, size: int) -> None:
    writing = bucket.begin()
    writing.write(b"x" * size)

    writing.abandon()
    writing.abandon()

    assert (stored(server), unfinished(server)) == ([], [])


def test_a_content_that_is_too_large_is_refused_and_leaves_nothing(
    server: Objects, bucket: Bucket
) -> None:
    size = PART_BYTES + 1_000

    with pytest.raises(ValueError, match="more than 8,389,608 bytes"):
        bucket.put([b"x" * size, b"x"], size_bytes_max=size)

    assert (stored(server), unfinished(server)) == ([], [])


def test_a_large_stream_is_never_whole_in_memory(bucket: Bucket) -> None:
    tracemalloc.start()
    try:
        ref = bucket.put(bytes(1_048_576) for _ in range(32))
        bucket.open(ref).close()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert ref.size_bytes == 32 * 1_048_576
    assert most < PART_BYTES


# ── What can go wrong ────────────────────────────────────────────────────────────────────────────


def test_bytes_that_are_missing_or_changed_are_told(server: Objects, bucket: Bucket) -> None:
    ref = bucket.put([b"as it was"])
    client, key = server.client, f"invoices/{ref.name}"

    client.put_object(Bucket=server.bucket, Key=key, Body=b"as it is.")
    with pytest.raises(ContentDamaged, match="has the SHA-256"):
        bucket.open(ref)
    client.delete_object(Bucket=server.bucket, Key=key)
    with pytest.raises(ContentDamaged, match="is missing in s3://documents/invoices"):
        bucket.open(ref)


def test_a_bucket_that_is_not_there_is_told(server: Objects) -> None:
    absent = Bucket("s3://nowhere")

    with pytest.raises(StoreError, match="s3://nowhere: cannot write content: NoSuchBucket"):
        absent.put([b"x"])
    with pytest.raises(StoreError, match="s3://nowhere: cannot use"):
        absent.check()


def test_a_server_that_does_not_answer_may_answer_later(
    server: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("fairturn.contents.s3.ATTEMPTS", 1)

    with pytest.raises(StoreUnavailable, match="Could not connect"):
        Bucket(f"s3://{server.bucket}").put([b"x"])


@pytest.mark.parametrize("url", ["s3://", "s3://A", "s3:///x", "s3://a b", "http://x"])
def test_an_address_that_is_no_bucket_is_told(url: str) -> None:
    with pytest.raises(ValueError, match="write it as s3://BUCKET"):
        Bucket(url)


def test_a_place_is_a_folder_or_a_bucket(server: Objects, tmp_path: Path) -> None:
    assert isinstance(open_contents("s3://documents/a"), Bucket)
    assert isinstance(open_contents(str(tmp_path)), Folder)
    with pytest.raises(StoreRefused, match="gs:// URLs are not supported for contents"):
        open_contents("gs://documents")


# ── Sweeping ─────────────────────────────────────────────────────────────────────────────────────


def test_a_sweep_takes_what_a_crash_left_and_nothing_else(
    server: Objects, bucket: Bucket, queue: Queue
) -> None:
    client = server.client
    kept = queue.submit("acme", content=b"x" * 100_000).id
    bucket.put([b"of no document"])
    strange = ["invoices/notes.txt", "other/" + "0" * 32]
    for key in strange:
        client.put_object(Bucket=server.bucket, Key=key, Body=b"not ours")
    now = SystemClock().now()

    assert sweep(bucket, queue.store.unreferenced, now) == 0
    # An upload that a killed process left unfinished. For moto every upload is old.
    client.create_multipart_upload(Bucket=server.bucket, Key="invoices/" + "a" * 32)
    assert sweep(bucket, queue.store.unreferenced, now + 2 * SWEEP_AGE_US) == 2

    name = queue.get(kept).content_name
    assert sorted(stored(server)) == sorted([f"invoices/{name}", *strange])
    assert unfinished(server) == []
    assert list(bucket.names(EVER)) == [name]


class SubmitsTwice(SqliteStore):
    """A store that sends a submission twice because the first reply was lost."""

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        super().submit(documents, connection=connection)
        return super().submit(documents, connection=connection)


def test_a_submission_that_is_replayed_after_a_lost_reply_keeps_its_content(
    server: Objects, bucket: Bucket, tmp_path: Path
) -> None:
    with Queue(SubmitsTwice(tmp_path / "documents.db"), contents=bucket) as queue:
        receipt = queue.submit("acme", content=b"x" * 100_000, key="order-17")

        assert receipt.replayed
        assert queue.read(receipt.id) == b"x" * 100_000
        queue.submit("acme", content=b"x" * 100_000, key="order-17")
        assert len(stored(server)) == 1


def test_contents_are_deleted_with_their_documents(server: Objects, queue: Queue) -> None:
    for _ in range(3):
        queue.submit("acme", content=b"x" * 100_000)

    queue.purge("acme")
    queue.contents.delete(["0" * 32])  # one that is already deleted

    assert stored(server) == []


# ── Workers and the service ──────────────────────────────────────────────────────────────────────


@KINDS
def test_a_handler_reads_a_content_and_gives_back_a_file(
    server: Objects, queue: Queue, threads: bool
) -> None:
    large = queue.submit("acme", content=b"x" * 300_000).id
    payload = queue.submit("acme", payload="y" * 300_000).id
    Worker(queue, handlers.size_of_content, threads=threads, retry=AT_ONCE).run(until_empty=True)
    file = queue.submit("acme").id
    Worker(queue, handlers.write_file, threads=threads).run(until_empty=True)

    assert queue.result(large) == {"streamed": 300_000, "read": 300_000, "file": 300_000}
    assert "has a payload" in (queue.get(payload).error or "")
    with queue.open_result(file) as stream:
        assert stream.read() == b"page " * 100_000
    assert len(stored(server)) == 3


def test_a_content_that_is_gone_fails_the_attempt_without_telling_its_address(
    server: Objects, queue: Queue
) -> None:
    """The URL of a content grants access to it, and a customer sees the error of its document."""
    id = queue.submit("acme", content=b"x" * 300_000).id
    server.client.delete_object(Bucket=server.bucket, Key=stored(server)[0])

    Worker(queue, handlers.size_of_content, retry=AT_ONCE).run(until_empty=True)

    error = queue.get(id).error or ""
    assert "the content is missing in its bucket" in error
    assert "Signature" not in error


def test_an_upload_goes_into_the_bucket_and_comes_back(server: Objects, queue: Queue) -> None:
    body = bytes(range(256)) * 65_536  # two parts
    with client_of(queue, key=key_for(queue, "acme")) as client:
        id = client.post("/v1/documents", content=body).json()["id"]
        wrong = client.post(f"/v1/documents?sha256={'0' * 64}", content=body)

        assert client.get(f"/v1/documents/{id}/content").content == body
        assert code_of(wrong) == (422, "checksum_wrong")
        assert client.get("/readyz").status_code == 200
    assert (len(stored(server)), unfinished(server)) == (1, [])


def test_without_its_bucket_the_service_is_not_ready_and_says_try_again(
    server: Objects, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = bearer(key_for(queue, "acme"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("fairturn.contents.s3.ATTEMPTS", 1)
    queue.contents = Bucket(f"s3://{server.bucket}")
    app = make_app(queue)

    ready = asked(app, "GET", "/readyz")
    large = asked(app, "POST", "/v1/documents", content=b"x" * 100_000, headers=key)

    assert ready.json()["reasons"] == ["contents: they cannot be written"]
    assert code_of(large) == (503, "unavailable")
    assert queue.list().documents == []
