"""Input files of `simulate`: the CSV of `replay` and `export`, and the Standard Workload Format.

A file named *.swf is in the Standard Workload Format of the Parallel Workloads Archive: one record
of 18 numbers per line, comments after a semicolon. The user is the customer, the run time the cost.
A file named *.gz is compressed.
"""

import gzip
import zlib
from array import array
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import NamedTuple

from fairturn.errors import TraceError
from fairturn.simulator import trace
from fairturn.simulator.trace import Growing, Trace

FIELDS = 18
_SUBMITTED, _RUN, _USER = 1, 3, 11
_UNKNOWN = "-1"
TIME_SCALE_MAX = 100.0


class Read(NamedTuple):
    trace: Trace
    left_out: int  # records without a run time or a user


def read(path: Path) -> Read:
    """Read a trace from a file. Raises `TraceError` with file and line."""
    name = str(path)
    compressed = name.endswith(".gz")
    is_swf = name.removesuffix(".gz").endswith(".swf")
    try:
        with gzip.open(path) if compressed else path.open("rb") as stream:
            return _read_swf(stream, name) if is_swf else Read(trace.read_stream(stream, name), 0)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: damaged or truncated gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def _read_swf(stream: Iterable[bytes], name: str) -> Read:
    growing = Growing()
    left_out = 0
    for number, line in enumerate(stream, start=1):
        fields = line.split(b";")[0].split()
        if not fields:
            continue
        try:
            if len(fields) != FIELDS:
                raise ValueError(f"{len(fields)} fields where the format has {FIELDS}")
            submitted, run, user = (fields[n].decode() for n in (_SUBMITTED, _RUN, _USER))
            if _UNKNOWN in (run, user):
                left_out += 1
                continue
            at, cost = trace.seconds("submit time", submitted), trace.seconds("run time", run)
            growing.add(at, f"user-{int(user)}", cost)
        except UnicodeDecodeError as error:
            raise TraceError(f"{name}, line {number}: not valid UTF-8") from error
        except ValueError as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
    return Read(growing.trace, left_out)


def scaled(original: Trace, *, time_scale: float = 1.0, cost_us_max: int | None = None) -> Trace:
    """Return a copy with all timestamps multiplied by `time_scale` (0.5 is twice the load) and
    costs capped at `cost_us_max`."""
    if not 0 < time_scale <= TIME_SCALE_MAX:
        raise ValueError(
            f"the time scale is {time_scale:g}; it must be above 0 and at most {TIME_SCALE_MAX:g}"
        )
    other = copy(original)
    if time_scale != 1:
        other.at = array("q", (round(at * time_scale) for at in original.at))
    if cost_us_max is not None:
        other.cost = array("q", (min(cost, cost_us_max) for cost in original.cost))
    return other
