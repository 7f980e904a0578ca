"""`fairturn prune` deletes documents beyond their age, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairturn import Queue
from fairturn.model import INLINE_BYTES_MAX
from tests.commands import complete, fairturn, kill, lines_of, shown_on_a_terminal


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db", completed_kept_s=0) as opened:
        yield opened


def test_documents_past_their_age_are_forgotten_with_their_contents(queue: Queue) -> None:
    queue.submit("acme", content=b"x" * (INLINE_BYTES_MAX + 1))
    queue.submit("acme")
    complete(queue, 2)
    queue.submit("acme")
    dead = kill(queue)
    waiting = queue.submit("acme").id

    printed = fairturn("prune")

    assert (printed.exit_code, printed.stdout) == (0, "Deleted 2 documents and 1 stored file.\n")
    assert {document.id for document in queue.iterate()} == {*dead, waiting}


def test_programs_get_the_numbers(queue: Queue) -> None:
    queue.submit("acme")
    complete(queue)

    assert lines_of(fairturn("prune", "--json")) == [{"documents": 1, "contents": 0}]
    assert lines_of(fairturn("prune", "--json")) == [{"documents": 0, "contents": 0}]


def test_progress_is_shown_on_a_terminal() -> None:
    assert "Deleting" in shown_on_a_terminal("stderr", "prune")
