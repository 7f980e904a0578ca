"""The public ids of documents."""

import json
import re
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random

import apsw
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.model import NewDocument, Settings
from fairturn.stores import ids
from fairturn.stores.ids import IdKey
from fairturn.stores.memory import MemoryStore
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.postgres.rows import settings_columns
from fairturn.stores.sqlite import SqliteStore
from tests.servers.places import AnyStore
from tests.servers.queues import Databases
from tests.test_migrations import old_file, old_schema

VECTORS = json.loads((Path(__file__).parent / "vectors" / "ids.json").read_text())
NUMBER_MAX = 2**56 - 1
numbers = st.integers(0, NUMBER_MAX)
keys = st.builds(
    IdKey,
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**60 - 1),
    st.integers(0, NUMBER_MAX),
)
texts = st.from_regex("[0-9a-f]{28}|[0-9a-f]{15}", fullmatch=True)


@given(number=numbers, key=keys)
def test_an_id_leads_back_to_its_number(number: int, key: IdKey) -> None:
    assert ids.decode(ids.encode(number, key), key) == number


@given(number=numbers, key=keys)
def test_an_id_has_28_hexadecimal_digits_or_15_of_an_earlier_release(
    number: int, key: IdKey
) -> None:
    digits = 15 if number < key.legacy_below else 28

    assert re.fullmatch(f"[0-9a-f]{{{digits}}}", ids.encode(number, key))


@given(text=texts, key=keys)
def test_a_text_is_the_id_of_at_most_one_number(text: str, key: IdKey) -> None:
    number = ids.decode(text, key)

    assert number is None or ids.encode(number, key) == text


@given(first=st.integers(0, NUMBER_MAX - 100), n=st.integers(0, 100), key=keys)
def test_many_numbers_have_the_ids_that_each_has_alone(first: int, n: int, key: IdKey) -> None:
    for some in (range(first, first + n), list(reversed(range(first, first + n)))):
        assert ids.encode_all(some, key) == [ids.encode(number, key) for number in some]


@given(
    found=st.lists(numbers),
    others=st.lists(st.one_of(texts, st.text("0123456789abcdefABg ", max_size=29))),
    key=keys,
)
def test_many_texts_have_the_numbers_that_each_has_alone(
    found: list[int], others: list[str], key: IdKey
) -> None:
    known = ids.encode_all(found, key)

    assert ids.decode_all(known, key) == found
    both = [*known, *others]
    assert ids.decode_all(both, key) == [ids.decode(text, key) for text in both]


def test_the_ids_of_consecutive_numbers_tell_nothing_of_their_order() -> None:
    encoded = ids.encode_all(range(1_000), IdKey.new(12345))

    rising = sum(a < b for a, b in pairwise(encoded))
    shared = sum(x == y for a, b in pairwise(encoded) for x, y in zip(a, b, strict=True))
    assert len(set(encoded)) == 1_000
    assert 400 < rising < 600
    assert 1.5 < shared / 999 < 2  # of 28 digits; the expected value by chance is 1.75


def test_queues_with_different_keys_give_a_number_different_ids() -> None:
    assert len({ids.encode(7, IdKey.new(seed)) for seed in range(1_000)}) == 1_000
    assert len({ids.encode(7, IdKey.new()) for _ in range(10)}) == 10


def test_an_id_with_one_other_digit_is_no_id() -> None:
    key = IdKey.new(1)
    id = ids.encode(7, key)

    for at in range(len(id)):
        other = "0" if id[at] != "0" else "1"
        assert ids.decode(id[:at] + other + id[at + 1 :], key) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 14,
        "0" * 16,
        "0" * 27,
        "0" * 29,
        "00000000000000G",
        "00000000000000A",
        " 00000000000000",
        "000000000000000\n",
        "-00000000000001",
        "0x0000000000000",
        "00000000000000١",
        "000000000000000000000000000A",
        "000000000000000000000000000\n",
        "000000000000000000000000000١",
        "../../etc/passwd",
    ],
)
def test_a_text_that_is_no_id_has_no_number(text: str) -> None:
    key = IdKey.new(1)._replace(legacy_below=NUMBER_MAX)

    assert ids.decode(text, key) is None
    assert not ids.is_id(text)


def test_a_value_that_is_no_text_has_no_number() -> None:
    assert ids.decode(123456789012345, IdKey.new(1)) is None  # type: ignore[arg-type]
    assert ids.decode(None, IdKey.new(1)) is None  # type: ignore[arg-type]


# ── Vectors ──────────────────────────────────────────────────────────────────────────────────────


def vector_key() -> IdKey:
    found = VECTORS["key"]
    return IdKey(bytes.fromhex(found["secret"]), found["legacy_key"], found["legacy_below"])


