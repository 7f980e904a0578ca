"""`fairturn doctor`: is all well with the queue, its file and its machine?"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import FAILED, Ending, wrong_use
from fairturn.cli.options import json_option, setting_options
from fairturn.cli.recount import Finding, recount_findings
from fairturn.cli.settings import FILE_VARIABLE, Found, known_settings, variable_of
from fairturn.cli.target import refuse_absent, settings_here
from fairturn.cli.terminal import duration, moment, number, print_line, printable, progress, size
from fairturn.clock import SECOND_US, Clock, SystemClock, stopwatch, to_datetime
from fairturn.errors import FairturnError

if TYPE_CHECKING:
    from fairturn.contents.local import Contents
    from fairturn.model import ContentRef
    from fairturn.stores.inspection import Findings
    from fairturn.stores.postgres.inspection import Examiner as ServerExaminer
    from fairturn.stores.sqlite.inspection import Examiner

FREE_BYTES_FEW = 512 * 1_048_576
LOG_BYTES_MANY = 256 * 1_048_576
WAITING_LONG_US = 60 * SECOND_US  # without anything running: nobody works
LEASE_LATE_US = 10 * SECOND_US  # a worker that lives takes a lease back well before
CLOCK_STEP_US = 300 * SECOND_US
OLD_TRANSACTION_US = 60 * SECOND_US
LOCK_LONG_S = 1.0  # a transaction takes milliseconds
YEAR_MIN = 2025  # a clock that is behind this is not set
_OWN_VARIABLES = {FILE_VARIABLE, "FAIRTURN_CRASH_AT", "FAIRTURN_FREEZE_AT"}
_MARKS = {"ok": "ok     ", "warning": "WARNING", "wrong": "WRONG  ", "repaired": "FIXED  "}


def ok(check: str, finding: str) -> Finding:
    return Finding(check, "ok", finding)


def warning(check: str, finding: str) -> Finding:
    return Finding(check, "warning", finding)


def wrong(check: str, finding: str) -> Finding:
    return Finding(check, "wrong", finding)


@click.command("doctor")
@click.option(
    "--thorough",
    is_flag=True,
    help="Recount everything, read every content and check its SHA-256.",
)
@click.option("--repair", is_flag=True, help="With --thorough: repair what does not agree.")
@json_option
@setting_options("database", "allow_network", "contents")
def command(*, thorough: bool, repair: bool, as_json: bool, flags: Mapping[str, Any]) -> None:
    """Check that all is well.

    The engine, the file system, the file, the settings, the disk, the contents, the leases and the
    clock: a line each. With --thorough, counters, flows and leases are compared with the documents.
    Ends with 1 if something is wrong; a warning is not wrong. Nothing is changed without --repair,
    and the queue can be in use.

    \b
    fairturn doctor
    fairturn doctor --thorough --json
    fairturn doctor --thorough --repair
    """
    if repair and not thorough:
        wrong_use("--repair needs --thorough, which finds what to repair")
    settings = settings_here(flags)
    place = refuse_absent(settings)
    problems = 0
    options = {"thorough": thorough, "repair": repair}
    findings = (
        _findings_at(place, settings["contents"].value, SystemClock(), **options)
        if isinstance(place, str)
        else _findings(settings, place, SystemClock(), **options)
    )
    for finding in findings:
        problems += finding.state == "wrong"
        if as_json:
            print_line(finding.as_json())
        else:
            mark = _MARKS[finding.state]
            click.echo(f"{mark}  {finding.check:11}  {printable(finding.finding)}")
    if problems:
        raise Ending(f"{number(problems, 'check')} found something wrong", FAILED)


def _findings(
    settings: Mapping[str, Found], path: Path, clock: Clock, *, thorough: bool, repair: bool
) -> Iterator[Finding]:
    from fairturn.config import contents_beside
    from fairturn.contents.local import Folder
    from fairturn.stores.sqlite.inspection import examined
    from fairturn.stores.sqlite.repair import repair as repair_file

    yield _engine()
    yield _environment()
    yield _file_system(path, allowed=settings["allow_network"].value)
    yield _disk(path)
    try:
        with examined(path) as examiner:
            known = _schema(examiner)
            yield known
            with progress("Checking the file"):
                damage = examiner.damage()
            yield (
                wrong("file", f"{path} is damaged: {damage[0]}; restore it from a backup")
                if (damage)
                else ok("file", f"{path} is whole ({size(path.stat().st_size)})")
            )
            yield _log(examiner)
            yield _lock(path.absolute())
            if known.state == "ok" and not examiner.has_queue():
                yield warning("queue", "it is being made, or the process that made it was killed")
            elif known.state == "ok":
                found = examiner.find(clock.uptime())
                yield _epoch(*examiner.epoch())
                yield _settings(found)
                yield _waiting(found, clock.now())
                yield _leases(found)
                yield _repairs(found)
                yield _clock(found, clock.now())
                if thorough:
                    yield from recount_findings(
                        partial(examined, path),
                        partial(repair_file, path.absolute(), now=clock.now()) if repair else None,
                    )
                beside = contents_beside(path)
                yield from _contents(
                    examiner.contents, Folder(beside), str(beside), clock, thorough=thorough
                )
    except FairturnError as error:
        yield wrong("file", str(error))


def _findings_at(
    url: str, place: str | None, clock: Clock, *, thorough: bool, repair: bool
) -> Iterator[Finding]:
    """What can be said of a queue in PostgreSQL, and of its contents at their place."""
    from fairturn.config import open_contents
    from fairturn.contents.s3 import is_bucket
    from fairturn.stores.postgres.audit import repair as repair_server
    from fairturn.stores.postgres.inspection import examined

    def refs() -> list["ContentRef"]:
        with examined(url) as examiner:
            return examiner.contents()

    yield _environment()
    try:
        with examined(url) as examiner:
            yield ok("versions", f"fairturn {version('fairturn')}, {examiner.server()}")
            known = _schema(examiner, "by fairturn migrate, or")
            if known.state == "warning" and not examiner.may_make():
                known = wrong("schema", f"{known.finding}, but not by this role")
            yield known
            yield _oldest_transaction(
                examiner.oldest_transaction_us(), hidden=not examiner.sees_others()
            )
            if known.state != "ok":
                return
            looked = examiner.find()
            if looked is None:
                yield ok("queue", "new: nobody has opened it yet")
                return
            found, now = looked
            yield _settings(found)
            yield _waiting(found, now)
            yield _leases(found)
            yield _repairs(found)
            unseen = examiner.contents_known() if place is None else 0
        # Not within that transaction: each recount has a snapshot of its own.
        if thorough:
            yield from recount_findings(
                partial(examined, url), partial(repair_server, url) if repair else None
            )
    except FairturnError as error:
        yield wrong("server", str(error))
        return
    if place is None:
        if unseen:
            said = f"{number(unseen, 'content')} not looked for"
            yield warning("contents", f"{said}; say with --contents where they lie")
        return
    # Not within that transaction: to read all contents can take hours.
    try:
        if not is_bucket(place) and not Path(place).is_dir():
            yield wrong("contents", f"there is no folder {place}; is --contents right?")
        else:
            yield from _contents(refs, open_contents(place), place, clock, thorough=thorough)
    except FairturnError as error:
        yield wrong("contents", str(error))


def _oldest_transaction(age_us: int | None, *, hidden: bool) -> Finding:
    more = "; those of other roles are seen only with GRANT pg_monitor" if hidden else ""
    if age_us is None:
        return ok("server", f"no transaction is open{more}")
    said = f"a transaction is open for {duration(age_us)}"
    if age_us < OLD_TRANSACTION_US:
        return ok("server", f"{said}{more}")
    return warning(
        "server",
        f"{said}, and keeps the server from removing what is dead, so that all becomes slower; "
        "pg_stat_activity tells whose it is",
    )


# ── The machine ──────────────────────────────────────────────────────────────────────────────────


def _engine() -> Finding:
    import apsw

    from fairturn.stores.sqlite.connection import refuse_engine

    sqlite = apsw.sqlite_lib_version()
    said = f"fairturn {version('fairturn')}, Python {platform.python_version()}, SQLite {sqlite}"
    try:
        refuse_engine(sqlite)
    except FairturnError as error:
        return wrong("versions", f"{said}: {error}")
    return ok("versions", said)


def _environment() -> Finding:
    """A variable with a slip in its name would be ignored without a word."""
    known = {variable_of(name) for name in known_settings()} | _OWN_VARIABLES
    strange = sorted(
        name for name in os.environ if name.startswith("FAIRTURN_") and name not in known
    )
    if strange:
        return warning("environment", f"{', '.join(strange)}: no setting of fairturn, and ignored")
    return ok("environment", "every FAIRTURN_ variable is a setting")


def _file_system(path: Path, *, allowed: bool) -> Finding:
    from fairturn.stores.sqlite.connection import network_below

    kind = network_below(path.absolute())
    if kind is None:
        return ok("file system", "not one of a network")
    said = f"{path} lies on {kind}, where locks of SQLite are not reliable"
    if allowed:
        return warning("file system", f"{said}; allow_network takes the risk")
    return wrong("file system", f"{said}; use a local disk")


def _disk(path: Path) -> Finding:
    from fairturn.stores.sqlite.connection import RESERVE_BYTES

    stat = os.statvfs(path.absolute().parent)
    free = stat.f_bavail * stat.f_frsize
    said = f"{size(free)} free"
    if free < RESERVE_BYTES:
        return wrong("disk", f"{said}; below {size(RESERVE_BYTES)} no documents are accepted")
    if free < FREE_BYTES_FEW:
        return warning("disk", f"{said}; below {size(RESERVE_BYTES)} no documents are accepted")
    return ok("disk", said)


# ── The file ─────────────────────────────────────────────────────────────────────────────────────


def _schema(examiner: "Examiner | ServerExaminer", how: str = "") -> Finding:
    version_, newest = examiner.schema()
    if version_ == 0:
        made = f"it is made {how}".rstrip()
        return warning("schema", f"there is none; {made} when the queue is next opened")
    if version_ > newest:
        return wrong(
            "schema",
            f"version {version_}, and this fairturn knows versions up to {newest}; "
            "install the newer fairturn that made it",
        )
    if version_ < newest:
        becomes = f"it becomes {newest} {how}".rstrip()
        return warning("schema", f"version {version_}; {becomes} when the queue is next opened")
    return ok("schema", f"version {version_}, the newest")


def _log(examiner: "Examiner") -> Finding:
    log_bytes = examiner.log_bytes()
    said = f"the write-ahead log has {size(log_bytes)}"
    if log_bytes > LOG_BYTES_MANY:
        return warning("log", f"{said}; a process that reads for long keeps it from being emptied")
    return ok("log", said)


def _lock(path: Path) -> Finding:
    """Which process holds the write lock, and whether it holds it for long."""
    from fairturn.stores.sqlite.locks import are_listed, holder_of

    if not are_listed():
        return ok("lock", "this platform does not report which process holds the write lock")
    holder = first = holder_of(path)
    until_s = stopwatch() + LOCK_LONG_S
    while holder is not None and holder == first and not holder.is_stopped:
        if stopwatch() >= until_s:
            return warning("lock", f"{holder} has held the write lock for {LOCK_LONG_S:g} s")
        time.sleep(LOCK_LONG_S / 50)
        holder = holder_of(path)
    if holder is None or not holder.is_stopped:
        return ok("lock", "no process holds the write lock for long")
    return wrong(
        "lock",
        f"{holder} holds the write lock, and no process can write until it goes on "
        f"(kill -CONT {holder.pid}) or is ended",
    )


def _epoch(epoch: int, is_copy: bool) -> Finding:
    if is_copy:
        return ok("epoch", f"{epoch}; a copy by fairturn backup, whose first write begins another")
    restored = "after restoring it from anything but a fairturn backup: fairturn restored"
    return ok("epoch", f"{epoch}; {restored}")


def _settings(found: "Findings") -> Finding:
    from fairturn.model import Settings

    try:
        mode = Settings.from_json(found.settings).mode
    except (FairturnError, ValueError, TypeError) as error:
        return wrong("settings", f"they cannot be read: {error}")
    return ok("settings", f"mode {mode}")


def _waiting(found: "Findings", now: int) -> Finding:
    if found.oldest_waiting_at is None:
        return ok("waiting", "no document waits")
    said = f"the oldest document waits since {moment(found.oldest_waiting_at)}"
    if not found.running and now - found.oldest_waiting_at >= WAITING_LONG_US:
        return warning("waiting", f"{said}, and none is running; is a worker running?")
    return ok("waiting", f"{said}, {duration(max(0, now - found.oldest_waiting_at))}")


def _leases(found: "Findings") -> Finding:
    said = f"{number(found.running, 'document')} running"
    since = found.run_out_since_us
    if found.run_out and since is None:
        return wrong(
            "leases",
            f"{said}, claimed before the machine was started; no worker is running: start one",
        )
    if found.run_out and since is not None and since > LEASE_LATE_US:
        return wrong(
            "leases",
            f"{said}, of which {found.run_out:,} lost their lease up to {duration(since)} ago and "
            "nobody has taken them over; no worker is running: start one",
        )
    return ok("leases", f"{said}, every lease is kept")


def _repairs(found: "Findings") -> Finding:
    if not found.repairs:
        return ok("repairs", "no claim has found a flow that did not agree with the documents")
    return warning(
        "repairs",
        f"claims have repaired {number(found.repairs, 'flow')} that did not agree with the "
        "documents; fairturn doctor --thorough recounts everything",
    )


def _clock(found: "Findings", now: int) -> Finding:
    if to_datetime(now).year < YEAR_MIN:
        return wrong("clock", f"it is {moment(now)} here; the clock of this machine is not set")
    if found.newest_at is not None and found.newest_at > now + CLOCK_STEP_US:
        return warning(
            "clock",
            f"it is {moment(now)} here, and the newest document is of {moment(found.newest_at)}: "
            "the clock went back; counts are reset later than they should be",
        )
    return ok("clock", moment(now))


# ── The contents ─────────────────────────────────────────────────────────────────────────────────


def _contents(
    find: Callable[[], list["ContentRef"]],
    contents: "Contents",
    where: str,
    clock: Clock,
    *,
    thorough: bool,
) -> Iterator[Finding]:
    from fairturn.clock import MOMENT_MAX
    from fairturn.contents.local import SWEEP_AGE_US

    refs = {ref.name: ref for ref in find()}
    present = set(contents.names(MOMENT_MAX))
    old = set(contents.names(clock.now() - SWEEP_AGE_US))
    missing = refs.keys() - present
    if missing:  # a document may have been deleted with its content while they were listed
        missing &= {ref.name for ref in find()}
    if missing:
        yield wrong(
            "contents",
            f"{number(len(missing), 'content')} of {len(refs):,} missing in {where}, "
            f"such as {min(missing)}; restore from a backup",
        )
    else:
        yield ok("contents", f"{_all(len(refs))} there")
    if thorough:
        yield _checksums(contents.open, [refs[name] for name in refs.keys() & present])
    stray = old - refs.keys()
    if stray:
        yield warning(
            "strays",
            f"{number(len(stray), 'content')} without a document, left by a crash; "
            "fairturn prune deletes them",
        )


def _checksums(read: Callable[[Any], Any], refs: list[Any]) -> Finding:
    damaged = []
    with progress("Reading contents", len(refs)) as advance:
        for n, ref in enumerate(refs):
            try:
                read(ref).close()
            except FairturnError as error:
                damaged.append(str(error))
            advance(n + 1)
    if damaged:
        return wrong("checksums", f"{number(len(damaged), 'content')} damaged: {damaged[0]}")
    return ok("checksums", f"{_all(len(refs))} as when it was stored")


def _all(contents: int) -> str:
    return "the only content is" if contents == 1 else f"each of {contents:,} contents is"
