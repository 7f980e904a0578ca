"""Formats a handler error as a single line and as a traceback.

Frames of fairturn and of the import system are omitted: the cause is in the handler's code.
"""

import os
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceback import FrameSummary, StackSummary, TracebackException

ERROR_CHARACTERS_MAX = 8_192
TRACE_CHARACTERS_MAX = 65_536
FRAMES_MAX = 50  # of a traceback: the innermost ones

# Strings, because a child should not import pathlib for this.
_OURS = __file__.removesuffix("worker/tracebacks.py")
_DEMO_HANDLER = _OURS + "simulator/demo/handler.py"
_CALLER = _OURS + "worker/handler.py"
_CALLS = ("run", "_answer", "_wait")  # functions there that call a handler, also through asyncio
_LIBRARY = os.__file__.removesuffix("os.py")
_IMPORTING = ("<frozen importlib.", "<frozen runpy>", f"{_LIBRARY}importlib/", f"{_LIBRARY}runpy.")


def describe(error: BaseException) -> str:
    """Return an error in one line: its class, message and place in the handler."""
    kind = type(error).__name__
    message = message_of(error)
    if isinstance(error, SystemExit):
        return f"the handler called sys.exit({message})"
    place = _place(error.__traceback__)
    return f"{kind}: {message}{place}" if message else f"{kind}{place}"


def message_of(error: BaseException) -> str:
    """Return `str(error)`, also if that raises."""
    try:
        return str(error)[:ERROR_CHARACTERS_MAX]
    except Exception:
        return "(str() of the error failed)"


def trace(error: BaseException) -> str:
    """Return the traceback of an error, starting at the handler's code; empty if no frame of that
    code is in it, because then `describe` is complete."""
    try:
        from traceback import TracebackException

        report = TracebackException.from_exception(error, compact=True)
        useful = _drop_foreign_frames(report) or isinstance(error, SyntaxError)
        # A NUL would mark the output of another document.
        text = "".join(report.format()) if useful else ""
        return text[:TRACE_CHARACTERS_MAX].replace("\0", "\ufffd")
    except Exception:
        return ""  # out of memory, or an exception class that cannot be formatted


def _drop_foreign_frames(report: "TracebackException") -> bool:
    """Remove frames outside the handler, also from causes; return whether any frame is left."""
    own = _own_frames(report.stack)
    report.stack[:] = own
    before = (report.__cause__, report.__context__, *(report.exceptions or ()))
    return any([own, *(_drop_foreign_frames(one) for one in before if one is not None)])


def _own_frames(stack: "StackSummary") -> "list[FrameSummary]":
    calls = [n for n, one in enumerate(stack) if one.filename == _CALLER and one.name in _CALLS]
    start = calls[-1] + 1 if calls else 0
    return [one for one in stack[start:] if not _is_machinery(one.filename)][-FRAMES_MAX:]


def _place(traceback: TracebackType | None) -> str:
    last = None
    while traceback is not None:
        if not _is_machinery(traceback.tb_frame.f_code.co_filename):
            last = traceback
        traceback = traceback.tb_next
    if last is None:
        return ""
    code = last.tb_frame.f_code
    file = code.co_filename.rpartition("/")[2]
    return f" ({file}, line {last.tb_lineno}, in {code.co_name})"


def _is_machinery(filename: str) -> bool:
    """Whether the file belongs to fairturn or to the import system."""
    if filename.startswith(_OURS):
        return filename != _DEMO_HANDLER
    return filename.startswith(_IMPORTING)
