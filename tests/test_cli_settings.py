"""Settings: their sources, their precedence, and the output of `fairturn config`."""

import os
from inspect import signature
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairturn import Backoff, Queue, Settings, Worker
from fairturn.cli.settings import (
    DEFAULT,
    SERVICE,
    SYNCHRONOUS,
    WORKER,
    InvalidSetting,
    SettingsFile,
    SettingValue,
    known_settings,
    names_of,
    read_file,
    resolve,
    variable_of,
)
from fairturn.cli.target import IN_MEMORY
from fairturn.config import IN_MEMORY as QUEUE_IN_MEMORY
from fairturn.model import SETTING_NAMES
from fairturn.service.options import ServiceLimits
from fairturn.service.server import ListenAddress
from fairturn.stores.sqlite.connection import SYNCHRONOUS as DATABASE_SYNCHRONOUS
from tests.commands import error_of, fairturn, lines_of
from tests.servers import postgres
from tests.servers.queues import Databases


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and an environment without settings."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("FAIRTURN_"):
            monkeypatch.delenv(name)


def file_with(**values: Any) -> SettingsFile:
    return SettingsFile(Path("fairturn.toml"), values)


# ── Who says so ──────────────────────────────────────────────────────────────────────────────────


def test_a_flag_goes_before_the_environment_the_file_and_the_default() -> None:
    file = file_with(synchronous="normal")
    environ = {"FAIRTURN_SYNCHRONOUS": "NORMAL"}

    def found(
        flags: dict[str, Any], environ: dict[str, str], file: SettingsFile | None
    ) -> SettingValue:
        return resolve(flags, environ, file)["synchronous"]

    assert found({"synchronous": "FULL"}, environ, file) == ("FULL", "--synchronous")
    assert found({"synchronous": None}, environ, file) == ("NORMAL", "FAIRTURN_SYNCHRONOUS")
    assert found({}, {}, file) == ("NORMAL", "fairturn.toml")
    assert found({}, {}, None) == ("FULL", DEFAULT)


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert resolve({}, {"FAIRTURN_DATABASE": ""}, None)["database"].value == "documents.db"


def test_the_defaults_are_those_of_the_queue_itself() -> None:
    found = resolve({}, {}, None)

    assert {name: found[name].value for name in SETTING_NAMES} == {
        name: getattr(Settings(), name) for name in SETTING_NAMES
    }
    assert SYNCHRONOUS == DATABASE_SYNCHRONOUS
    assert IN_MEMORY == QUEUE_IN_MEMORY


def test_the_defaults_are_those_of_the_worker_itself() -> None:
    of_the_worker = signature(Worker).parameters

    found = resolve({}, {}, None)

    retry = ("retry_first_s", "retry_factor", "retry_most_s")
    assert Backoff(*(found[name].value for name in retry)) == Backoff()
    for name in set(names_of(WORKER)) - {"handler", "kind", *retry}:
        parameter = f"{name}_bytes" if name in ("memory_limit", "file_limit") else name
        assert found[name].value == of_the_worker[parameter].default
    assert (found["kind"].value, of_the_worker["kinds"].default) == ((), None)  # every kind
    assert found["concurrency"].value == 4


def test_the_defaults_are_those_of_the_service_itself() -> None:
    found = resolve({}, {}, None)
    address, plan = ListenAddress(), ServiceLimits()

    assert {name: found[name].value for name in names_of(SERVICE)} == {
        "host": address.host,
        "port": address.port,
        "certificate": address.certificate,
        "private_key": address.private_key,
        "trusted_proxy": address.trusted_proxies,
        "size_limit": plan.size_bytes_max,
        "rate": plan.rate,
        "positions": plan.show_positions,
        "customers_in_metrics": plan.customers_in_metrics,
    }


def test_a_database_named_in_a_file_lies_beside_that_file() -> None:
    file = SettingsFile(Path("elsewhere/fairturn.toml"), {"database": "queue.db"})
    absolute = SettingsFile(Path("elsewhere/fairturn.toml"), {"database": "/var/queue.db"})

    assert resolve({}, {}, file)["database"].value == "elsewhere/queue.db"
    assert resolve({}, {}, absolute)["database"].value == "/var/queue.db"
    assert resolve({}, {"FAIRTURN_DATABASE": "queue.db"}, file)["database"].value == "queue.db"


