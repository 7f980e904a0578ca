"""What a worker asks of the interpreter: for as long as it runs, and no longer."""

import gc
import sys
from collections.abc import Iterator

import pytest

from fairturn.worker.interpreter import SWITCH_S, tuned


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """The tests themselves leave out what they have imported; here it is as in a new process."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_threads_take_turns_sooner_and_what_is_loaded_is_not_searched_until_the_end() -> None:
    before = sys.getswitchinterval()

    with tuned():
        assert sys.getswitchinterval() == pytest.approx(min(SWITCH_S, before))
        assert gc.get_freeze_count() > 0

    assert sys.getswitchinterval() == pytest.approx(before)
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_decided_stays() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S / 2)
    gc.freeze()
    try:
        with tuned():
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S / 2)
        assert gc.get_freeze_count() > 0
    finally:
        sys.setswitchinterval(before)


def test_an_error_leaves_nothing_changed_either() -> None:
    before = sys.getswitchinterval()

    with pytest.raises(RuntimeError), tuned():
        raise RuntimeError

    assert sys.getswitchinterval() == pytest.approx(before)
    assert gc.get_freeze_count() == 0
