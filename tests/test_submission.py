"""A submission is stored exactly, or rejected with a sentence that contains the value."""

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn import Queue
from fairturn.clock import from_datetime
from fairturn.model import (
    COST_MAX,
    CUSTOMER_BYTES_MAX,
    INLINE_BYTES_MAX,
    KEY_BYTES_MAX,
    METADATA_BYTES_MAX,
    METADATA_KEYS_MAX,
    NAME_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    BodyType,
    State,
    SubmissionFields,
)
from fairturn.validation.submission import JSON_DEPTH_MAX
from fairturn.wire import SUBMISSION

# Every character, including NUL and lone surrogates.
texts = st.text(st.characters(exclude_categories=()), max_size=40)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
NASTY = "a\x00b\ud800c\u202e\x1b[31m"


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def queue(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Queue]:
    folder = tmp_path_factory.mktemp("queue")
    database = ":memory:" if request.param == "memory" else folder / "documents.db"
    with Queue(database) as queue:
        yield queue


def test_the_list_of_fields_has_every_keyword_except_key_and_body() -> None:
    others = {"key", "payload", "content", "file"}

    assert {field.name for field in SUBMISSION} == SubmissionFields.__annotations__.keys() - others


def nested(depth: int) -> Any:
    value: Any = 1
    for n in range(depth):
        value = [value] if n % 2 else {"in": value}
    return value


# ── Payloads and metadata ────────────────────────────────────────────────────────────────────────


@given(payload=values)
def test_any_json_value_comes_back_as_it_went_in(queue: Queue, payload: Any) -> None:
    receipt = queue.submit("acme", payload=payload)

    found = queue.payload(receipt.id)

    assert found == payload
    assert json.dumps(found) == json.dumps(payload)  # 1 is not 1.0, and -0.0 is not 0.0


@given(metadata=st.dictionaries(texts, values, max_size=5))
def test_any_metadata_comes_back_as_it_went_in(queue: Queue, metadata: dict[str, Any]) -> None:
    receipt = queue.submit("acme", metadata=metadata)

    assert queue.get(receipt.id).metadata == metadata


@given(name=texts)
def test_any_name_is_stored_with_what_no_store_can_hold_replaced(queue: Queue, name: str) -> None:
    receipt = queue.submit("acme", payload=1, name=name)

    stored = queue.get(receipt.id).name

    assert stored == "".join(
        "\ufffd" if c == "\x00" or "\ud800" <= c <= "\udfff" else c for c in name
    )
    assert receipt.id in {d.id for d in queue.list(name=name, size=1_000).documents}


@pytest.mark.parametrize("name", [None, "named"])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_payload_up_to_64_kib_is_in_the_row_and_a_larger_one_outside(
    queue: Queue, extra: int, name: str | None
) -> None:
    payload = "x" * (INLINE_BYTES_MAX - 2 + extra)

    receipt = queue.submit("acme", payload=payload, name=name)

    document = queue.get(receipt.id)
    assert (document.body_type, document.size_bytes) == (BodyType.PAYLOAD, INLINE_BYTES_MAX + extra)
    assert (document.content_name is not None) == bool(extra)
    assert queue.payload(receipt.id) == payload


def test_a_payload_at_the_limit_is_accepted_and_one_byte_more_is_not(queue: Queue) -> None:
    receipt = queue.submit("acme", payload="x" * (PAYLOAD_BYTES_MAX - 2))

    with pytest.raises(
        ValueError, match="payload has 16,777,217 bytes as JSON; at most 16,777,216"
    ):
        queue.submit("acme", payload="x" * (PAYLOAD_BYTES_MAX - 1))

    assert len(queue.payload(receipt.id)) == PAYLOAD_BYTES_MAX - 2


def test_values_in_each_other_are_accepted_up_to_the_limit(queue: Queue) -> None:
    deepest = [nested(JSON_DEPTH_MAX - 1), *([] for _ in range(JSON_DEPTH_MAX))]

    receipt = queue.submit("acme", payload=deepest)

    assert queue.payload(receipt.id) == deepest


def test_many_values_beside_each_other_are_not_too_deep(queue: Queue) -> None:
    wide: list[Any] = [[{"a": []}] for _ in range(500)]

    receipt = queue.submit("acme", payload=wide)

    assert queue.payload(receipt.id) == wide