@pytest.mark.parametrize(
    ("name", "text", "toml", "value"),
    [
        ("allow_network", "true", True, True),
        ("allow_network", "no", False, False),
        ("contents_shared", "true", True, True),
        ("handler", "invoices:process", "invoices:process", "invoices:process"),
        ("concurrency", "4", 4, 4),
        ("threads", "1", True, True),
        ("time_limit_s", "2.5", 2.5, 2.5),
        ("memory_limit", "512MiB", "512MiB", 512 * 1_048_576),
        ("memory_limit", "2g", "2 GiB", 2 * 1_073_741_824),
        ("memory_limit", "1000", 1000, 1_000),
        ("memory_limit", "none", "None", None),
        ("process_limit", "200", 200, 200),
        ("process_limit", "none", "none", None),
        ("file_limit", "1GiB", "1 GiB", 1_073_741_824),
        ("file_limit", "none", "none", None),
        ("pass_env", "HF_HOME, HF_*", ["HF_HOME", "HF_*"], ("HF_HOME", "HF_*")),
        ("namespace", "false", False, False),
        ("recycle_after", "1", 1, 1),
        ("lease_s", "30", 30, 30.0),
        ("retry_first_s", "0", 0, 0.0),
        ("retry_factor", "1.5", 1.5, 1.5),
        ("retry_most_s", "60", 60, 60.0),
        ("mode", "levels", "levels", "levels"),
        ("patience_s", "60", 60, 60.0),
        ("bounds", "-1,-2, -3", [-1, -2, -3], (-1, -2, -3)),
        ("attempts_max", "3", 3, 3),
    ],
)
def test_the_environment_and_the_file_mean_the_same_value(
    name: str, text: str, toml: Any, value: Any
) -> None:
    table = known_settings()[name].table
    file = file_with(**({table: {name: toml}} if table else {name: toml}))

    of_environment = resolve({}, {variable_of(name): text}, None)[name].value
    of_file = resolve({}, {}, file)[name].value

    assert of_environment == of_file == value
    assert type(of_environment) is type(of_file) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("synchronous", "OFF", "FULL or NORMAL"),
        ("allow_network", "perhaps", "true or false"),
        ("allow_network", 1, "true or false"),
        ("contents_shared", "group", "true or false"),
        ("handler", "process", "module:function"),
        ("handler", ":process", "module:function"),
        ("concurrency", "many", "a whole number"),
        ("concurrency", 0, "a positive whole number"),
        ("concurrency", 1.5, "a whole number"),
        ("concurrency", True, "a whole number"),
        ("time_limit_s", "soon", "a number"),
        ("time_limit_s", "-1", "a positive number of seconds"),
        ("time_limit_s", "nan", "a positive number of seconds"),
        ("lease_s", "inf", "a positive number of seconds"),
        ("memory_limit", "512MB", "such as 512MiB"),
        ("memory_limit", "0", "at least 1 byte"),
        ("memory_limit", True, "such as 512MiB"),
        ("process_limit", "0", "a positive whole number, or none"),
        ("file_limit", "many", "such as 512MiB or 2GiB, or none"),
        ("pass_env", "A=1", "names of environment variables"),
        ("pass_env", "*", "names of environment variables"),
        ("pass_env", 3, "names of environment variables"),
        ("bounds", "a,b", "whole numbers"),
        ("bounds", 7, "whole numbers"),
        ("attempts_max", [], "a whole number"),
        ("mode", "", "a non-empty string"),
    ],
)
def test_a_value_that_cannot_be_says_who_said_it_and_what_it_must_be(
    name: str, value: Any, what: str
) -> None:
    table = known_settings()[name].table
    file = file_with(**({table: {name: value}} if table else {name: value}))

    with pytest.raises(InvalidSetting, match=what) as of_file:
        resolve({}, {}, file)
    assert str(of_file.value).startswith(f"{name} in fairturn.toml is {value!r}; it must be ")
    if value:
        with pytest.raises(InvalidSetting) as of_environment:
            resolve({}, {variable_of(name): f"{value} or so"}, None)
        assert str(of_environment.value).startswith(f"{variable_of(name)} is ")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"databse": "x"},
            "fairturn.toml: 'databse' is not a setting; the settings are: database, ",
        ),
        ({"worker": {"conc": 1}}, "fairturn.toml: 'conc' is not a setting"),
        ({"mode": "fair"}, "fairturn.toml: 'mode' belongs in [queue]"),
        ({"queue": {"handler": "a:b"}}, "fairturn.toml: 'handler' belongs in [worker]"),
        ({"queue": {"database": "x"}}, "fairturn.toml: 'database' belongs above all tables"),
        ({"worker": 4}, "fairturn.toml: worker must be a table, [worker]"),
    ],
)
def test_a_key_of_the_file_that_is_no_setting_is_named(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSetting) as refused:
        resolve({}, {}, file_with(**values))

    assert str(refused.value).startswith(sentence)


