"""The output of handlers, split into lines and limited per line and document."""

import re
from collections.abc import Callable

from fairturn.model import DETAILS_BYTES_MAX

LINE_BYTES_MAX = 2_000
DOCUMENT_BYTES_MAX = 65_536
# Handlers print text from documents; a terminal would execute its control sequences.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")

# Called with the id of a document (empty: none) and a line.
Output = Callable[[str, str], None]


def pass_on(output: Output, document: str, text: str) -> None:
    """Pass a complete text to `output`, line by line."""
    lines = LineSplitter(output)
    lines.feed(document, text.encode("utf-8", "backslashreplace"))
    lines.end(document)


def tail_of(text: str) -> str | None:
    """Return the last lines of a text, at most `DETAILS_BYTES_MAX`, with control characters
    replaced; None if it is empty."""
    shown = "\n".join(_CONTROLS.sub("\ufffd", line) for line in text.rstrip().split("\n"))
    encoded = shown.encode("utf-8", "backslashreplace")
    if len(encoded) > DETAILS_BYTES_MAX:
        cut = encoded[-DETAILS_BYTES_MAX:].decode("utf-8", "ignore")
        return cut.partition("\n")[2] or cut
    return encoded.decode() or None


class OutputTails:
    """The end of the output of each document of one child, for the details of failed attempts."""

    def __init__(self) -> None:
        self._tails: dict[str, bytes] = {}

    def feed(self, document: str, piece: bytes) -> None:
        """Add output of a document."""
        if document:
            self._tails[document] = (self._tails.get(document, b"") + piece)[-DETAILS_BYTES_MAX:]

    def take(self, document: str) -> str | None:
        """Return and delete the end of a document's output."""
        tail = self._tails.pop(document, None)
        return None if tail is None else tail_of(tail.decode("utf-8", "replace"))


class LineSplitter:
    """Splits one child's output into lines, up to `DOCUMENT_BYTES_MAX` for each document."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._rest = b""
        self._left = DOCUMENT_BYTES_MAX
        self._omitted = 0

    def feed(self, document: str, piece: bytes) -> None:
        """Add output of a document."""
        if self._left <= 0 and b"\n" not in self._rest:
            self._omitted += len(piece)
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if self._left <= 0:
                self._omitted += len(line) + 1
                continue
            self._left -= len(line) + 1
            self._write(document, line)
        if self._left <= 0:
            self._omitted += len(self._rest)
            self._rest = b""

    def end(self, document: str) -> None:
        """End the document's last line and reset the limit."""
        if self._rest:
            self._write(document, self._rest)
            self._rest = b""
        if self._omitted:
            self._output(document, f"({self._omitted:,} more bytes were printed)")
            self._omitted = 0
        self._left = DOCUMENT_BYTES_MAX

    def _write(self, document: str, line: bytes) -> None:
        cut = line[:LINE_BYTES_MAX].decode("utf-8", "replace")
        more = f" … ({len(line) - LINE_BYTES_MAX:,} more bytes)" * (len(line) > LINE_BYTES_MAX)
        self._output(document, _CONTROLS.sub("\ufffd", cut) + more)
