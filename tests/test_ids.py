"""The public ids of documents."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.stores import ids

numbers = st.integers(0, 2**ids.BITS - 1)
keys = st.integers(0, 2**ids.BITS - 1)


@given(number=numbers, key=keys)
def test_an_id_leads_back_to_its_number(number: int, key: int) -> None:
    assert ids.decode(ids.encode(number, key), key) == number


@given(number=numbers, key=keys)
def test_an_id_is_15_hexadecimal_digits(number: int, key: int) -> None:
    assert re.fullmatch("[0-9a-f]{15}", ids.encode(number, key))


@given(digits=numbers.map(lambda number: f"{number:015x}"), key=keys)
def test_every_text_of_15_digits_is_the_id_of_exactly_one_number(digits: str, key: int) -> None:
    number = ids.decode(digits, key)

    assert number is not None
    assert ids.encode(number, key) == digits


@given(first=st.integers(0, 2**ids.BITS - 100), n=st.integers(0, 100), key=keys)
def test_many_numbers_have_the_ids_that_each_has_alone(first: int, n: int, key: int) -> None:
    expected = [ids.encode(number, key) for number in range(first, first + n)]

    assert ids.encode_all(range(first, first + n), key) == expected


@given(
    texts=st.lists(
        st.one_of(
            numbers.map(lambda number: f"{number:015x}"),
            st.text("0123456789abcdefABg ", max_size=16),
        )
    ),
    key=keys,
)
def test_many_texts_have_the_numbers_that_each_has_alone(texts: list[str], key: int) -> None:
    assert ids.decode_all(texts, key) == [ids.decode(text, key) for text in texts]


def test_the_ids_of_consecutive_numbers_tell_nothing_of_their_order() -> None:
    encoded = [ids.encode(number, 12345) for number in range(1_000)]

    rising = sum(a < b for a, b in pairwise(encoded))
    shared = sum(x == y for a, b in pairwise(encoded) for x, y in zip(a, b, strict=True))
    assert len(set(encoded)) == 1_000
    assert 400 < rising < 600
    assert shared / 999 < 2  # of 15 digits; the expected value by chance is one


def test_queues_with_different_keys_give_a_number_different_ids() -> None:
    assert len({ids.encode(7, key) for key in range(1_000)}) == 1_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 14,
        "0" * 16,
        "00000000000000G",
        "00000000000000A",
        " 00000000000000",
        "000000000000000\n",
        "-00000000000001",
        "0x0000000000000",
        "00000000000000١",
        "../../etc/passwd",
    ],
)
def test_a_text_that_is_no_id_has_no_number(text: str) -> None:
    assert ids.decode(text, 1) is None


def test_a_value_that_is_no_text_has_no_number() -> None:
    assert ids.decode(123456789012345, 1) is None  # type: ignore[arg-type]
    assert ids.decode(None, 1) is None  # type: ignore[arg-type]