# ── The file ─────────────────────────────────────────────────────────────────────────────────────


def test_the_file_is_that_of_the_folder_or_the_one_that_is_named(tmp_path: Path) -> None:
    Path("fairturn.toml").write_text('database = "here.db"\n')
    Path("inner").mkdir()
    named = tmp_path / "other.toml"
    named.write_text('database = "there.db"\n')

    here = read_file({}, tmp_path)
    other = read_file({"FAIRTURN_CONFIG": str(named)}, tmp_path)

    assert here == (Path("fairturn.toml"), {"database": "here.db"})
    assert other == (named, {"database": "there.db"})
    assert read_file({}, tmp_path / "inner") is None, "no other folder is searched"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"database = \n", "fairturn.toml is not TOML: "),
        (b"name = '\xff'\n", "fairturn.toml is not TOML: "),
        (b"#" * 1_048_577, "fairturn.toml has more than 1,048,576 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_ends_every_command_with_2(
    content: bytes, sentence: str
) -> None:
    Path("fairturn.toml").write_bytes(content)

    for command in (["list"], ["config"], ["submit", "acme", "--payload", "1"]):
        assert sentence in error_of(fairturn(*command), 2)
    assert not Path("documents.db").exists()


def test_a_file_that_was_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRTURN_CONFIG", "absent.toml")

    assert "names absent.toml, which does not exist" in error_of(fairturn("config"), 2)


# ── fairturn config ──────────────────────────────────────────────────────────────────────────────


def origins() -> dict[str, tuple[Any, str]]:
    lines = lines_of(fairturn("config", "--json"))
    return {line["name"]: (line["value"], line["origin"]) for line in lines}


def test_config_says_where_each_setting_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fairturn.toml").write_text(
        'synchronous = "NORMAL"\n[worker]\nconcurrency = 4\n[queue]\nmode = "levels"\n'
    )
    monkeypatch.setenv("FAIRTURN_PATIENCE_S", "60")

    before = origins()
    printed = fairturn("config", "--database", "other.db").stdout

    assert before["database"] == ("documents.db", "default")
    assert before["synchronous"] == ("NORMAL", "fairturn.toml")
    assert before["concurrency"] == (4, "fairturn.toml")
    assert before["mode"] == ("levels", "fairturn.toml")
    assert before["patience_s"] == (60.0, "FAIRTURN_PATIENCE_S")
    assert set(before) == set(known_settings())
    assert ["database", "other.db", "--database"] in [x.split() for x in printed.splitlines()]
    assert not Path("other.db").exists()


def test_a_new_queue_is_made_with_the_settings_given(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fairturn.toml").write_text('[queue]\nmode = "levels"\nbounds = "-1,-2,-3,-4,-5,-6,-7,-8"')
    monkeypatch.setenv("FAIRTURN_ATTEMPTS_MAX", "2")

    assert fairturn("submit", "acme", "--payload", "1").exit_code == 0

    with Queue("documents.db") as queue:
        assert queue.settings == Settings(
            mode="levels",  # type: ignore[arg-type]
            attempts_max=2,
            bounds=tuple(range(-1, -9, -1)),
        )


def test_the_settings_in_force_are_those_of_the_queue() -> None:
    Queue("documents.db", mode="equal").close()
    Path("fairturn.toml").write_text('[queue]\nmode = "levels"\n')

    shown = origins()
    printed = fairturn("config").stdout
    refused = error_of(fairturn("submit", "acme", "--payload", "1"), 1)

    assert shown["mode"] == ("equal", "the queue documents.db")
    assert "to change this one: fairturn config set mode=levels" in printed
    assert "mode is equal, and levels in fairturn.toml" in refused
    assert refused.endswith("fairturn config set mode=levels")
    assert fairturn("list").exit_code == 0, "who only looks is not held up by it"


def test_config_set_changes_settings_for_every_process() -> None:
    with Queue("documents.db") as queue:
        assert queue.settings.patience_s == 120

        result = fairturn("config", "set", "mode=equal", "patience_s=60", "costs=equal")

        assert queue.settings.mode == "equal"
        assert queue.settings.patience_s == 60
    assert result.stdout.splitlines() == [
        "mode is equal now; it was fair.",
        "patience_s is 60 now; it was 120.",
        "costs is equal, as before.",
    ]


def test_config_set_tells_programs_what_changed() -> None:
    Queue("documents.db").close()

    (line,) = lines_of(fairturn("config", "set", "bounds=-1,-2,-3,-4,-5,-6,-7,-8", "--json"))

    assert line == {
        "name": "bounds",
        "value": list(range(-1, -9, -1)),
        "before": [-2, -4, -6, -8, -10, -12, -14, -20],
    }


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("mode=random", "mode is 'random'; it must be one of: levels, fair, equal"),
        ("mode", "'mode' is not NAME=VALUE"),
        ("patience_s=soon", "patience_s is 'soon'; it must be a number"),
        ("patience_s=-1", "patience_s is -1.0; it must be between 0"),
        ("attempts_max=0", "attempts_max is 0; it must be between 1 and 2,147,483,647"),
        ("bounds=-2,-4", "bounds"),
        ("database=x", "'database' is not a setting of the queue"),
    ],
)
def test_config_set_refuses_in_the_words_of_the_queue(assignment: str, sentence: str) -> None:
    Queue("documents.db").close()

    refused = error_of(fairturn("config", "set", "costs=known", assignment), 2)

    assert sentence in refused
    with Queue("documents.db") as queue:
        assert queue.settings == Settings()


