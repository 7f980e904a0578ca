"""Traces of arrivals: the CSV files that `fairturn replay` reads.

The columns are `at_s,customer,cost_s` and optionally `weight` and `kind`, in any order; rows are
sorted by `at_s`.
"""

import csv
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fairturn.clock import SECOND_US
from fairturn.errors import TraceError
from fairturn.model import CUSTOMER_BYTES_MAX, DEFAULT_KIND_NAME, KINDS_MAX, weight_in_thousandths
from fairturn.scheduling.flows import DEFAULT_KIND
from fairturn.validation import text

REQUIRED = ("at_s", "customer", "cost_s")
OPTIONAL = ("weight", "kind")
SECONDS_MAX = 4_000_000_000.0
_TIMESTAMP_MAX = (1 << 63) - 1  # of the columns, in microseconds


class Trace:
    """Documents in the order of the file, as columns: a million use about 30 MB."""

    def __init__(self) -> None:
        self.names: list[str] = []  # of customers, by number
        self.at = array("q")  # microseconds
        self.customer = array("l")  # numbers
        self.cost = array("q")  # microseconds of work
        self.weight: dict[int, int] = {}  # row -> the customer's weight from there on
        self.kinds: list[str] = []  # of work, by number; empty without a column of kinds
        self.kind = array("b")  # numbers; empty without that column

    def __len__(self) -> int:
        return len(self.at)

    @property
    def kind_names(self) -> Sequence[str]:
        """The names of the kinds, by number; the default kind alone without a column of kinds."""
        return self.kinds or (DEFAULT_KIND_NAME,)

    def kind_of(self, n: int) -> int:
        """Return the number of a document's kind."""
        return self.kind[n] if self.kind else DEFAULT_KIND

    def kind_number(self, name: str) -> int:
        """Return the number of a kind. Raises `ValueError` if no document is of it."""
        names = self.kind_names
        if name not in names:
            raise ValueError(
                f"no document is of kind {name!r}; kinds of the trace: {', '.join(names)}"
            )
        return names.index(name)

    def set_weights(self, weights: Mapping[int, int]) -> None:
        """Give customers, by number, these weights from their first document on."""
        missing = dict(weights)
        self.weight = {n: w for n, w in self.weight.items() if self.customer[n] not in weights}
        for n, customer in enumerate(self.customer):
            if not missing:
                break
            if customer in missing:
                self.weight[n] = missing.pop(customer)


def read(path: Path) -> Trace:
    """Read a trace from a file. Raises `TraceError` with file and line."""
    try:
        with path.open("rb") as stream:
            return read_stream(stream, str(path))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def read_stream(stream: Iterable[bytes], name: str) -> Trace:
    """Read a trace from the lines of a stream. Raises `TraceError` with this name and the line."""
    reader = csv.reader(_decoded(stream), strict=True)
    growing = Growing()
    weights = growing.trace.weight
    line = 0  # the last line of the previous row
    try:
        columns = _columns(next(reader, None))
        width = len(columns)
        at_column, customer_column, cost_column = (columns[name] for name in REQUIRED)
        weight_column, kind_column = (columns.get(name) for name in OPTIONAL)
        line = reader.line_num
        for row in reader:
            line = reader.line_num
            if not row:
                continue
            if len(row) != width:
                raise ValueError(f"{len(row)} columns where the header has {width}")
            at = seconds("at_s", row[at_column])
            cost = seconds("cost_s", row[cost_column])
            if weight_column is not None and row[weight_column]:
                weights[len(growing.trace)] = _weight(row[weight_column])
            kind = None if kind_column is None else row[kind_column] or DEFAULT_KIND_NAME
            growing.add(at, row[customer_column], cost, kind)
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}, line {reader.line_num + 1}: not valid UTF-8") from error
    except csv.Error as error:
        # An unclosed quote spans the following lines: report the line where its row starts.
        raise TraceError(f"{name}, line {line + 1}: {_misquoted(error)}") from error
    except ValueError as error:
        raise TraceError(f"{name}, line {max(1, reader.line_num)}: {error}") from error
    return growing.trace


class Growing:
    """Builds a trace; `add` raises `ValueError`."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._numbers: dict[str, int] = {}
        self._kinds: dict[str, int] = {}
        self._last = 0
        self._work = 0

    def add(self, at: int, customer: str, cost: int, kind: str | None = None) -> None:
        """Append a document; its time and its cost are in microseconds. Either all documents of a
        trace have a kind or none."""
        trace = self.trace
        if at < self._last:
            raise ValueError(
                f"at_s {at / SECOND_US:.10g} goes back; "
                f"the previous line is at {self._last / SECOND_US:.10g}"
            )
        self._last = at
        number = self._numbers.get(customer)
        if number is None:
            text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
            number = self._numbers[customer] = len(self._numbers)
            trace.names.append(customer)
        self._work += cost
        if at + self._work > _TIMESTAMP_MAX:
            raise ValueError(
                f"the costs up to here add up to {self._work / SECOND_US:g} s; that is too long"
            )
        if kind is not None:
            trace.kind.append(self._kind(kind))
        trace.cost.append(cost)
        trace.at.append(at)
        trace.customer.append(number)

    def _kind(self, name: str) -> int:
        number = self._kinds.get(name)
        if number is None:
            number = len(self._kinds)
            if number == KINDS_MAX:
                raise ValueError(
                    f"the trace has more than {KINDS_MAX} kinds; kind {name!r} is one too many"
                )
            self._kinds[text.kind_name(name)] = number
            self.trace.kinds.append(name)
        return number


def _misquoted(error: csv.Error) -> str:
    """Return a message that describes the error better than that of the reader."""
    message = str(error)
    if "unexpected end of data" in message:
        return 'a quote (") is opened here and never closed'
    if "field larger" in message:
        limit = csv.field_size_limit()
        return f'a field has more than {limit:,} characters; is a quote (") not closed?'
    if "expected after" in message:
        return 'a field goes on after its closing quote ("); a quote inside a field is doubled'
    return message


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    """Decode line by line, so that an error has a line number."""
    encoding = "utf-8-sig"
    for line in lines:
        yield line.decode(encoding)
        encoding = "utf-8"


def _columns(header: list[str] | None) -> dict[str, int]:
    expected = f"the first line must name the columns {','.join(REQUIRED)}[,{','.join(OPTIONAL)}]"
    if not header:
        raise ValueError(f"the file is empty; {expected}")
    for separator, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(header) == 1 and separator in header[0]:
            raise ValueError(f"the columns are separated by {word}; use commas: {expected}")
    columns = {name: number for number, name in enumerate(header)}
    for name in header:
        if name not in REQUIRED + OPTIONAL:
            raise ValueError(f"{name!r} is not a column of a trace; {expected}")
    missing = [name for name in REQUIRED if name not in columns]
    if missing or len(columns) != len(header):
        raise ValueError(f"the columns are {','.join(header)}; {expected}")
    return columns


def seconds(column: str, value: str) -> int:
    """Convert seconds to microseconds. Raises `ValueError` with the name of the column."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{column} {value!r} is not a number of seconds") from None
    if not math.isfinite(number) or number > SECONDS_MAX:
        raise ValueError(f"{column} {value} is out of range; at most {SECONDS_MAX:.0f} is allowed")
    if number < 0:
        raise ValueError(f"{column} {value} is negative")
    return round(number * SECOND_US)


def _weight(value: str) -> int:
    try:
        return weight_in_thousandths(float(value))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"weight {value!r}: {error}") from None
