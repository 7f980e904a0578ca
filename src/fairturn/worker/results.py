"""Files as results: copied into the contents, outside the thread that renews leases."""

import os
import stat
import threading
from collections.abc import Callable
from queue import SimpleQueue

from fairturn.contents.local import Contents, chunks_of
from fairturn.model import ContentRef
from fairturn.worker.handler import AGAIN, FILE, Answer, remove_folder


def keep_file(contents: Contents, answer: Answer, folder: str) -> tuple[Answer, ContentRef | None]:
    """Copy the file of an answer into the contents and remove the attempt's folder. If that fails,
    so has the attempt."""
    assert answer[0] == FILE
    assert answer[2] is not None
    try:
        descriptor = os.open(answer[2], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{answer[2]} is not a plain file")
            return answer, contents.put(chunks_of(file))
    except Exception as error:  # whatever the contents raise: the thread must go on
        return (AGAIN, f"the result {answer[2]} could not be kept: {error}", None, None), None
    finally:
        remove_folder(folder)


class Porter:
    """A thread that carries files, one after the other; it starts with the first."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def carry(self, work: Callable[[], None]) -> None:
        """Do this after what came before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="fairturn-porter", daemon=True)
            self._thread.start()
        self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Wait until all is carried, for `timeout_s` at most, and return whether it is."""
        if self._thread is None:
            return True
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
