"""Languages: complete, with correct plurals and numbers, and chosen by the environment."""

from collections.abc import Iterator

import pytest

from fairturn.clock import SECOND_US
from fairturn.explain.analysis import Explanation
from fairturn.explain.reasons import Code, Reason, Value
from fairturn.explain.sentences import MESSAGES, PHRASES, STATES, tell
from fairturn.i18n import languages, load, preferred
from fairturn.i18n.catalogue import Entry, read, translations
from fairturn.model import ENDED, State
from tests import catalogues
from tests.catalogues import FOLDER, placeholders, problems

LANGUAGES = ["de", "es", "pl", "pt"]
SAMPLES: dict[str, Value] = {
    "parent": "0c2f1d4b5a69788",
    "worker": "worker-7",
    "error": "unreadable",
    "reset": "idle",
    "weight": 2.5,
    "confidence": 0.9,
    "largest": (("acme", 3), ("beta", 1)),
    "kind": "ocr",
    "service": "azure-ocr",
}


def explanation(*reasons: Reason, state: State = State.WAITING) -> Explanation:
    return Explanation(
        id="0c2f1d4b5a69788",
        at_us=0,
        state=state,
        priority=1,
        count=0,
        position=None,
        forecast=None,
        reasons=reasons,
    )


def reason(code: Code, **changes: Value) -> Reason:
    values = {name: SAMPLES.get(name, 7) for name in code.parameters}
    return Reason(code, values | changes)


def reasons() -> Iterator[Reason]:
    """Return every code with every message that it can choose."""
    for code in Code:
        yield reason(code)
    yield reason(Code.COUNT_RESETS, reset="periodic")
    yield reason(Code.NO_WORKER, seen_at=None, seen_us=None)
    yield reason(Code.PATIENCE_OVER, customers=0)
    yield reason(Code.RUNNING, worker=None)
    yield reason(Code.DEAD, error=None)
    yield reason(Code.COMPLETED, worker=None)
    yield reason(Code.STARTS_AFTER, earliest_us=SECOND_US)
    yield reason(Code.SERVED_MEANWHILE, customers=2)
    yield reason(Code.WAITED, attempts=1, step=0)
    yield reason(Code.OUTAGE_OVER, service=None)
    for service in (None, "azure-ocr"):
        for probe_in_us in (0, SECOND_US):
            yield reason(Code.OUTAGE, service=service, probe_in_us=probe_in_us)


# ── Complete ─────────────────────────────────────────────────────────────────────────────────────


def test_these_languages_are_there() -> None:
    assert languages() == ["en", *LANGUAGES]
    assert sorted(path.stem for path in FOLDER.glob("*.po")) == LANGUAGES


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_catalogue_has_every_message_with_its_placeholders_and_all_plural_forms(
    language: str,
) -> None:
    entries = read((FOLDER / f"{language}.po").read_text(encoding="utf-8"))

    assert list(problems(entries, language)) == []


def test_the_check_finds_what_is_wrong() -> None:
    header = Entry("", None, ("Language: xx\nPlural-Forms: nplurals=2; plural=(n != 1);\n",))
    whole = [
        Entry(one, many, (one,) if many is None else (one, many))
        for one, many, _ in catalogues.messages()
    ]
    assert list(problems([header, *whole], "xx")) == []

    first, *rest = whole
    plural = next(entry for entry in whole if entry.many is not None)
    others = [entry for entry in whole if entry is not plural]
    for broken in (
        [header, *rest],
        [header, *whole, first],
        [header, *whole, Entry("Nobody asks.", None, ("x",))],
        [header, first._replace(texts=("",)), *rest],
        [header, *others, plural._replace(texts=(plural.one,))],
        [header, *others, plural._replace(texts=(plural.one, "{other}"))],
        [Entry("", None, ("Language: yy\n",)), *whole],
    ):
        assert list(problems(broken, "xx"))
    with pytest.raises(ValueError, match="flag"):
        read('#, fuzzy\nmsgid "a"\nmsgstr "b"\n')