# ── Contents and files ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size_bytes", [0, 1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 3_000_000])
@pytest.mark.parametrize("how", ["bytes", "bytearray", "memoryview", "stream", "file"])
def test_a_content_comes_back_whichever_way_it_went_in(
    queue: Queue, tmp_path: Path, how: str, size_bytes: int
) -> None:
    content = bytes(n % 251 for n in range(size_bytes))
    file = tmp_path / "scan 1.pdf"
    file.write_bytes(content)
    ways: dict[str, dict[str, Any]] = {
        "bytes": {"content": content},
        "bytearray": {"content": bytearray(content)},
        "memoryview": {"content": memoryview(content)},
        "stream": {"content": BytesIO(content)},
        "file": {"file": file},
    }

    receipt = queue.submit("acme", **ways[how])

    document = queue.get(receipt.id)
    assert queue.read(receipt.id) == content
    assert (document.body_type, document.size_bytes) == (BodyType.CONTENT, size_bytes)
    assert (document.content_name is None) == (size_bytes <= INLINE_BYTES_MAX)
    assert document.name == ("scan 1.pdf" if how == "file" else None)


def test_a_file_is_copied_so_that_a_later_change_does_not_matter(
    queue: Queue, tmp_path: Path
) -> None:
    file = tmp_path / "scan.pdf"
    file.write_bytes(b"as submitted")
    receipt = queue.submit("acme", file=str(file), name="Invoice 17")

    file.write_bytes(b"changed later")

    assert queue.read(receipt.id) == b"as submitted"
    assert queue.get(receipt.id).name == "Invoice 17"


@pytest.mark.parametrize(
    "name",
    [
        "../../escape",
        "/absolute",
        "C:\\x",
        "%2e%2e%2f",
        ".",
        "..",
        "a" * 4_096,
        "con",
        NASTY,
        "\u202efdp",
    ],
)
def test_a_name_from_outside_is_never_a_path(tmp_path: Path, name: str) -> None:
    with Queue(tmp_path / "documents.db") as queue:
        queue.submit("acme", content=b"x" * 100_000, name=name)
        queue.submit("../../acme", content=b"x" * 100_000)

        written = {path.name for path in tmp_path.iterdir()}

    assert written <= {
        "documents.db",
        "documents.db-wal",
        "documents.db-shm",
        "documents.db.contents",
    }
    for path in (tmp_path / "documents.db.contents").rglob("*"):
        assert path.name.strip("0123456789abcdef") == ""


