"""Traces of arrivals: the CSV files that `fairturn replay` reads.

Columns `at_s,customer,cost_s` and optionally `weight`, in any order, times not going back.
"""

import csv
import math
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from fairturn.clock import SECOND_US
from fairturn.errors import TraceError
from fairturn.model import CUSTOMER_BYTES_MAX, weight_in_thousandths
from fairturn.validation import text

REQUIRED = ("at_s", "customer", "cost_s")
OPTIONAL = ("weight",)
SECONDS_MAX = 4_000_000_000.0
_MOMENT_MAX = (1 << 63) - 1  # of the columns, in microseconds


class Trace:
    """Documents in the order of the file, as columns: a million take about 30 MB."""

    def __init__(self) -> None:
        self.names: list[str] = []  # of the customers, by their number
        self.at = array("q")  # microseconds
        self.customer = array("l")  # numbers
        self.cost = array("q")  # microseconds of work
        self.weight: dict[int, int] = {}  # row -> the customer's weight from there on

    def __len__(self) -> int:
        return len(self.at)


def read(path: Path) -> Trace:
    """The trace in a file; whatever is wrong with it is a `TraceError` with file and line."""
    try:
        with path.open("rb") as stream:
            return read_stream(stream, str(path))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def read_stream(stream: Iterable[bytes], name: str) -> Trace:
    """The trace in the lines of a stream that the errors call by this name."""
    reader = csv.reader(_decoded(stream), strict=True)
    growing = Growing()
    weights = growing.trace.weight
    line = 0  # where the last row ended
    try:
        columns = _columns(next(reader, None))
        width = len(columns)
        at_column, customer_column, cost_column = (columns[name] for name in REQUIRED)
        weight_column = columns.get("weight")
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
            growing.add(at, row[customer_column], cost)
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}, line {reader.line_num + 1}: not a text in UTF-8") from error
    except csv.Error as error:
        # A quote that is not closed swallows the lines after it: it stands where its row begins.
        raise TraceError(f"{name}, line {line + 1}: {_misquoted(error)}") from error
    except ValueError as error:
        raise TraceError(f"{name}, line {max(1, reader.line_num)}: {error}") from error
    return growing.trace


class Growing:
    """A trace to which documents are added in their order; what cannot be is a `ValueError`."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._numbers: dict[str, int] = {}
        self._last = 0
        self._work = 0

    def add(self, at: int, customer: str, cost: int) -> None:
        """One more document, at a moment and with a cost in microseconds."""
        trace = self.trace
        if at < self._last:
            raise ValueError(
                f"at_s {at / SECOND_US:.10g} goes back; "
                f"the line before is at {self._last / SECOND_US:.10g}"
            )
        self._last = at
        number = self._numbers.get(customer)
        if number is None:
            text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
            number = self._numbers[customer] = len(self._numbers)
            trace.names.append(customer)
        self._work += cost
        if at + self._work > _MOMENT_MAX:
            raise ValueError(
                f"the work up to here may last {self._work / SECOND_US:g} s; that is too long"
            )
        trace.cost.append(cost)
        trace.at.append(at)
        trace.customer.append(number)


def _misquoted(error: csv.Error) -> str:
    """What is wrong with the quotes of a row; the reader's own words do not say it."""
    said = str(error)
    if "unexpected end of data" in said:
        return 'a quote (") is opened here and never closed'
    if "field larger" in said:
        limit = csv.field_size_limit()
        return f'a field has more than {limit:,} characters; is a quote (") not closed?'
    if "expected after" in said:
        return 'a field goes on after its closing quote ("); a quote inside a field is doubled'
    return said


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    """One line after the other, so that an error has the number of its line."""
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
            raise ValueError(f"the columns are separated by {word}; a trace has commas: {expected}")
    columns = {name: number for number, name in enumerate(header)}
    for name in header:
        if name not in REQUIRED + OPTIONAL:
            raise ValueError(f"{name!r} is not a column of a trace; {expected}")
    missing = [name for name in REQUIRED if name not in columns]
    if missing or len(columns) != len(header):
        raise ValueError(f"the columns are {','.join(header)}; {expected}")
    return columns


def seconds(column: str, value: str) -> int:
    """A number of seconds, in microseconds; the error names the column."""
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
