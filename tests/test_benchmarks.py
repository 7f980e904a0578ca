"""The parts of the benchmarks: the latency proxy, the board, and the bars."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.contest import PAYLOAD, Board
from benchmarks.distance import Proxy
from benchmarks.figures import Figure
from benchmarks.standings import Section, Standing, report

DELAY_S = 0.02


@contextmanager
def echo() -> Iterator[int]:
    """Run a server that echoes to one client until that closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            near, _ = listener.accept()
            with near:
                while piece := near.recv(65_536):
                    near.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@contextmanager
def call_from_afar() -> Iterator[socket.socket]:
    stop, stopped = socket.socketpair()
    with stop, stopped, echo() as port:
        proxy = Proxy(port, DELAY_S / 2)
        thread = threading.Thread(target=proxy.serve, args=(stopped,))
        thread.start()
        with socket.create_connection(("127.0.0.1", proxy.port)) as call:
            yield call
            call.shutdown(socket.SHUT_WR)
            assert call.recv(1) == b""  # the end of the stream is forwarded both ways
        stop.send(b".")
        thread.join()


def receive(call: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        received += call.recv(65_536)
    return received


def test_a_round_trip_through_the_proxy_takes_the_added_time() -> None:
    with call_from_afar() as call:
        for _ in range(3):
            begun = time.monotonic()
            call.sendall(b"hello")
            assert receive(call, 5) == b"hello"
            assert time.monotonic() - begun >= DELAY_S


def test_what_passes_through_the_proxy_stays_whole_and_in_order() -> None:
    sent = b"".join(f"{number:8}".encode() for number in range(32_768))  # several chunks
    with call_from_afar() as call:
        call.sendall(sent)
        assert receive(call, len(sent)) == sent


def test_a_board_counts_what_every_worker_started_and_knows_when_the_last_was(
    tmp_path: Path,
) -> None:
    board = Board.make(tmp_path / "board")
    seen_elsewhere = Board(tmp_path / "board")
    first, second = board.handler(0), board.handler(1)
    first()
    before = time.monotonic_ns()
    second()
    second()
    assert seen_elsewhere.started == 3
    assert before <= seen_elsewhere.last_at_ns <= time.monotonic_ns()


def test_the_payload_of_the_contest_has_200_bytes() -> None:
    assert len(json.dumps(PAYLOAD, separators=(",", ":"))) == 200


@pytest.mark.parametrize(("value", "code"), [(0.4, 1), (0.5, 0), (0.6, 0)])
def test_what_falls_short_is_named_and_makes_the_run_fail(
    value: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    standing = Standing(name="fairturn", values=[3.0, 1.0, 2.0])
    figure = Figure(name="fairturn of the bare loop", value=value, bar=0.5, ours="")
    section = Section(title="drain", standings=[standing], figures=[figure])
    assert report("title", [section], as_json=False) == code
    printed = capsys.readouterr()
    assert "2/s" in printed.out
    assert "1 to 3" in printed.out
    assert ("falls short: drain: fairturn of the bare loop" in printed.err) == bool(code)