def test_numbers_have_the_ids_of_the_vectors() -> None:
    found = [(each["number"], each["id"]) for each in VECTORS["ids"]]
    key = vector_key()

    assert [(number, ids.encode(number, key)) for number, _ in found] == found
    assert [(ids.decode(id, key), id) for _, id in found] == found
    assert [ids.decode(text, key) for text in VECTORS["not_ids"]] == [None] * len(
        VECTORS["not_ids"]
    )


def test_postgresql_computes_the_ids_of_the_vectors() -> None:
    with Databases() as databases:
        url = databases.new()
        PostgresStore(url).close()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "UPDATE fairturn.queue SET id_secret = %s, id_key = %s, ids_from = %s", vector_key()
            )
            for each in VECTORS["ids"]:
                ((id, number),) = connection.execute(
                    "SELECT fairturn.public_id(%s), fairturn.document_number(%s)",
                    (each["number"], each["id"]),
                ).fetchall()
                assert (number, id) == (each["number"], each["id"])
            for text in [*VECTORS["not_ids"], "", "x" * 28]:
                ((number,),) = connection.execute(
                    "SELECT fairturn.document_number(%s)", (text,)
                ).fetchall()
                assert number is None, text
            ((fingerprint,),) = connection.execute("SELECT fairturn.id_fingerprint()").fetchall()
            assert fingerprint == vector_key().fingerprint


def test_postgresql_computes_the_ids_of_its_documents(tmp_path: Path) -> None:
    with Databases() as databases:
        url = databases.new()
        store = PostgresStore(url)
        receipts = store.submit([NewDocument("acme", "1")] * 20)
        with psycopg.connect(url) as connection:
            found = connection.execute(
                "SELECT fairturn.public_id(number) FROM fairturn.documents ORDER BY number"
            ).fetchall()
        store.close()
    assert [id for (id,) in found] == [receipt.id for receipt in receipts]


# ── The attack of a customer that knows its own ids ──────────────────────────────────────────────

QUEUES = 10
OWN, BETWEEN = 600, 37  # documents of the attacker, and of others before its next one


def without_key(id: str) -> int:
    """Undo the steps of the earlier ids that need no key: the number XOR the key is left."""
    x, mask = int(id[:15], 16), 2**60 - 1
    for inverse in (pow(0xBF58476D1CE4E5B, -1, 2**60), pow(0x9E3779B97F4A7C5, -1, 2**60)):
        x = ((x ^ (x >> 30)) * inverse) & mask
    return x


def volumes_that_fit(own: list[str], later: str) -> set[int]:
    """The attack: how many documents others may have submitted between a customer's own.

    The carries in consecutive numbers show their lower bits, and with these the key's.
    """
    known, last = list(map(without_key, own)), without_key(later)
    fitting = set()
    for first in range(1 << 16):
        key = known[0] ^ first
        if all(x ^ key == first + n for n, x in enumerate(known)):
            fitting.add((last ^ key) - (first + len(known)))
    return fitting


def is_broken(key: IdKey, start: int) -> bool:
    own = ids.encode_all(range(start, start + OWN), key)
    return volumes_that_fit(own, ids.encode(start + OWN + BETWEEN, key)) == {BETWEEN}


def test_the_attack_computes_the_volume_of_others_from_earlier_ids_only() -> None:
    random = Random(20)
    starts = [random.randrange(1, 10**6) for _ in range(QUEUES)]
    earlier = [
        IdKey(random.randbytes(32), random.getrandbits(60), NUMBER_MAX) for _ in range(QUEUES)
    ]
    present = [key._replace(legacy_below=0) for key in earlier]

    assert sum(map(is_broken, earlier, starts)) == QUEUES
    assert sum(map(is_broken, present, starts)) == 0


def test_no_part_of_two_ids_shows_the_difference_of_their_numbers() -> None:
    key = IdKey.new(5)
    found = {n: ids.encode(n, key) for n in range(1_000_000, 1_000_500)}

    for n, id in found.items():
        for other, other_id in found.items():
            if n < other:
                both = int(id, 16) ^ int(other_id, 16)
                assert n ^ other not in (both >> 56, both & (2**56 - 1))


# ── Ids that an earlier release has issued ───────────────────────────────────────────────────────


def issue_earlier_ids(store: AnyStore) -> list[str]:
    return [receipt.id for receipt in store.submit([NewDocument("acme", f"{n}") for n in range(9)])]