def test_a_long_name_is_cut_at_a_whole_character(queue: Queue) -> None:
    receipt = queue.submit("acme", payload=1, name="é" * NAME_BYTES_MAX)

    assert queue.get(receipt.id).name == "é" * (NAME_BYTES_MAX // 2)


def test_a_file_that_is_not_there_is_the_error_that_python_has_for_it(
    queue: Queue, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        queue.submit("acme", file=tmp_path / "absent.pdf")


@pytest.mark.parametrize("path", ["/dev/zero", "."])
def test_a_file_without_an_end_and_a_folder_are_refused(queue: Queue, path: str) -> None:
    with pytest.raises(ValueError, match="not a regular file"):
        queue.submit("acme", file=path)


# ── Due times and costs ──────────────────────────────────────────────────────────────────────────


def test_a_due_time_is_the_same_moment_in_every_time_zone(queue: Queue) -> None:
    moment = datetime(2199, 7, 1, 12, 0, 0, 123_456, tzinfo=UTC)
    elsewhere = moment.astimezone(timezone(timedelta(hours=5, minutes=45)))

    documents = [
        queue.get(queue.submit("acme", due_at=due_at).id)
        for due_at in (moment, elsewhere, from_datetime(moment))
    ]

    assert {d.due_at_us for d in documents} == {from_datetime(moment)}
    assert {d.state for d in documents} == {State.DELAYED}


def test_a_cost_is_kept_in_millionths(queue: Queue) -> None:
    costs = [queue.get(queue.submit("acme", cost=cost).id).cost for cost in (0, 1, 0.25, COST_MAX)]

    assert costs == [0, 1_000_000, 250_000, 1_000_000_000_000]


# ── Misuse ───────────────────────────────────────────────────────────────────────────────────────


class Texts:
    def read(self, size: int) -> str:
        return "text"


itself: list[Any] = []
itself.append(itself)
MISUSES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no customer": ({"customer": ""}, ValueError, "customer is empty"),
    "a customer that is no text": (
        {"customer": 17},
        TypeError,
        "customer must be a string, not int",
    ),
    "a customer of bytes": ({"customer": b"acme"}, TypeError, "not bytes"),
    "a customer that is a list": ({"customer": []}, TypeError, "not list"),
    "a NUL in the customer": ({"customer": "a\x00"}, ValueError, "customer 'a.x00' has a NUL"),
    "a surrogate in the customer": ({"customer": "\udcff"}, ValueError, "lone surrogate"),
    "a customer too long": (
        {"customer": "é" * (CUSTOMER_BYTES_MAX // 2 + 1)},
        ValueError,
        "customer has 256 bytes; at most 255",
    ),
    "no key": ({"key": ""}, ValueError, "key is empty"),
    "a NUL in the key": ({"key": "\x00"}, ValueError, "key '.x00' has a NUL"),
    "a key too long": ({"key": "k" * (KEY_BYTES_MAX + 1)}, ValueError, "key has 256 bytes"),
    "a key that is no text": ({"key": 5}, TypeError, "key must be a string"),
    "not a number": ({"payload": float("nan")}, ValueError, "payload cannot be encoded as JSON"),
    "infinity": ({"payload": [float("inf")]}, ValueError, "payload cannot be encoded as JSON"),
    "a set": ({"payload": {1, 2}}, TypeError, "payload cannot be encoded as JSON: .*set"),
    "bytes as payload": ({"payload": b"x"}, TypeError, "payload cannot be .*bytes"),
    "a value in itself": ({"payload": itself}, ValueError, "payload contains itself"),
    "a deep value": (
        {"payload": nested(JSON_DEPTH_MAX + 1)},
        ValueError,
        "nested more than 64 levels",
    ),
    "a very deep value": ({"payload": nested(100_000)}, ValueError, "nested more than 64 levels"),
    "a number too long": ({"payload": 10**5_000}, ValueError, "payload cannot be encoded"),
    "two contents": ({"payload": 1, "content": b""}, ValueError, "payload and content were given"),
    "a file and a content": ({"content": b"", "file": "x"}, ValueError, "content and file were"),
    "all three": (
        {"payload": 1, "content": b"", "file": "x"},
        ValueError,
        "payload and content and",
    ),
    "a text as content": ({"content": "text"}, TypeError, "content must be bytes.*not str"),
    "a stream of text": ({"content": Texts()}, TypeError, "yields str; open it in binary mode"),
    "a file that is no path": ({"file": 5}, TypeError, "file must be a path, not int"),
    "a name that is no text": ({"name": 5}, TypeError, "name must be a string, not 5"),
    "metadata that is no mapping": ({"metadata": [1]}, TypeError, "metadata must be a mapping"),
    "a metadata key that is no text": ({"metadata": {1: 2}}, TypeError, "the key 1"),
    "many metadata keys": (
        {"metadata": {str(n): n for n in range(METADATA_KEYS_MAX + 1)}},
        ValueError,
        "metadata has 65 keys; at most 64",
    ),
    "large metadata": (
        {"metadata": {"x": "x" * METADATA_BYTES_MAX}},
        ValueError,
        "metadata has 65,544 bytes as JSON; at most 65,536",
    ),
    "metadata that is no JSON": ({"metadata": {"x": 1j}}, TypeError, "metadata cannot be encoded"),
    "a negative cost": ({"cost": -1}, ValueError, "cost is -1"),
    "a cost too high": ({"cost": COST_MAX * 2}, ValueError, r"cost is 2,000,000"),
    "a cost that is not a number": ({"cost": float("nan")}, ValueError, "cost is nan"),
    "a cost that is a text": ({"cost": "1"}, TypeError, "cost is '1'"),
    "a cost that is true": ({"cost": True}, TypeError, "cost is True"),
    "a decimal cost": ({"cost": Decimal(1)}, TypeError, "cost is Decimal"),
    "a naive due time": ({"due_at": datetime(2030, 1, 1)}, TypeError, "has no time zone"),
    "a due day": ({"due_at": date(2030, 1, 1)}, TypeError, "due_at is datetime.date"),
    "a due time in seconds": ({"due_at": 1.5e9}, TypeError, "due_at is 1500000000.0"),
    "a due time that is true": ({"due_at": True}, TypeError, "due_at is True"),
    "a due time out of range": ({"due_at": 1 << 63}, ValueError, "due_at is 9223372036854775808"),
    "a parent that is no id": ({"parent": 5}, TypeError, "parent must be the id"),
    "a transaction": ({"connection": object()}, ValueError, "transaction"),
}


@pytest.mark.parametrize(("given", "kind", "sentence"), MISUSES.values(), ids=MISUSES.keys())
def test_misuse_is_refused_in_a_sentence_and_stores_nothing(
    queue: Queue, given: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    before = queue.summary()

    with pytest.raises(kind, match=sentence):
        queue.submit(**{"customer": "acme", **given})

    assert queue.summary() == before
