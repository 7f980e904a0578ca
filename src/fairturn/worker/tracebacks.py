"""An error of a handler in words: in one line, and as a traceback of the handler's own code.

What called the handler, fairturn and the import system, is left out: nobody can mend it there.
"""

import os
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from traceback import FrameSummary, StackSummary, TracebackException

ERROR_CHARACTERS_MAX = 8_192
TRACE_CHARACTERS_MAX = 65_536
FRAMES_MAX = 50  # of a traceback: the innermost ones

# Texts and not paths, because a child that never fails should not load pathlib for this.
_OURS = __file__.removesuffix("worker/tracebacks.py")
_A_USERS = _OURS + "handlers.py"  # handlers that come with fairturn are handlers
_CALLER = _OURS + "worker/handler.py"
_CALLS = ("run", "_answer", "_wait")  # there: what calls a handler; asyncio may lie in between
_LIBRARY = os.__file__.removesuffix("os.py")
_IMPORTING = ("<frozen importlib.", "<frozen runpy>", f"{_LIBRARY}importlib/", f"{_LIBRARY}runpy.")


def describe(error: BaseException) -> str:
    """An error in one line: what, why, and where in the handler."""
    kind = type(error).__name__
    message = message_of(error)
    if isinstance(error, SystemExit):
        return f"the handler called sys.exit({message})"
    place = _place(error.__traceback__)
    return f"{kind}: {message}{place}" if message else f"{kind}{place}"


def message_of(error: BaseException) -> str:
    """The text of an error, whatever its class does about it."""
    try:
        return str(error)[:ERROR_CHARACTERS_MAX]
    except Exception:
        return "(its text cannot be made)"


def trace(error: BaseException) -> str:
    """The traceback of an error, from the handler's code on; empty if none of that code is in it,
    because then the line of `describe` says everything."""
    try:
        from traceback import TracebackException

        told = TracebackException.from_exception(error, compact=True)
        useful = _keep_the_handlers_own(told) or isinstance(error, SyntaxError)
        # A NUL begins the output of another document.
        text = "".join(told.format()) if useful else ""
        return text[:TRACE_CHARACTERS_MAX].replace("\0", "\ufffd")
    except Exception:
        return ""  # there is no memory left for it, or the error is a strange one


def _keep_the_handlers_own(told: "TracebackException") -> bool:
    """Take out the frames of others, also in what led to this error; whether anything is left."""
    own = _own_frames(told.stack)
    told.stack[:] = own
    before = (told.__cause__, told.__context__, *(told.exceptions or ()))
    return any([own, *(_keep_the_handlers_own(one) for one in before if one is not None)])


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
    """Whether the code is fairturn's own, or that of an import."""
    if filename.startswith(_OURS):
        return filename != _A_USERS
    return filename.startswith(_IMPORTING)
