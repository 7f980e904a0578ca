"""Access keys: created, shown once, checked, replaced, revoked."""

import pytest

from fairturn.access.keys import Role, read_key
from fairturn.access.registry import USE_NOTED_EVERY_US, KeyRegistry
from fairturn.clock import ManualClock
from fairturn.errors import NotFound, WrongState
from fairturn.stores.memory import MemoryStore

START = 1_700_000_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def keys(clock: ManualClock) -> KeyRegistry:
    return KeyRegistry(MemoryStore(clock=clock), clock=clock)


def test_a_key_opens_with_its_secret_alone(keys: KeyRegistry) -> None:
    made = keys.make("customer", customer="acme", name="the scanner")
    other = keys.make("operator")
    presented, foreign = read_key(made.shown), read_key(other.shown)
    assert presented is not None
    assert foreign is not None

    assert keys.check(made.shown) == made.key._replace(used_at_us=None)
    assert keys.check(f"ft_{presented.id}_{foreign.secret}") is None
    assert keys.check(f"ft_{'0' * 12}_{presented.secret}") is None


def test_a_key_has_256_random_bits_and_only_their_hash_is_kept(keys: KeyRegistry) -> None:
    made = keys.make("operator")
    presented = read_key(made.shown)
    assert presented is not None

    assert len(bytes.fromhex(presented.secret)) == 32
    assert presented.secret not in repr(keys.list())
    assert bytes.fromhex(presented.secret) != made.key.digest


@pytest.mark.parametrize(
    "shown", ["", "ft_", "ft_0_0", "ft_" + "é" * 77, "x" * 100_000, "ft_\ud800", "Bearer x"]
)
def test_what_is_no_key_opens_nothing(keys: KeyRegistry, shown: str) -> None:
    assert keys.check(shown) is None


def test_a_revoked_key_opens_nothing_from_this_moment_on(keys: KeyRegistry) -> None:
    made = keys.make("reader")

    keys.revoke(made.key.id)

    assert keys.check(made.shown) is None
    with pytest.raises(NotFound):
        keys.revoke("0" * 12)


def test_the_old_key_opens_for_the_overlap_of_a_rotation(
    keys: KeyRegistry, clock: ManualClock
) -> None:
    old = keys.make("customer", customer="acme", name="scanner")

    new = keys.rotate(old.key.id, overlap_s=60)

    assert (new.key.role, new.key.customer, new.key.name) == (Role.CUSTOMER, "acme", "scanner")
    assert keys.check(old.shown) is not None
    clock.advance(60)
    assert keys.check(old.shown) is None
    assert keys.check(new.shown) is not None
    with pytest.raises(WrongState):
        keys.rotate(old.key.id)


def test_the_last_use_is_noted_but_not_at_every_request(
    keys: KeyRegistry, clock: ManualClock
) -> None:
    made = keys.make("operator")
    for _ in range(3):
        keys.check(made.shown)
        clock.advance(USE_NOTED_EVERY_US / 2_000_000)

    assert keys.get(made.key.id).used_at_us == START + USE_NOTED_EVERY_US


def test_a_key_is_asked_for_as_soon_as_one_was_made_and_after_the_last_has_ended(
    keys: KeyRegistry,
) -> None:
    assert not keys.are_required()
    made = keys.make("operator")
    assert keys.are_required()
    keys.revoke(made.key.id)
    assert keys.are_required()


@pytest.mark.parametrize(
    "role, customer", [("customer", None), ("operator", "acme"), ("root", None), ("customer", "")]
)
def test_a_key_is_either_of_a_customer_or_of_nobody(
    keys: KeyRegistry, role: str, customer: str | None
) -> None:
    with pytest.raises(ValueError, match="customer|role"):
        keys.make(role, customer=customer)
