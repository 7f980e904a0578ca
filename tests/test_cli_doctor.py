"""`fairturn doctor` finds problems and changes nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import psycopg
import pytest

from fairturn import Queue, Released
from fairturn.cli import doctor
from fairturn.clock import ManualClock, SystemClock
from fairturn.contents.local import Folder
from tests.commands import claim, fairturn, lines_of
from tests.servers.queues import Databases


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FAIRTURN_")]:
        monkeypatch.delenv(name)  # variables of the tests are not settings
    with Queue("documents.db") as opened:
        yield opened


def examined(*options: str, code: int = 0) -> dict[str, tuple[str, str]]:
    """Return each check with its state and its sentence."""
    result = fairturn("doctor", "--json", *options)
    assert result.exit_code == code, result.output
    result.exit_code = 0
    return {line["check"]: (line["state"], line["finding"]) for line in lines_of(result)}


def execute(statement: str) -> None:
    connection = apsw.Connection("documents.db")
    connection.execute(statement).fetchall()
    connection.close()


def contents() -> list[Path]:
    return sorted(Path("documents.db.contents").rglob("??/*"))


def test_a_healthy_queue_has_a_line_for_each_check_and_ends_with_0(queue: Queue) -> None:
    queue.submit("acme", content=b"x" * 100_000)
    claim(queue)

    found = examined("--thorough")
    printed = fairturn("doctor").stdout
    python, _ = found.pop("python")  # of the machine, and not of the queue

    assert python in ("ok", "warning")
    assert {state for state, _ in found.values()} == {"ok"}
    assert list(found) == [
        "versions",
        "environment",
        "file system",
        "disk",
        "schema",
        "file",
        "log",
        "lock",
        "epoch",
        "settings",
        "waiting",
        "leases",
        "repairs",
        "clock",
        "recount",
        "contents",
        "checksums",
    ]
    assert all(line.startswith("ok ") for line in printed.splitlines() if "python" not in line)
    assert found["contents"][1] == "the only stored file is present"
    assert found["checksums"][1] == "the only stored file is undamaged"


@pytest.mark.parametrize(
    "running, state",
    [
        ((3, 11, 9), "warning"),
        ((3, 11, 10), "ok"),
        ((3, 12, 5), "warning"),
        ((3, 12, 6), "ok"),
        ((3, 13, 0), "ok"),
    ],
)
def test_a_python_that_parses_cookies_in_quadratic_time_is_a_warning(
    running: tuple[int, int, int], state: str
) -> None:
    result = doctor.python_finding(running)

    assert result.state == state
    assert ("CVE-2024-7592" in result.finding) is (state == "warning")


def test_looking_changes_nothing_and_makes_nothing(queue: Queue, tmp_path: Path) -> None:
    queue.submit("acme")
    queue.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert fairturn("doctor").exit_code == 0

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_content_is_wrong_and_a_stray_one_a_warning(queue: Queue) -> None:
    for _ in range(3):
        queue.submit("acme", content=os.urandom(100_000))
    stray = queue.contents.put([b"stray"])
    young = queue.contents.put([b"of a submission under way"])
    os.utime(next(path for path in contents() if path.name == stray.name), (0, 0))
    contents_of_documents = [
        path for path in contents() if path.name not in (stray.name, young.name)
    ]
    contents_of_documents[0].unlink()

    found = examined(code=1)

    assert found["contents"][0] == "wrong"
    assert found["contents"][1].startswith("1 stored file of 3 missing in ")
    assert contents_of_documents[0].name in found["contents"][1]
    assert found["strays"][0] == "warning"
    assert found["strays"][1].startswith("1 stored file without a document")


def test_a_changed_content_is_found_when_every_one_is_read(queue: Queue) -> None:
    queue.submit("acme", content=b"x" * 100_000)
    contents()[0].write_bytes(b"y" * 100_000)

    assert examined()["contents"][0] == "ok"
    assert examined("--thorough", code=1)["checksums"][0] == "wrong"


def test_a_damaged_file_is_found(queue: Queue) -> None:
    for _ in range(300):
        queue.submit("acme", payload="x" * 1_000)
    queue.close()
    size = Path("documents.db").stat().st_size
    with Path("documents.db").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 20_000)

    found = examined(code=1)

    assert found["file"][0] == "wrong"
    assert "damaged" in found["file"][1] or "malformed" in found["file"][1]


def test_a_schema_of_the_future_is_wrong_and_left_alone(queue: Queue) -> None:
    queue.close()
    execute("PRAGMA user_version = 9999")

    state, sentence = examined(code=1)["schema"]

    assert state == "wrong"
    assert "version 9999" in sentence
    assert "newer than this release" in sentence


def test_an_older_schema_is_a_warning_and_not_migrated_by_looking(queue: Queue) -> None:
    queue.close()
    execute("PRAGMA user_version = 0")

    assert examined()["schema"][0] == "warning"
    assert apsw.Connection("documents.db").pragma("user_version") == 0


def test_settings_that_cannot_be_read_are_wrong(queue: Queue) -> None:
    execute("UPDATE queue SET settings = json_set(settings, '$.mode', 'random')")
    assert "random" in examined(code=1)["settings"][1]

    execute("UPDATE queue SET settings = json_set(settings, '$.novelty', 1)")
    assert "novelty" in examined(code=1)["settings"][1]


def test_documents_that_nobody_works_on_are_told(queue: Queue) -> None:
    queue.submit("acme")

    assert examined()["waiting"][0] == "ok"  # a worker may be about to claim it

    execute("UPDATE documents SET submitted_at = submitted_at - 60000000")
    state, sentence = examined()["waiting"]

    assert state == "warning"
    assert "is a worker running?" in sentence


def test_a_lease_that_expired_and_that_nobody_took_back_is_wrong(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LEASE_LATE_US", 0)
    queue.submit("acme")
    queue.store.claim(1, worker="w", lease_us=1)

    state, sentence = examined(code=1)["leases"]

    assert state == "wrong"
    assert sentence.startswith("1 document running, 1 of them with a lease that expired up to")


def test_a_lease_of_before_the_machine_was_started_is_wrong(queue: Queue) -> None:
    queue.submit("acme")
    claim(queue)
    execute("UPDATE queue SET boot = 'another'")

    assert "before the machine was booted" in examined(code=1)["leases"][1]


def test_of_documents_claimed_together_only_those_that_were_not_renewed_lost_their_lease(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LEASE_LATE_US", 0)
    for _ in range(3):
        queue.submit("acme")
    fences = [claimed.fence for claimed in queue.store.claim(3, worker="w", lease_us=1).claims]
    queue.store.renew(fences[:2], lease_us=60_000_000)

    sentence = examined(code=1)["leases"][1]
    assert "3 documents running, 1 of them with a lease that expired" in sentence
    queue.store.finish([Released(fences[2])])
    assert examined()["leases"][0] == "ok"


def test_a_clock_that_went_back_is_a_warning() -> None:
    clock = ManualClock(SystemClock().now())
    clock.advance(3_600)
    with Queue("documents.db", clock=clock) as ahead:
        ahead.submit("acme")

    assert examined()["clock"][0] == "warning"


def test_a_variable_with_a_slip_in_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRTURN_DATABSE", "x")

    assert examined()["environment"] == (
        "warning",
        "FAIRTURN_DATABSE: not a setting of fairturn, ignored",
    )


def test_a_full_disk_is_wrong_and_one_that_is_nearly_full_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fairturn.stores.sqlite.connection.RESERVE_BYTES", 1 << 62)
    assert examined(code=1)["disk"][0] == "wrong"

    monkeypatch.setattr("fairturn.stores.sqlite.connection.RESERVE_BYTES", 0)
    monkeypatch.setattr(doctor, "FREE_BYTES_FEW", 1 << 62)
    assert examined()["disk"][0] == "warning"


def test_a_network_file_system_is_wrong_unless_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fairturn.stores.sqlite.schema._NETWORK", _kinds_here())

    assert examined(code=1)["file system"][0] == "wrong"
    assert examined("--allow-network")["file system"][0] == "warning"


def _kinds_here() -> tuple[str, ...]:
    """Return every type of file system mounted here, as if all were network file systems."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return tuple(line.partition(" - ")[2].split()[0].split(".")[0] for line in mounts)


