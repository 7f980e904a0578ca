"""`fairturn explain`: sentences in the chosen language, for the chosen audience."""

from pathlib import Path

import pytest

from fairturn import Queue, Submission
from tests.commands import claim, complete, error_of, fairturn, lines_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "documents.db"


def submit(file: Path, *customers: str) -> list[str]:
    with Queue(file) as queue:
        receipts = queue.submit_many(Submission(customer=name) for name in customers)
        return [receipt.id for receipt in receipts]


def test_a_document_that_waits_is_explained_in_sentences(file: Path) -> None:
    *_, id = submit(file, "beta", "beta", "acme", "acme")

    result = fairturn("explain", id, "-d", file, "--lang", "en")

    assert result.exit_code == 0
    first, *sentences = result.stdout.splitlines()
    assert first == f"Document {id} is waiting."
    assert "3 documents will be started before it." in sentences
    assert "By customer: beta (2)." in sentences
    assert "No worker is running." in sentences


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("de", "Es läuft kein Worker."),
        ("es", "No hay ningún worker en marcha."),
        ("pl", "Żaden proces roboczy nie działa."),
        ("pt", "Nenhum worker está em execução."),
    ],
)
def test_another_language_can_be_asked_for(file: Path, language: str, expected: str) -> None:
    (id,) = submit(file, "acme")

    assert expected in fairturn("explain", id, "-d", file, "--lang", language).stdout


def test_the_language_of_the_locale_is_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id,) = submit(file, "acme")
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "pl_PL.UTF-8")

    assert f"Dokument {id} czeka." in fairturn("explain", id, "-d", file).stdout


def test_a_language_that_is_not_there_is_wrong_use(file: Path) -> None:
    (id,) = submit(file, "acme")

    sentence = error_of(fairturn("explain", id, "-d", file, "--lang", "fr"), 2)

    assert "it must be one of: en, de, es, pl, pt" in sentence


def test_to_a_customer_other_customers_are_numbers_in_text_and_in_json(file: Path) -> None:
    *_, id = submit(file, "secret", "secret", "acme", "acme")

    for options in ([], ["--json"]):
        told = fairturn("explain", id, "-d", file, "--for", "customer", *options).stdout
        assert "secret" not in told
        assert "secret" in fairturn("explain", id, "-d", file, *options).stdout


def test_programs_get_codes_with_parameters_and_the_sentences(file: Path) -> None:
    *_, id = submit(file, "beta", "acme")

    (told,) = lines_of(fairturn("explain", id, "-d", file, "--json", "--lang", "de"))

    assert told["id"] == id
    assert told["state"] == "waiting"
    assert told["language"] == "de"
    assert told["position"]["least"] == told["position"]["most"] == 1
    assert told["position"]["before"]["other_turns"] == 1
    assert {"code": "position", "documents": 1} in told["reasons"]
    assert f"Das Dokument {id} wartet." in told["sentences"]


def test_a_document_that_has_ended_says_what_happened(file: Path) -> None:
    (id,) = submit(file, "acme")
    with Queue(file) as queue:
        assert complete(queue) == [id]

    told = fairturn("explain", id, "-d", file, "--lang", "en").stdout

    assert f"Document {id} is completed." in told
    assert "The work took" in told


def test_a_name_cannot_steer_the_terminal(file: Path) -> None:
    *_, id = submit(file, "\u202eevil", "acme", "acme")
    with Queue(file) as queue:
        claim(queue, 0)

    told = fairturn("explain", id, "-d", file, "--lang", "en").stdout

    assert "\\u202eevil" in told
    assert "\u202e" not in told


def test_a_document_that_is_not_there_ends_with_the_code_for_that(file: Path) -> None:
    submit(file, "acme")

    assert "there is no document" in error_of(fairturn("explain", "0" * 15, "-d", file), 3)