def test_config_set_makes_no_queue() -> None:
    assert "there is no queue documents.db" in error_of(fairturn("config", "set", "mode=fair"), 3)
    assert not Path("documents.db").exists()


def test_an_option_before_the_subcommand_is_not_lost_without_a_word() -> None:
    Queue("documents.db").close()
    Queue("other.db").close()

    for command in (["config", "set", "mode=equal"], ["customers", "pause", "acme"]):
        refused = fairturn(command[0], "-d", "other.db", *command[1:])
        assert "options come last" in error_of(refused, 2)


# ── Which queue ──────────────────────────────────────────────────────────────────────────────────

LOOKING = [
    ["list"],
    ["show", "0" * 15],
    ["wait", "0" * 15],
    ["cancel", "0" * 15],
    ["retry", "--dead", "--yes"],
    ["customers"],
    ["customers", "set", "acme", "--weight", "2"],
    ["customers", "pause", "acme"],
    ["purge", "acme", "--yes"],
    ["doctor"],
    ["backup", "copy.db"],
    ["restored"],
]


@pytest.mark.parametrize("arguments", LOOKING, ids=" ".join)
def test_a_queue_that_is_not_there_ends_with_3_and_is_not_made(
    arguments: list[str], tmp_path: Path
) -> None:
    absent = error_of(fairturn(*arguments), 3)
    Path("empty.db").touch()
    empty = error_of(fairturn(*arguments, "-d", "empty.db"), 3)

    assert absent.startswith("there is no queue documents.db (the setting database, from its def")
    assert "FAIRTURN_DATABASE" in absent
    assert "empty.db is empty" in empty
    assert "from --database" in empty
    assert [path.name for path in tmp_path.iterdir()] == ["empty.db"]


# `doctor` also examines a server without a queue.
@pytest.mark.parametrize("arguments", [a for a in LOOKING if a != ["doctor"]], ids=" ".join)
def test_a_queue_that_is_not_there_in_postgresql_ends_with_3_and_is_not_made(
    arguments: list[str],
) -> None:
    with Databases() as databases:
        url, absent = databases.new(empty=True), postgres.of_this_run().url("absent")
        no_queue = error_of(fairturn(*arguments, "-d", url), 3)
        shown = fairturn("config", "-d", url)
        no_database = error_of(fairturn(*arguments, "-d", absent), 3)
        with psycopg.connect(url) as connection:
            (made,) = connection.execute("SELECT to_regnamespace('fairturn')").fetchall()

    assert "has no queue in its schema fairturn; create it with: fairturn migrate" in no_queue
    assert shown.exit_code == 0
    assert "does not exist; create it with createdb" in no_database
    assert made == (None,)


@pytest.mark.parametrize("arguments", [*LOOKING, ["submit", "a", "--payload", "1"]], ids=" ".join)
def test_a_queue_in_memory_is_refused(arguments: list[str]) -> None:
    assert "ends with its process" in error_of(fairturn(*arguments, "-d", ":memory:"), 2)


def test_a_file_of_another_program_is_left_alone() -> None:
    Path("letter.db").write_text("Dear Sir or Madam")

    refused = fairturn("submit", "acme", "--payload", "1", "-d", "letter.db")

    assert "is not a database" in error_of(refused, 1)
    assert Path("letter.db").read_text() == "Dear Sir or Madam"
