"""Replay of a trace: the vectors, the order at equal moments, and rejected traces."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairturn.errors import TraceError
from fairturn.priority import Rule
from fairturn.scheduling.flows import PATIENCE_US, Costs, Mode
from fairturn.simulator.plan import Plan, plan_of
from fairturn.simulator.replay import Replayed, replay
from fairturn.simulator.trace import Trace, read
from tests import reference
from tests.commands import fairturn

VECTORS = Path(__file__).parent / "vectors" / "order"
KINDS = Path(__file__).parent / "vectors" / "kinds"
KIND_VECTORS = json.loads((KINDS / "index.json").read_text("utf-8"))
ANSWERS = sorted(VECTORS.glob("*.jsonl"))
HEADER = "at_s,customer,cost_s\n"
EXAMPLES = settings().max_examples  # of the active profile


def lines_of(trace: Trace, replayed: Replayed) -> list[str]:
    """Return the lines that `fairturn replay --json` prints."""
    return [
        json.dumps(
            {
                "n": n,
                "customer": trace.names[trace.customer[n]],
                **({"kind": trace.kinds[trace.kind[n]]} if trace.kind else {}),
                "at_s": trace.at[n] / 1_000_000,
                "count": replayed.count[n],
                "priority": replayed.priority[n],
                "started_at_s": replayed.started_at[n] / 1_000_000,
                "finished_at_s": replayed.finished_at[n] / 1_000_000,
            },
            separators=(",", ":"),
        )
        for n in range(len(trace))
    ]


def rows_of(trace: Trace) -> list[reference.Row]:
    return [
        reference.Row(
            trace.at[n], trace.names[trace.customer[n]], trace.cost[n], trace.weight.get(n)
        )
        for n in range(len(trace))
    ]


def outcome_of(replayed: Replayed) -> list[tuple[int, int, int, int]]:
    columns = (replayed.count, replayed.priority, replayed.started_at, replayed.finished_at)
    return list(zip(*columns, strict=True))


def trace_of(rows: list[reference.Row]) -> Trace:
    trace = Trace()
    for n, row in enumerate(rows):
        if row.customer not in trace.names:
            trace.names.append(row.customer)
        trace.at.append(row.at)
        trace.customer.append(trace.names.index(row.customer))
        trace.cost.append(row.cost)
        if row.weight is not None:
            trace.weight[n] = row.weight
        if row.kind not in trace.kinds:
            trace.kinds.append(row.kind)
        trace.kind.append(trace.kinds.index(row.kind))
    return trace


# ── The order ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("answers", ANSWERS, ids=lambda path: path.stem)
def test_a_trace_of_the_vectors_is_served_exactly_as_they_say(answers: Path) -> None:
    name, mode, workers = answers.stem.split(".")
    trace = read(VECTORS / f"{name}.csv")

    replayed = replay(
        trace, rule=Rule(), mode=Mode(mode), plan=Plan(workers=int(workers.removeprefix("workers")))
    )

    assert lines_of(trace, replayed) == answers.read_text("utf-8").splitlines()


def test_the_vectors_are_all_there() -> None:
    assert len(ANSWERS) == 12


@pytest.mark.parametrize("answers", ANSWERS, ids=lambda path: path.stem)
def test_the_reference_serves_the_vectors_as_they_say_too(answers: Path) -> None:
    name, mode, workers = answers.stem.split(".")
    trace = read(VECTORS / f"{name}.csv")
    expected = [json.loads(line) for line in answers.read_text("utf-8").splitlines()]

    outcome = reference.replay(
        rows_of(trace),
        mode=mode,
        workers=int(workers.removeprefix("workers")),
        patience_us=PATIENCE_US,
    )

    assert [
        [count, priority, started / 1_000_000, finished / 1_000_000]
        for count, priority, started, finished in outcome
    ] == [[e["count"], e["priority"], e["started_at_s"], e["finished_at_s"]] for e in expected]


@pytest.mark.parametrize("vector", KIND_VECTORS, ids=lambda vector: vector["expected"])
def test_a_trace_with_kinds_is_served_exactly_as_the_vectors_say(vector: dict[str, str]) -> None:
    command = ["replay", str(KINDS / vector["trace"]), *vector["options"].split(), "--json"]

    answer = fairturn(*command)

    assert answer.stdout == (KINDS / vector["expected"]).read_text("utf-8")


rows = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 500_000, 1_000_000, 40_000_000, 130_000_000, 1_600_000_000]),
        st.sampled_from("abcd"),
        st.sampled_from([0, 0, 1, 900_000, 1_000_000, 3_000_000, 35_000_000]),
        st.sampled_from([None, None, None, None, 10, 333, 1_000, 3_000, 100_000]),
    ),
    min_size=10,
    max_size=60,
)


@pytest.mark.parametrize("costs", Costs)
@pytest.mark.parametrize("mode", Mode)
@given(
    steps=rows, workers=st.integers(1, 4), patience_us=st.sampled_from([0, 5_000_000, 120_000_000])
)
def test_any_trace_is_served_as_the_reference_serves_it(
    mode: Mode,
    costs: Costs,
    steps: list[tuple[int, str, int, int | None]],
    workers: int,
    patience_us: int,
) -> None:
    lines: list[reference.Row] = []
    now = 0
    for step, customer, cost, weight in steps:
        now += step
        lines.append(reference.Row(now, customer, cost, weight))

    replayed = replay(
        trace_of(lines),
        rule=Rule(),
        mode=mode,
        costs=costs,
        plan=Plan(workers=workers),
        patience_us=patience_us,
    )

    assert outcome_of(replayed) == reference.replay(
        lines, mode=mode.value, costs=costs.value, workers=workers, patience_us=patience_us
    )


@pytest.mark.parametrize("costs", Costs)
@pytest.mark.parametrize("mode", Mode)
@given(
    steps=rows,
    kinds=st.lists(st.sampled_from(["ocr", "text", "text", "export"]), min_size=60, max_size=60),
    workers=st.integers(1, 3),
    workers_for=st.lists(st.tuples(st.sampled_from(["ocr", "text"]), st.integers(1, 2))),
    patience_us=st.sampled_from([0, 5_000_000, 120_000_000]),
)
def test_any_trace_with_kinds_is_served_as_the_reference_serves_it(
    *,
    mode: Mode,
    costs: Costs,
    steps: list[tuple[int, str, int, int | None]],
    kinds: list[str],
    workers: int,
    workers_for: list[tuple[str, int]],
    patience_us: int,
) -> None:
    lines: list[reference.Row] = []
    now = 0
    for (step, customer, cost, weight), kind in zip(steps, kinds, strict=False):
        now += step
        lines.append(reference.Row(now, customer, cost, weight, kind))
    trace = trace_of(lines)
    groups = [(kind, n) for kind, n in workers_for if kind in trace.kinds]

    replayed = replay(
        trace,
        rule=Rule(),
        mode=mode,
        costs=costs,
        plan=plan_of(trace, workers, groups),
        patience_us=patience_us,
    )

    assert outcome_of(replayed) == reference.replay(
        lines,
        mode=mode.value,
        costs=costs.value,
        workers=workers,
        workers_for=groups,
        patience_us=patience_us,
    )


def test_a_weight_divides_the_turns_from_its_line_on(tmp_path: Path) -> None:
    path = tmp_path / "weights.csv"
    path.write_text(
        "weight,cost_s,customer,at_s\n"
        + "3,1,heavy,0\n"
        + ",1,heavy,0\n" * 29
        + "1,1,light,0\n"
        + ",1,light,0\n" * 29
    )
    trace = read(path)

    replayed = replay(trace, rule=Rule(), mode=Mode.EQUAL, plan=Plan(workers=1))

    assert trace.weight == {0: 3_000, 30: 1_000}
    by_start = sorted(range(60), key=lambda n: replayed.started_at[n])
    first = [trace.names[trace.customer[n]] for n in by_start[:36]]
    assert (first.count("heavy"), first.count("light")) == (27, 9)


@pytest.mark.parametrize("mode", Mode)
def test_documents_that_cost_nothing_free_their_worker_at_the_same_moment(mode: Mode) -> None:
    lines = [reference.Row(5, "a", 0)] * 7 + [reference.Row(5, "a", 10), reference.Row(9, "b", 0)]

    replayed = replay(trace_of(lines), rule=Rule(), plan=Plan(workers=1), mode=mode)

    assert list(replayed.started_at) == [5, 5, 5, 5, 5, 5, 5, 5, 15]
    assert list(replayed.finished_at) == [5, 5, 5, 5, 5, 5, 5, 15, 15]


def test_at_one_moment_documents_finish_then_others_are_submitted_then_workers_claim() -> None:
    # The worker is free at 30, and b, which arrives at 30, is in level 1; the fourth of a is in 2.
    lines = [reference.Row(0, "a", 10)] * 4 + [reference.Row(30, "b", 10)]

    replayed = replay(trace_of(lines), rule=Rule(), plan=Plan(workers=1), mode=Mode.LEVELS)

    assert list(replayed.started_at) == [0, 10, 20, 40, 30]


def test_every_document_finishes_once_and_progress_tells_how_many_did() -> None:
    heard: list[int] = []
    lines = [reference.Row(n, "ab"[n % 2], 3) for n in range(20_001)]

    replayed = replay(trace_of(lines), rule=Rule(), plan=Plan(workers=2), progress=heard.append)

    assert heard == [10_000, 20_000]
    assert all(
        finished - started == 3 and started >= n
        for n, (started, finished) in enumerate(
            zip(replayed.started_at, replayed.finished_at, strict=True)
        )
    )


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────


def test_a_trace_is_read_to_the_microsecond_with_its_columns_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        'customer,at_s,weight,cost_s\n"Müller, Söhne",0.000001,,0\n\na,1500.0000005,0.01,1e-6\n',
        encoding="utf-8-sig",
    )

    trace = read(path)

    assert rows_of(trace) == [
        reference.Row(1, "Müller, Söhne", 0, None),
        reference.Row(1_500_000_000, "a", 1, 10),
    ]


def test_a_trace_with_a_header_alone_has_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER)

    trace = read(path)

    assert len(trace) == 0
    assert lines_of(trace, replay(trace, rule=Rule())) == []


BAD = {
    "a column that no trace has": ("at_s,customer,cost_s,colour\n0,a,1,red\n", 1, "colour"),
    "a column that is missing": ("at_s,customer\n0,a\n", 1, "cost_s"),
    "a column that is named twice": ("at_s,customer,cost_s,at_s\n0,a,1,0\n", 1, "at_s"),
    "no header": ("0.0,a,1.0\n1.0,a,1.0\n", 1, "at_s,customer,cost_s"),
    "an empty file": ("", 1, "empty"),
    "a blank first line": ("\n" + HEADER, 1, "at_s,customer,cost_s"),
    "a negative time": (HEADER + "0,a,1\n-1,a,1\n", 3, "at_s -1 is negative"),
    "a negative cost": (HEADER + "0,a,-0.5\n", 2, "cost_s -0.5 is negative"),
    "a time that goes back": (HEADER + "5,a,1\n6,a,1\n5.9,a,1\n", 4, "at_s 5.9 goes back"),
    "too few columns": (HEADER + "0,a,1\n0,a\n", 3, "2 columns where the header has 3"),
    "too many columns": (HEADER + "0,a,1,1\n", 2, "4 columns where the header has 3"),
    "a time that is no number": (HEADER + "soon,a,1\n", 2, "at_s 'soon'"),
    "a time that is not a number": (HEADER + "nan,a,1\n", 2, "at_s nan"),
    "a cost that is not a number": (HEADER + "0,a,NaN\n", 2, "cost_s NaN"),
    "an infinite time": (HEADER + "inf,a,1\n", 2, "at_s inf"),
    "an infinite cost": (HEADER + "0,a,1e999\n", 2, "cost_s 1e999"),
    "a time too far away": (HEADER + "4000000001,a,1\n", 2, "at_s 4000000001"),
    "an empty time": (HEADER + ",a,1\n", 2, "at_s ''"),
    "an empty customer": (HEADER + "0,,1\n", 2, "customer is empty"),
    "a customer too long": (HEADER + f"0,{'é' * 128},1\n", 2, "256 bytes"),
    "a NUL in a customer": (HEADER + "0,a\x00b,1\n", 2, "NUL"),
    "a weight that is no number": ("at_s,customer,cost_s,weight\n0,a,1,x\n", 2, "weight 'x'"),
    "a weight of nothing": ("at_s,customer,cost_s,weight\n0,a,1,0\n", 2, "weight '0'"),
    "a negative weight": ("at_s,customer,cost_s,weight\n0,a,1,-1\n", 2, "weight '-1'"),
    "a weight too large": ("at_s,customer,cost_s,weight\n0,a,1,101\n", 2, "weight '101'"),
    "a weight that is not a number": (
        "at_s,customer,cost_s,weight\n0,a,1,nan\n",
        2,
        "weight 'nan'",
    ),
    "an infinite weight": ("at_s,customer,cost_s,weight\n0,a,1,inf\n", 2, "weight 'inf'"),
    "a quote that never ends": (
        HEADER + '0,a,1\n0,"a,1\n' + "1,b,1\n" * 50,
        3,
        'a quote (") is opened here and never closed',
    ),
    "a quote that swallows too much": (
        HEADER + '0,"a,1\n' + "1,b,1\n" * 50_000,
        2,
        'is a quote (") not closed?',
    ),
    "text after a quote": (HEADER + '0,a,1\n0,"a"b,1\n', 3, "after its closing quote"),
    "a quote in the header": ('at_s,"customer,cost_s\n0,a,1\n', 1, "never closed"),
    "semicolons": ("at_s;customer;cost_s\n0;a;1\n", 1, "by semicolons; use commas"),
    "tabs": ("at_s\tcustomer\tcost_s\n0\ta\t1\n", 1, "separated by tabs"),
    "a blank line before the bad one": (HEADER + "\n\n0,a,x\n", 4, "cost_s 'x'"),
}


@pytest.mark.parametrize(("text", "line", "why"), BAD.values(), ids=BAD.keys())
def test_a_bad_trace_is_refused_with_file_line_and_reason(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(TraceError) as refused:
        read(path)

    assert str(refused.value).startswith(f"{path}, line {line}: ")
    assert why in str(refused.value)


@pytest.mark.parametrize("good_lines", [0, 3, 20_000])
def test_a_trace_that_is_not_utf_8_is_refused_with_file_and_line(
    tmp_path: Path, good_lines: int
) -> None:
    path = tmp_path / "latin-1.csv"
    path.write_bytes(HEADER.encode() + b"0,a,1\n" * good_lines + b"0,M\xfcller,1\n")

    with pytest.raises(TraceError, match="UTF-8") as refused:
        read(path)

    assert str(refused.value).startswith(f"{path}, line {good_lines + 2}: ")


def test_a_trace_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "absent.csv"

    with pytest.raises(TraceError, match="cannot be read") as refused:
        read(path)

    assert str(path) in str(refused.value)


cells = st.sampled_from(
    ["0", "1", "1e5", "-0", "a", "inf", "", " ", '"', "1_0", "é", "\x00", "4e9"]
)
tables = st.lists(st.lists(cells, min_size=4, max_size=4).map(",".join), max_size=4).map("\n".join)


@given(
    st.binary(max_size=100)
    | st.text(max_size=100).map(lambda text: (HEADER + text).encode("utf-8", "replace"))
    | tables.map(lambda table: ("at_s,customer,cost_s,weight\n" + table).encode())
)
@settings(max_examples=2 * EXAMPLES)
def test_any_bytes_at_all_give_a_trace_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(data)

    refusal = None
    documents = replayed = 0
    try:
        trace = read(path)
        documents, replayed = len(trace), len(outcome_of(replay(trace, rule=Rule())))
    except TraceError as error:
        refusal = str(error)

    assert refusal is None or str(path) in refusal
    assert replayed == documents


def test_groups_of_workers_are_not_limited_to_what_a_byte_can_number() -> None:
    lines = [reference.Row(0, "a", 10, None, "ocr")] * 600
    trace = trace_of(lines)
    plan = plan_of(trace, 1, [("ocr", 1)] * 299)

    replayed = replay(trace, rule=Rule(), plan=plan)

    assert [list(replayed.started_at).count(at) for at in (0, 10)] == [300, 300]
