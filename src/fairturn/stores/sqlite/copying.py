"""A moment of the file that is held still: what it refers to, and a copy of it.

Others write on meanwhile. The write-ahead log cannot be emptied beyond the moment that is held, so
it grows as long as a copy takes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from fairturn.errors import StoreError, StoreFull
from fairturn.model import ContentRef

PAGES_AT_ONCE = 1_000

# By documents_content and results_content.
_CONTENTS = """
    SELECT content_name, size_bytes, sha256 FROM documents WHERE content_name IS NOT NULL
    UNION ALL
    SELECT content_name, size_bytes, sha256 FROM results WHERE content_name IS NOT NULL"""
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

    def write_to(self, path: Path, progress: Callable[[float], None]) -> None:
        """Copy the file to a path where none is; `progress` hears which part is done.

        It is whole when this returns, but not synced: whoever gives it its name does that.
        """
        try:
            copy = apsw.Connection(str(path))
        except apsw.Error as error:
            raise StoreError(f"{path} cannot be made: {error}") from error
        try:
            # Nobody reads the copy before it is whole.
            copy.execute("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF").fetchall()
            with copy.backup("main", self._connection, "main") as backup:
                while not backup.done:
                    backup.step(PAGES_AT_ONCE)
                    progress(1 - backup.remaining / max(1, backup.page_count))
            _refuse_damage(copy, path)
        except apsw.FullError as error:
            raise StoreFull(f"the disk of {path} is full; the copy is not complete") from error
        except apsw.Error as error:
            raise StoreError(f"{path} cannot be written: {error}") from error
        finally:
            copy.close()


def _refuse_damage(copy: apsw.Connection, path: Path) -> None:
    problems = [text for (text,) in copy.execute("PRAGMA integrity_check")]
    if problems != ["ok"]:
        raise StoreError(f"{path} is damaged, and so is what it was copied from: {problems[0]}")
