"""A snapshot of the file: what it refers to, a copy of it, and all of it for another database.

Other processes go on writing. The write-ahead log cannot be emptied beyond the snapshot, so it
grows as long as a copy takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fairturn.clock import Uptime
from fairturn.errors import NoQueue, StoreError, StoreFull
from fairturn.model import ContentRef
from fairturn.stores.sqlite.connection import refuse_foreign_file
from fairturn.stores.sqlite.errors import translated
from fairturn.stores.sqlite.export import unload
from fairturn.stores.sqlite.schema import migrations, version_of
from fairturn.stores.transfer import Whole

PAGES_AT_ONCE = 1_000

# By documents_content and results_content.
_CONTENTS = """
    SELECT content_name, size_bytes, sha256 FROM documents WHERE content_name IS NOT NULL
    UNION ALL
    SELECT content_name, size_bytes, sha256 FROM results WHERE content_name IS NOT NULL"""
_MARK = "UPDATE queue SET is_copy = 1"
_READ_FAILED = (apsw.SQLITE_IOERR_READ, apsw.SQLITE_IOERR_SHORT_READ)
_ANYTHING = "SELECT count(*) FROM queue"


class Snapshot:
    """The file as it was at one moment."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        connection.execute(_ANYTHING).fetchall()  # the moment is that of the first read

    def contents(self) -> Iterator[ContentRef]:
        """Every content outside the file that a document or a result is."""
        for name, size_bytes, sha256 in self._connection.execute(_CONTENTS):
            yield ContentRef(name, size_bytes, sha256)

    def unload(self, now: int, uptime: Uptime) -> Whole:
        """All of the queue, for another database."""
        return unload(self._connection, now, uptime)

    def write_to(
        self, path: Path, progress: Callable[[float], None], *, marked: bool = True
    ) -> None:
        """Copy the file to a path where none is; `progress` is called with the part that is done.

        The copy is `marked` as one. It is whole when this returns, but not synced. Errors of
        reading are left to the store, which names the file that is read.
        """
        try:
            copy = apsw.Connection(str(path))
        except apsw.Error as error:
            raise StoreError(f"{path} cannot be made: {error}") from error
        try:
            # No other process opens the copy before it is complete.
            copy.execute("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF").fetchall()
            with copy.backup("main", self._connection, "main") as backup:
                while not backup.done:
                    backup.step(PAGES_AT_ONCE)
                    progress(1 - backup.remaining / max(1, backup.page_count))
            if marked:
                copy.execute(_MARK)
            problems = [text for (text,) in copy.execute("PRAGMA integrity_check")]
        except apsw.FullError as error:
            raise StoreFull(f"the disk of {path} is full; the copy is not complete") from error
        except apsw.IOError as error:
            if getattr(error, "extendedresult", None) in _READ_FAILED:
                raise
            raise StoreError(f"{path} cannot be written: {error}") from error
        finally:
            copy.close()
        if problems != ["ok"]:
            raise apsw.CorruptError(problems[0])


@contextmanager
def snapshot_of(path: Path) -> Iterator[Snapshot]:
    """A snapshot of a file that is no open queue, such as a backup. Nothing is written to it.

    Beside a log that was not written into the file, SQLite makes an index of the log; otherwise it
    makes no file and takes no lock, so that a backup on a read-only medium can be read.
    """
    refuse_foreign_file(path)
    log = Path(f"{path}-wal")
    is_complete = not (log.exists() and log.stat().st_size)
    name = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if is_complete else ''}"
    with translated(path):
        connection = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        try:
            if not version_of(connection, str(path), migrations()[-1][0]):
                raise NoQueue(f"{path} is empty: there is no queue in it")
            connection.execute("BEGIN")
            yield Snapshot(connection)
        finally:
            connection.close()
