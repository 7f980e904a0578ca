"""How numbers and lists go to the server: each always in the same form.

The driver's own way depends on the values: the smallest type that holds a number, and for a list
the smallest that holds all of its numbers. A statement would then be prepared anew for each mix.
And its way to write a list takes longer than the claim of the documents in it.
"""

from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.types.numeric import Int8BinaryDumper


class ListDumper(Dumper):
    """A list as text, whose type the statement says."""

    def dump(self, obj: list[Any]) -> bytes:
        first = next((value for value in obj if value is not None), None)
        if isinstance(first, str):
            return f"{{{','.join(map(_quoted, obj))}}}".encode()
        if isinstance(first, bytes):
            return f"{{{','.join(map(_hexadecimal, obj))}}}".encode()
        return b"{%s}" % str(obj)[1:-1].replace("None", "NULL").encode()


def _quoted(value: str | None) -> str:
    if value is None:
        return "NULL"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _hexadecimal(value: bytes | None) -> str:
    return "NULL" if value is None else f'"\\\\x{value.hex()}"'


def adapt(adapters: AdaptersMap) -> None:
    """Let a connection, or a cursor, write numbers and lists in our way."""
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(list, ListDumper)


ADAPTERS = AdaptersMap(psycopg.adapters)
adapt(ADAPTERS)
