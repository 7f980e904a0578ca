"""What a worker asks of the interpreter: for as long as it runs, and no longer."""

import gc
import sys
from collections.abc import Iterator

import pytest

from fairturn import Queue, Submission, Worker
from fairturn.interpreter import HURRY_S, SWITCH_S, YOUNG_MIN, have_in_hand, hurried, tuned


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


def test_garbage_is_searched_more_rarely_until_the_end_unless_it_is_not_searched_at_all() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        with tuned():
            assert gc.get_threshold() == (YOUNG_MIN, 10, 10)
        assert gc.get_threshold() == (700, 10, 10)

        gc.set_threshold(0, 10, 10)
        with tuned():
            assert gc.get_threshold() == (0, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_garbage_is_searched_the_more_rarely_the_more_documents_are_in_hand() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        have_in_hand(2_000)
        assert gc.get_threshold() == (700, 10, 10)  # there is no worker
        with tuned():
            for documents, objects in ((2_000, 40_000), (4, YOUNG_MIN), (1_000, 20_000)):
                have_in_hand(documents)
                assert gc.get_threshold() == (objects, 10, 10)
        assert gc.get_threshold() == (700, 10, 10)

        gc.set_threshold(0, 10, 10)
        with tuned():
            have_in_hand(2_000)
            assert gc.get_threshold() == (0, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_who_is_in_a_hurry_keeps_the_interpreter_in_a_worker_and_nowhere_else() -> None:
    before = sys.getswitchinterval()

    with hurried:
        assert sys.getswitchinterval() == pytest.approx(before)
    with tuned():
        with hurried:
            assert sys.getswitchinterval() == pytest.approx(HURRY_S)
        assert sys.getswitchinterval() == pytest.approx(min(SWITCH_S, before))

    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_worker_that_ends_before_another_leaves_it_what_it_asked_for() -> None:
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    one, other = tuned(), tuned()

    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(min(SWITCH_S, before))
    assert gc.get_freeze_count() > 0
    other.__exit__(None, None, None)

    assert sys.getswitchinterval() == pytest.approx(before)
    assert gc.get_threshold() == thresholds
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


def test_a_worker_says_how_many_documents_it_has_in_hand() -> None:
    searched_after = set()

    def handle(_: object) -> None:
        searched_after.add(gc.get_threshold()[0])

    with Queue(":memory:") as queue:
        queue.submit_many([Submission(customer="acme", payload=1)] * 3_000)
        Worker(queue, handle, threads=True).run(until_empty=True)

    assert min(searched_after) == YOUNG_MIN
    assert max(searched_after) > YOUNG_MIN