def test_a_catalogue_is_read_as_utf_8() -> None:
    text = (
        'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "a"\nmsgstr "ä"'
    )

    assert translations(read(text)).gettext("a") == "ä"


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_every_reason_can_be_told_in_every_language(language: str) -> None:
    told = [tell(explanation(each), language) for each in reasons()]

    for sentences in told:
        for sentence in sentences:
            assert "{" not in sentence
            assert sentence[0] == sentence[0].upper()
    if language != "en":
        english = [tell(explanation(each), "en") for each in reasons()]
        assert all(a != b for a, b in zip(told, english, strict=True))


def test_every_message_is_used_and_every_code_has_one() -> None:
    told = {sentence for each in reasons() for sentence in tell(explanation(each))}

    assert len(told) >= len(MESSAGES)
    assert set(Code) <= set(MESSAGES)
    assert set(State) == set(STATES)
    assert {state for state in State if STATES[state].event} == set(ENDED)


def test_placeholders_are_parameters_of_the_code() -> None:
    for code in Code:
        known = {name.removesuffix("_us") for name in code.parameters}
        known |= {"of_others", "of_customers"} if "customers" in known else set()
        message = MESSAGES[code]
        assert placeholders(message.one) | placeholders(message.many or "") <= known, code
        assert message.by in ("", *code.parameters)
    assert all(
        placeholders(p.many or p.one) for name, p in PHRASES.items() if name != "under_a_second"
    )


# ── Plurals, numbers, durations ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, "Wcześniej przyjdzie kolej na 1 dokument."),
        (2, "Wcześniej przyjdzie kolej na 2 dokumenty."),
        (4, "Wcześniej przyjdzie kolej na 4 dokumenty."),
        (5, "Wcześniej przyjdzie kolej na 5 dokumentów."),
        (12, "Wcześniej przyjdzie kolej na 12 dokumentów."),
        (22, "Wcześniej przyjdzie kolej na 22 dokumenty."),
        (112, "Wcześniej przyjdzie kolej na 112 dokumentów."),
    ],
)
def test_polish_has_three_forms(n: int, expected: str) -> None:
    _, sentence = tell(explanation(reason(Code.POSITION, documents=n)), "pl")

    assert sentence == expected


@pytest.mark.parametrize(
    ("language", "one", "two"),
    [
        ("en", "1 document will be started", "2 documents will be started"),
        ("de", "ist noch 1 Dokument an der Reihe", "sind noch 2 Dokumente an der Reihe"),
        ("es", "1 documento por delante", "2 documentos por delante"),
        ("pt", "Há 1 documento antes", "Há 2 documentos antes"),
    ],
)
def test_one_is_not_many(language: str, one: str, two: str) -> None:
    for n, expected in ((1, one), (2, two)):
        _, sentence = tell(explanation(reason(Code.POSITION, documents=n)), language)
        assert expected in sentence


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("en", ["7", "-29", "1,234", "12,345", "1,234,567", "2.5"]),
        ("de", ["7", "-29", "1.234", "12.345", "1.234.567", "2,5"]),
        ("es", ["7", "-29", "1234", "12.345", "1.234.567", "2,5"]),
        ("pl", ["7", "-29", "1234", "12\u00a0345", "1\u00a0234\u00a0567", "2,5"]),
        ("pt", ["7", "-29", "1.234", "12.345", "1.234.567", "2,5"]),
    ],
)
def test_numbers_are_written_as_in_the_language(language: str, expected: list[str]) -> None:
    number = load(language).number

    assert [number(n) for n in (7, -29, 1_234, 12_345, 1_234_567, 2.5)] == expected


@pytest.mark.parametrize(
    ("seconds", "english", "german"),
    [
        (0.4, "less than a second", "weniger als einer Sekunde"),
        (1, "1 second", "1 Sekunde"),
        (59, "59 seconds", "59 Sekunden"),
        (61, "1 minute 1 second", "1 Minute 1 Sekunde"),
        (120, "2 minutes", "2 Minuten"),
        (754, "12 minutes", "12 Minuten"),
        (3_600 + 125, "1 hour 2 minutes", "1 Stunde 2 Minuten"),
        (86_400 * 2 + 3_700, "2 days 1 hour", "2 Tagen 1 Stunde"),
    ],
)
def test_durations_are_told_in_two_units_at_most(seconds: float, english: str, german: str) -> None:
    told = reason(Code.RUNNING, running_us=round(seconds * SECOND_US), worker=None)

    assert tell(explanation(told))[1] == f"It has been running for {english}."
    assert tell(explanation(told), "de")[1] == f"Es wird seit {german} bearbeitet."


