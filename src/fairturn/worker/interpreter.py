"""What a worker asks of Python's interpreter for as long as it runs."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Threads that have something to compute hand each other the interpreter this often. By default it
# is five times as long: a thread that claims, under a lock that others wait for, would wait for
# handlers most of the time.
SWITCH_S = 0.001


@contextmanager
def tuned() -> Iterator[None]:
    """Until the end of the block, threads take turns sooner, and the search for garbage leaves out
    what is loaded now: with thousands of documents a second it searched everything that was ever
    imported all the time. If somebody else has decided what is searched, that stays."""
    switch_s = sys.getswitchinterval()
    freezes = gc.get_freeze_count() == 0
    sys.setswitchinterval(min(switch_s, SWITCH_S))
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        if freezes:
            gc.unfreeze()