def assert_both_forms_resolve(store: AnyStore, earlier: list[str]) -> None:
    """A new epoch begins the present form; ids of the earlier one keep resolving."""
    assert all(len(id) == 15 for id in earlier)
    store.begin_epoch()
    (later,) = store.submit([NewDocument("acme", '"new"', parent=earlier[0])])
    assert len(later.id) == 28
    for n, id in enumerate(earlier):
        found = store.read(id)
        assert found is not None
        assert (found.document.id, found.body) == (id, f"{n}")
    new = store.read(later.id)
    assert new is not None
    assert (new.document.id, new.document.parent) == (later.id, earlier[0])
    claims = store.claim(20, worker="w", lease_us=30_000_000).claims
    assert {claim.document.id for claim in claims} == {later.id, *earlier}


def test_a_file_of_schema_11_keeps_its_ids_until_the_next_epoch(tmp_path: Path) -> None:
    store = SqliteStore(old_file(tmp_path / "documents.db", 11))
    earlier = issue_earlier_ids(store)
    assert_both_forms_resolve(store, earlier)
    store.close()


def add_queue_of_schema_11(url: str) -> None:
    row = (7, *settings_columns(Settings()))
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO fairturn.queue (incarnation, id_key, settings, depths, reset_interval, "
            "periodic, one_level, waiting_max, waiting_per_customer_max, mode, costs, patience, "
            f"attempts_max) VALUES ('', {', '.join(['%s'] * 12)})",
            row[:12],
        )


def test_a_schema_11_on_postgresql_keeps_its_ids_until_the_next_epoch() -> None:
    with Databases() as databases:
        url = old_schema(databases.new(empty=True), 11)
        add_queue_of_schema_11(url)
        store = PostgresStore(url)
        with psycopg.connect(url) as connection:  # as if the release before had used this server
            connection.execute("UPDATE fairturn.queue SET incarnation = fairturn.incarnation()")
        earlier = issue_earlier_ids(store)
        assert_both_forms_resolve(store, earlier)
        store.close()


# ── Processes of the release before ──────────────────────────────────────────────────────────────

SUBMIT_OF_SCHEMA_11 = "SELECT answer FROM fairturn.submit(NULL, %s, 0, " + ", ".join(
    f"ARRAY[{value}]::{kind}[]"
    for value, kind in (
        ("'acme'", "text"), ("'1'", "text"), ("NULL", "bytea"), ("'payload'", "text"),
        ("1", "bigint"), *[("NULL", kind) for kind in (
            "bytea", "text", "text", "text", "text", "bigint", "bigint", "text", "bytea", "bigint",
        )],
    )
) + ")"  # fmt: skip
ACCEPTED, OTHER_QUEUE = 0, 6


def test_postgresql_refuses_submitters_of_the_release_before_once_their_ids_would_be_wrong() -> (
    None
):
    with Databases() as databases:
        url = old_schema(databases.new(empty=True), 11)
        add_queue_of_schema_11(url)
        store = PostgresStore(url)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("UPDATE fairturn.queue SET incarnation = fairturn.incarnation()")
            ((answer,),) = connection.execute(SUBMIT_OF_SCHEMA_11, (7,)).fetchall()
            assert answer == ACCEPTED
            store.begin_epoch()
            ((answer,),) = connection.execute(SUBMIT_OF_SCHEMA_11, (7,)).fetchall()
            assert answer == OTHER_QUEUE
        store.close()


def readable_from(path: Path) -> int:
    """Return the first schema whose release reads schema 13, the last that schema 11 may read."""
    connection = apsw.Connection(str(path))
    ((found,),) = connection.execute("SELECT readable_from FROM migrations WHERE number = 13")
    connection.close()
    return int(found)


def test_a_file_is_readable_for_the_release_before_until_its_ids_would_be_wrong(
    tmp_path: Path,
) -> None:
    fresh, old = tmp_path / "fresh.db", old_file(tmp_path / "old.db", 11)
    SqliteStore(fresh).close()
    store = SqliteStore(old)
    store.submit([NewDocument("acme", "1")])
    before = readable_from(old)
    store.begin_epoch()
    store.close()

    assert (readable_from(fresh), before, readable_from(old)) == (12, 11, 12)


def test_a_customer_has_no_use_of_earlier_ids_for_later_numbers() -> None:
    """Otherwise it could ask for the earlier id of any number, and count."""
    key = IdKey(sha256(b"").digest(), 99, 1_000)

    later = ids._encode_legacy(1_000, key.legacy_key)
    assert ids.decode(later, key) is None
    assert ids.decode(ids.encode(999, key._replace(legacy_below=0)), key) is None


def test_stores_with_the_same_seed_issue_the_same_ids(tmp_path: Path) -> None:
    memory, file = MemoryStore(key=7), SqliteStore(tmp_path / "documents.db", key=7)
    assert [r.id for r in memory.submit([NewDocument("a", "1")] * 3)] == [
        r.id for r in file.submit([NewDocument("a", "1")] * 3)
    ]
    file.close()
