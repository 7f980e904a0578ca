"""Copies result files to the contents, outside the supervisor's thread."""

import os
import stat
import threading
from collections.abc import Callable
from queue import SimpleQueue

from fairturn.contents.local import Contents, chunks_of
from fairturn.model import ContentRef
from fairturn.worker.handler import FILE, RETRY, Answer, remove_folder


def keep_file(contents: Contents, answer: Answer, folder: str) -> tuple[Answer, ContentRef | None]:
    """Copy the result file to the contents and remove the attempt's folder. If the copy fails, the
    answer is `RETRY`."""
    assert answer[0] == FILE
    assert answer[2] is not None
    try:
        descriptor = os.open(answer[2], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{answer[2]} is not a regular file")
            return answer, contents.put(chunks_of(file))
    except Exception as error:  # the thread must survive any error of the contents
        return (RETRY, f"result file {answer[2]} cannot be stored: {error}", None, None), None
    finally:
        remove_folder(folder)


class ResultCopier:
    """Runs file operations one after the other in a thread, started by the first."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="fairturn-files", daemon=True)
            self._thread.start()
        self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the operations, and return whether all are done."""
        if self._thread is None:
            return True
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
