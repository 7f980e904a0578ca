"""Trace files: the Standard Workload Format, compression, and rejected files."""

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairturn.errors import TraceError
from fairturn.simulator.trace_files import read, scaled
from tests.test_simulator import SECOND, trace_of

EXAMPLES = settings().max_examples  # of the active profile
HEADER = "; Version: 2.2\n;\n; Note: two users\n"
REAL_TRACE = os.environ.get("FAIRTURN_TRACE")


def record(number: int, submitted: object, run: object, user: object) -> str:
    """Return a line of the format: 18 fields, of which three matter here."""
    fields: list[object] = [number, submitted, -1, run, 4, *[-1] * 6, user, *[1] * 6]
    return "  ".join(map(str, fields)) + "\n"


def swf(folder: Path, text: str, name: str = "trace.swf") -> Path:
    path = folder / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["trace.swf", "trace.swf.gz"])
def test_a_workload_log_is_read_with_users_as_customers_and_run_times_as_costs(
    tmp_path: Path, name: str
) -> None:
    text = HEADER + record(1, 0, 10, 4) + "\n" + record(2, 5, 2.5, 7) + record(3, 5, 0, 4)

    found = read(swf(tmp_path, text, name))

    assert found.left_out == 0
    assert found.trace.names == ["user-4", "user-7"]
    assert list(found.trace.at) == [0, 5 * SECOND, 5 * SECOND]
    assert list(found.trace.customer) == [0, 1, 0]
    assert list(found.trace.cost) == [10 * SECOND, 2_500_000, 0]


def test_records_without_a_run_time_or_a_user_are_left_out_and_counted(tmp_path: Path) -> None:
    text = record(1, 0, -1, 4) + record(2, 1, 5, -1) + record(3, 2, 5, 4)

    found = read(swf(tmp_path, text))

    assert found.left_out == 2
    assert list(found.trace.at) == [2 * SECOND]


BAD = {
    "too few fields": ("1 2 3\n", 4, "3 fields where the format has 18"),
    "too many fields": (record(1, 0, 1, 1).rstrip() + " 9\n", 4, "19 fields"),
    "a time that is no number": (record(1, "soon", 1, 1), 4, "submit time 'soon'"),
    "a negative time": (record(1, -5, 1, 1), 4, "submit time -5 is negative"),
    "a run time that is no number": (record(1, 0, "x", 1), 4, "run time 'x'"),
    "an infinite run time": (record(1, 0, "inf", 1), 4, "run time inf"),
    "a user that is no number": (record(1, 0, 1, "ada"), 4, "ada"),
    "a time that goes back": (record(1, 9, 1, 1) + record(2, 8, 1, 1), 5, "at_s 8 goes back"),
    "bytes that are no text": (record(1, 0, 1, "\udcff"), 4, "UTF-8"),
}


@pytest.mark.parametrize(("text", "line", "why"), BAD.values(), ids=BAD.keys())
def test_a_wrong_line_is_refused_with_file_line_and_reason(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    path = tmp_path / "bad.swf"
    path.write_bytes((HEADER + text).encode("utf-8", "surrogateescape"))

    with pytest.raises(TraceError) as refused:
        read(path)

    assert str(refused.value).startswith(f"{path}, line {line}: ")
    assert why in str(refused.value)


def test_the_csv_of_replay_is_read_too_also_compressed(tmp_path: Path) -> None:
    text = "at_s,customer,cost_s\n1,a,2\n"

    for name in ("t.csv", "t.csv.gz"):
        found = read(swf(tmp_path, text, name))

        assert (found.trace.names, list(found.trace.at)) == (["a"], [SECOND])


NO_GZIP = {
    "no gzip at all": b"no gzip",
    "cut off": gzip.compress(b"x" * 999, mtime=0)[:-9],
    "its first bytes": b"\x1f\x8b",
}


@pytest.mark.parametrize("name", ["t.swf.gz", "t.csv.gz"])
@pytest.mark.parametrize("data", NO_GZIP.values(), ids=NO_GZIP.keys())
def test_a_file_that_is_no_whole_gzip_file_is_refused_by_name(
    tmp_path: Path, name: str, data: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(data)

    with pytest.raises(TraceError) as refused:
        read(path)

    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "absent.swf")


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace")))
@settings(max_examples=2 * EXAMPLES)
def test_any_bytes_at_all_give_a_trace_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.swf"
    path.write_bytes(data)

    refusal = None
    try:
        read(path)
    except TraceError as error:
        refusal = str(error)

    assert refusal is None or str(path) in refusal


# ── Scaling ──────────────────────────────────────────────────────────────────────────────────────


def test_a_time_scale_makes_arrivals_denser_and_a_maximum_cuts_long_documents() -> None:
    trace = trace_of((10, "a", 5), (20, "b", 50), kinds=["ocr", "text"])

    other = scaled(trace, time_scale=0.5, cost_us_max=8 * SECOND)

    assert [other.kind_names[other.kind_of(n)] for n in range(2)] == ["ocr", "text"]
    assert list(other.at) == [5 * SECOND, 10 * SECOND]
    assert list(other.cost) == [5 * SECOND, 8 * SECOND]
    assert list(trace.at) == [10 * SECOND, 20 * SECOND]


@pytest.mark.parametrize("scale", [0, -1, 101, float("nan"), float("inf")])
def test_a_time_scale_that_makes_no_sense_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="time scale"):
        scaled(trace_of((0, "a", 1)), time_scale=scale)


@pytest.mark.skipif(REAL_TRACE is None, reason="FAIRTURN_TRACE names no trace")
def test_a_real_trace_is_read_whole() -> None:
    assert REAL_TRACE is not None
    found = read(Path(REAL_TRACE))

    assert (len(found.trace), len(found.trace.names), found.left_out) == (18_239, 69, 0)
