"""Bytes that come from the service: on disk if they are many, and checked before anybody gets
them."""

import hashlib
from collections.abc import Mapping
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from fairturn.errors import ContentDamaged

IN_MEMORY_BYTES = 1_048_576


class Sink:
    """Takes the bytes of one answer; begun anew, it takes those of another try."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def begin(self) -> None:
        """Forget what came before."""
        self.close()
        self._file = cast(BinaryIO, SpooledTemporaryFile(max_size=IN_MEMORY_BYTES))  # noqa: SIM115
        self._digest = hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        """Take the next bytes."""
        assert self._file is not None
        self._file.write(chunk)
        self._digest.update(chunk)

    def checked(self, headers: Mapping[str, str], what: str) -> BinaryIO:
        """The bytes from their beginning, if they are those that the service has."""
        file = self._file
        assert file is not None
        wanted = headers.get("etag", "").removeprefix("W/").strip('"')
        if len(wanted) == 64 and wanted != self._digest.hexdigest():
            self.close()
            raise ContentDamaged(
                f"what came of {what} has the SHA-256 {self._digest.hexdigest()}; that of what is "
                f"stored is {wanted}"
            )
        file.seek(0)
        return file

    def close(self) -> None:
        """Keep nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
