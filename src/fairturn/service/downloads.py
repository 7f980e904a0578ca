"""Downloads: a stored file is verified before its first byte is sent, and again after it changes.

At most one file is verified at a time for each core, and one for each key, so that the large files
of one customer do not delay the downloads of others. Verification stops when the client
disconnects.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from fastapi import Request

from fairturn.contents.local import Verify, verify_all
from fairturn.model import ContentRef
from fairturn.service.callers import Caller
from fairturn.service.concurrency import hold
from fairturn.service.options import VERIFIED_MAX
from fairturn.service.polls import disconnection
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.service import service_of

T = TypeVar("T")


class VerifiedContents:
    """Verifies stored files and caches the result until the file changes. Beyond `VERIFIED_MAX` the
    oldest entry is evicted. A file from a bucket is downloaded and verified each time."""

    def __init__(self) -> None:
        self._stamps: dict[ContentRef, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self.count = 0  # verifications so far

    def verify(self, file: BinaryIO, ref: ContentRef, checkpoint: Callable[[], None]) -> None:
        """Raise `ContentDamaged` unless the file matches. `checkpoint` is called between chunks."""
        found = os.fstat(file.fileno())
        # It changes with the bytes of the file, and when another file takes its name.
        stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        with self._lock:
            if self._stamps.get(ref) == stamp:
                return
            self.count += 1
        verify_all(file, ref, checkpoint)
        with self._lock:
            self._stamps.pop(ref, None)
            self._stamps[ref] = stamp
            if len(self._stamps) > VERIFIED_MAX:
                del self._stamps[next(iter(self._stamps))]


async def open_download(
    request: Request, caller: Caller, open_verified: Callable[[Verify], T]
) -> T:
    """Open a stored file: call `open_verified` in a thread, with the function that verifies.

    It counts as a download of the caller's key until the response ends. Raises `Problem` if the
    client disconnects meanwhile; a file that was opened is then closed."""
    service = service_of(request)
    hold(request.scope, service.downloads.take(caller.key))
    verified: VerifiedContents = request.app.state.verified
    stopped = threading.Event()

    def checkpoint() -> None:
        if stopped.is_set():
            raise Problem(ProblemCode.CUT_OFF)

    def work() -> T:
        checkpoint()
        return open_verified(lambda file, ref: verified.verify(file, ref, checkpoint))

    opening = asyncio.ensure_future(service.cores.run(caller.key, work))
    gone = asyncio.ensure_future(disconnection(request))
    try:
        await asyncio.wait({opening, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            # The thread stops at the next chunk. Until then the permit counts it.
            stopped.set()
        return await opening
    finally:
        stopped.set()
        gone.cancel()
        await asyncio.wait({gone})
