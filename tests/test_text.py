"""Text from outside: invalid identities are rejected, invalid descriptions are corrected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.validation.text import REPLACEMENT, description, identity, tail

# Every Python string, including those that no database can hold.
any_text = st.text(st.characters(codec=None, exclude_categories=()))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=50))
def test_an_identity_that_can_be_stored_is_never_changed(value: str) -> None:
    assert identity(value, "customer", 200) == value


@pytest.mark.parametrize("value", ["a\x00b", "\x00", "é\x00", "\ud800", "a\udfffb"])
def test_an_identity_that_cannot_be_stored_is_refused_and_named(value: str) -> None:
    with pytest.raises(ValueError, match="customer .* has a NUL character or a lone surrogate"):
        identity(value, "customer", 255)


def test_an_empty_identity_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match="key is empty"):
        identity("", "key", 255)


@pytest.mark.parametrize("value", ["x" * 255, "é" * 127 + "x", "𝄞" * 63 + "xyz"])
def test_an_identity_is_measured_in_bytes(value: str) -> None:
    assert identity(value, "customer", 255) == value
    with pytest.raises(ValueError, match="customer has 256 bytes; at most 255 are allowed"):
        identity(value + "x", "customer", 255)


@pytest.mark.parametrize("value", [None, 7, b"bytes"])
def test_an_identity_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="customer must be a string"):
        identity(value, "customer", 255)  # type: ignore[arg-type]


@given(value=any_text, bytes_max=st.integers(0, 40))
def test_any_description_can_be_stored_and_keeps_to_its_limit(value: str, bytes_max: int) -> None:
    stored = description(value, bytes_max)

    assert len(stored.encode("utf-8")) <= bytes_max
    assert "\x00" not in stored


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=50))
def test_a_description_that_can_be_stored_and_fits_is_not_changed(value: str) -> None:
    assert description(value, 200) == value


@given(value=any_text, bytes_max=st.integers(1, 40))
def test_the_end_of_any_text_can_be_stored_and_keeps_to_its_limit(
    value: str, bytes_max: int
) -> None:
    stored = tail(value, bytes_max)

    assert len(stored.encode("utf-8")) <= bytes_max
    assert "\x00" not in stored
    assert tail(value, 4 * len(value) + 1) == description(value, 4 * len(value))


def test_the_end_of_a_text_begins_at_a_whole_character() -> None:
    assert tail("naïve 🙂", 5) == " 🙂"
    assert tail("naïve 🙂", 3) == ""


def test_what_cannot_be_stored_in_a_description_is_replaced() -> None:
    assert description("a\x00b\ud800c", 100) == f"a{REPLACEMENT}b{REPLACEMENT}c"


@pytest.mark.parametrize(
    ("bytes_max", "kept"),
    [(8, "naïve 🙂"[:6]), (10, "naïve "), (11, "naïve 🙂"), (3, "na"), (0, "")],
)
def test_a_description_is_cut_at_a_whole_character(bytes_max: int, kept: str) -> None:
    assert description("naïve 🙂", bytes_max) == kept