@pytest.mark.parametrize(
    ("language", "one", "two"),
    [
        ("en", "3 turns of another customer", "3 turns of 2 other customers"),
        ("de", "3 Dokumente eines anderen Kunden", "3 Dokumente von 2 anderen Kunden"),
        ("es", "3 turnos de otro cliente", "3 turnos de otros 2 clientes"),
        ("pl", "3 dokumenty innego klienta", "3 dokumenty 2 innych klientów"),
        ("pt", "3 documentos de outro cliente", "3 documentos de outros 2 clientes"),
    ],
)
def test_one_other_customer_is_another_one(language: str, one: str, two: str) -> None:
    for n, expected in ((1, one), (2, two)):
        told = reason(Code.BEFORE_OTHER_CUSTOMERS, documents=3, customers=n)
        assert expected in tell(explanation(told), language)[1]


def test_customers_are_listed_with_their_numbers_and_whether_there_are_more() -> None:
    both = reason(Code.SERVED_MEANWHILE, documents=4, customers=2)
    some = reason(Code.SERVED_MEANWHILE, documents=9, customers=7)

    assert tell(explanation(both))[2] == "By customer: acme (3), beta (1)."
    assert tell(explanation(some))[2] == "By customer: acme (3), beta (1) and others."


def test_a_start_that_nobody_can_tell_is_not_put_into_less_than_a_second() -> None:
    (_, soon), (_, later) = (
        tell(explanation(reason(Code.STARTS_AFTER, earliest_us=us))) for us in (0, 2 * SECOND_US)
    )

    assert soon.startswith("When it will start cannot be said")
    assert later.startswith("It will probably not start within 2 seconds.")


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        (State.DELAYED, Code.NOT_DUE, "does not wait for its turn yet"),
        (State.DELAYED, Code.RETRIED_LATER, "does not wait for its turn yet"),
        (State.DELAYED, Code.NEXT, "is waiting"),
        (State.RUNNING, Code.RUNNING, "is running"),
        (State.RUNNING, Code.LEASE_EXPIRED, "is waiting"),
        (State.DELAYED, Code.SNOOZED, "does not wait for its turn yet"),
        (State.DELAYED, Code.RETURNED, "does not wait for its turn yet"),
        (State.DELAYED, Code.EXPIRY_PASSED, "expired before"),
        (State.WAITING, Code.EXPIRY_PASSED, "expired before"),
    ],
)
def test_the_first_sentence_says_how_the_next_claim_will_find_it(
    state: State, code: Code, expected: str
) -> None:
    assert expected in tell(explanation(reason(code), state=state))[0]


# ── Which language ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({}, "en"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "de_AT.UTF-8"}, "de"),
        ({"LANG": "pt_BR"}, "pt"),
        ({"LANG": "es_ES@euro"}, "es"),
        ({"LANG": "fr_FR.UTF-8"}, "en"),
        ({"LANG": "de_DE.UTF-8", "LC_MESSAGES": "pl_PL.UTF-8"}, "pl"),
        ({"LANG": "de_DE.UTF-8", "LC_MESSAGES": "pl_PL.UTF-8", "LC_ALL": "es_ES.UTF-8"}, "es"),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": ""}, "de"),
        ({"LANG": "fr_FR.UTF-8", "LANGUAGE": "fr:pt:de"}, "pt"),
        ({"LANG": "de_DE.UTF-8", "LANGUAGE": "en"}, "en"),
        ({"LANG": "C", "LANGUAGE": "de"}, "en"),
        ({"LANGUAGE": "de"}, "en"),
    ],
)
def test_the_environment_says_which_language(environ: dict[str, str], language: str) -> None:
    assert preferred(environ) == language


@pytest.mark.parametrize("language", ["fr", "", "../de", "DE"])
def test_a_language_that_is_not_there_is_refused_by_name(language: str) -> None:
    with pytest.raises(ValueError, match="it must be one of: en, de, es, pl, pt"):
        load(language)