def test_a_long_log_is_a_warning(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOG_BYTES_MANY", 1_000)
    queue.submit("acme")

    assert examined()["log"][0] == "warning"


LOCKING = (
    "import apsw, sys; c = apsw.Connection('documents.db'); c.execute('BEGIN IMMEDIATE');"
    "print(flush=True); sys.stdin.read()"
)


def test_the_process_that_holds_the_write_lock_is_named(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LOCK_LONG_S", 0.05)
    queue.submit("acme")
    assert examined()["lock"][0] == "ok"
    with subprocess.Popen(
        [sys.executable, "-c", LOCKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        running = examined()["lock"]
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        stopped = examined(code=1)["lock"]
        holder.kill()

    assert running[0] == "warning"
    assert running[1].startswith(f"process {holder.pid} (")
    assert stopped[0] == "wrong"
    assert stopped[1].startswith(f"process {holder.pid} (")
    assert "which is stopped) holds the write lock" in stopped[1]
    assert examined()["lock"][0] == "ok"


def test_a_file_that_is_no_queue_is_wrong() -> None:
    Path("letter.db").write_text("Dear Sir or Madam")

    assert "is not a database" in examined("-d", "letter.db", code=1)["file"][1]


# ── On a server ──────────────────────────────────────────────────────────────────────────────────


def test_a_server_without_a_queue_is_told_from_one_whose_queue_nobody_has_opened(
    databases: Databases,
) -> None:
    url = databases.new(empty=True)

    state, said = examined("--database", url)["schema"]
    fairturn("migrate", "--database", url)
    made = examined("--database", url)

    assert state == "warning"
    assert said == (
        "there is none; it is created by fairturn migrate, or when the queue is next opened"
    )
    assert made["schema"][0] == "ok"
    assert made["queue"] == ("ok", "new: no process has opened it yet")


def test_contents_of_a_queue_on_a_server_are_looked_for_where_they_lie(
    url: str, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    with Queue(url, contents=Folder(place)) as queue:
        queue.submit("acme", content=b"x" * 100_000)
        queue.submit("acme", content=b"y" * 100_000)
    database = ("--database", url)

    assert examined(*database)["contents"] == (
        "warning",
        "2 stored files not checked; pass their folder or bucket with --contents",
    )
    whole = examined(*database, "--contents", str(place), "--thorough")
    damaged, missing = sorted(place.rglob("??/*"))
    damaged.write_bytes(b"z" * 100_000)
    missing.unlink()
    found = examined(*database, "--contents", str(place), "--thorough", code=1)
    mistaken = examined(*database, "--contents", str(tmp_path / "shard"), code=1)

    assert whole["contents"] == ("ok", "each of 2 stored files is present")
    assert whole["checksums"][0] == "ok"
    assert found["contents"][1].startswith(f"1 stored file of 2 missing in {place}, such as")
    assert found["checksums"][0] == "wrong"
    assert mistaken["contents"][1].endswith("shard; is --contents right?")


def test_a_role_that_may_less_than_the_owner_is_told_so(databases: Databases, url: str) -> None:
    role = f"looker_{os.getpid()}"
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN")
        granted = fairturn("migrate", "--database", url, "--grant", role)

        try:
            unmade = databases.new(empty=True).replace("postgres@", f"{role}@", 1)
            said = examined("--database", unmade, code=1)["schema"][1]
            hidden = examined("--database", url.replace("postgres@", f"{role}@", 1))["server"]
            seen = examined("--database", url)["server"]
        finally:
            owner.execute(f"DROP OWNED BY {role}")
            owner.execute(f"DROP ROLE {role}")

    assert said.endswith("when the queue is next opened, but not by this role")
    assert f"{role} may use the queue." in granted.output
    assert "those of other roles are visible only with GRANT pg_monitor" in hidden[1]
    assert "pg_monitor" not in seen[1]
