"""Epochs: how document numbers and fences go on after a database has lost its latest changes.

A restored backup does not know which numbers and fences were given out after it was made. A new
epoch leaves them all out. Its jump is random, too: two restores of one backup must not give out the
same numbers.
"""

from secrets import randbits

JUMP_MIN = 1 << 32  # more than are given out between a backup and its restore
_RANDOM_BITS = 40  # thousands of epochs stay below 2^53, millions below the 2^60 of an id


def jump() -> int:
    """By how much numbers and fences rise when an epoch begins."""
    return JUMP_MIN + randbits(_RANDOM_BITS)
