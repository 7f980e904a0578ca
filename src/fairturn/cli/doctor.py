"""`fairturn doctor`: checks of the queue, its file or server, and its machine."""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import FAILED, CommandExit, wrong_use
from fairturn.cli.options import Flags, json_option, setting_options
from fairturn.cli.recount import CheckResult, ok, recount_findings, warning, wrong
from fairturn.cli.settings import FILE_VARIABLE, SettingValue, known_settings, variable_of
from fairturn.cli.target import refuse_absent, settings_here
from fairturn.cli.terminal import duration, number, print_line, printable, progress, size, timestamp
from fairturn.clock import SECOND_US, Clock, SystemClock, stopwatch, to_datetime
from fairturn.errors import FairturnError
from fairturn.model import ContentRef

if TYPE_CHECKING:
    from fairturn.contents.local import Contents
    from fairturn.maintenance.sqlite_file import FileInspector
    from fairturn.stores.inspection import Findings
    from fairturn.stores.postgres.audit import ServerInspector

FREE_BYTES_FEW = 512 * 1_048_576
LOG_BYTES_MANY = 256 * 1_048_576
WAITING_LONG_US = 60 * SECOND_US  # with no document running: probably no worker
LEASE_LATE_US = 10 * SECOND_US  # a running worker recovers an expired lease well before
CLOCK_STEP_US = 300 * SECOND_US
OLD_TRANSACTION_US = 60 * SECOND_US
LOCK_LONG_S = 1.0  # a transaction takes milliseconds
YEAR_MIN = 2025  # an earlier clock is not set
_COOKIES_FIXED = {(3, 11): (3, 11, 10), (3, 12): (3, 12, 6)}  # CVE-2024-7592
_OWN_VARIABLES = {FILE_VARIABLE, "FAIRTURN_CRASH_AT", "FAIRTURN_FREEZE_AT"}
_MARKS = {"ok": "ok     ", "warning": "WARNING", "wrong": "WRONG  ", "repaired": "FIXED  "}


@click.command("doctor")
@click.option(
    "--thorough",
    is_flag=True,
    help="Recount everything, read every stored file and check its SHA-256.",
)
@click.option("--repair", is_flag=True, help="With --thorough: repair wrong values.")
@json_option
@setting_options("database", "schema", "allow_network", "contents")
def command(*, thorough: bool, repair: bool, as_json: bool, flags: Flags) -> None:
    """Check a queue.

    It checks the engine, the file system, the file, the settings, the disk, the contents, the
    leases and the clock, and prints a line for each. With --thorough it compares counters, flows
    and leases with the documents. The exit code is 1 if a check is WRONG, not for a WARNING. It
    changes nothing without --repair, and the queue can be in use.

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
        _findings_at(place, settings, SystemClock(), **options)
        if isinstance(place, str)
        else _findings(place, settings, SystemClock(), **options)
    )
    for finding in findings:
        problems += finding.state == "wrong"
        if as_json:
            print_line(finding.as_json())
        else:
            mark = _MARKS[finding.state]
            click.echo(f"{mark}  {finding.check:11}  {printable(finding.finding)}")
    if problems:
        raise CommandExit(f"{number(problems, 'check')} failed", FAILED)


def _findings(
    path: Path, settings: Mapping[str, SettingValue], clock: Clock, *, thorough: bool, repair: bool
) -> Iterator[CheckResult]:
    from fairturn.config import contents_beside
    from fairturn.contents.local import Folder
    from fairturn.maintenance.sqlite_file import examined
    from fairturn.stores.sqlite.repair import repair as repair_file

    yield _engine()
    yield python_finding(sys.version_info[:3])
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
                if damage
                else ok("file", f"{path} is whole ({size(path.stat().st_size)})")
            )
            yield _log(examiner)
            yield _lock(path.absolute())
            if known.state == "ok" and not examiner.has_queue():
                yield warning("queue", "it is being created, or its creator was killed")
            elif known.state == "ok":
                found = examiner.find(clock.uptime())
                yield _epoch(*examiner.epoch())
                yield from _queue(found, clock.now())
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
    url: str, settings: Mapping[str, SettingValue], clock: Clock, *, thorough: bool, repair: bool
) -> Iterator[CheckResult]:
    """Check a queue in PostgreSQL, and its contents."""
    from fairturn.config import open_contents
    from fairturn.contents.s3 import is_bucket
    from fairturn.stores.postgres.audit import examined
    from fairturn.stores.postgres.audit import repair as repair_server

    schema, place = settings["schema"].value, settings["contents"].value

    def refs() -> list[ContentRef]:
        with examined(url, schema) as examiner:
            return examiner.contents()

    yield python_finding(sys.version_info[:3])
    yield _environment()
    try:
        with examined(url, schema) as examiner:
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
                yield ok("queue", "new: no process has opened it yet")
                return
            found, now = looked
            yield from _queue(found, now)
            unseen = examiner.contents_known() if place is None else 0
        # After that transaction: each recount has its own snapshot.
        if thorough:
            yield from recount_findings(
                partial(examined, url, schema),
                partial(repair_server, url, schema) if repair else None,
            )
    except FairturnError as error:
        yield wrong("server", str(error))
        return
    if place is None:
        if unseen:
            unchecked = f"{number(unseen, 'stored file')} not checked"
            yield warning("contents", f"{unchecked}; pass their folder or bucket with --contents")
        return
    # After that transaction: reading all contents can take hours.
    try:
        if not is_bucket(place) and not Path(place).is_dir():
            yield wrong("contents", f"there is no folder {place}; is --contents right?")
        else:
            yield from _contents(refs, open_contents(place), place, clock, thorough=thorough)
    except FairturnError as error:
        yield wrong("contents", str(error))


def _oldest_transaction(age_us: int | None, *, hidden: bool) -> CheckResult:
    more = "; those of other roles are visible only with GRANT pg_monitor" if hidden else ""
    if age_us is None:
        return ok("server", f"no transaction is open{more}")
    oldest = f"the oldest transaction has been open for {duration(age_us)}"
    if age_us < OLD_TRANSACTION_US:
        return ok("server", f"{oldest}{more}")
    return warning(
        "server",
        f"{oldest} and keeps the server from removing dead rows, which slows the queue down; find "
        "it in pg_stat_activity",
    )


# ── The machine ──────────────────────────────────────────────────────────────────────────────────


def _engine() -> CheckResult:
    import apsw

    from fairturn.stores.sqlite.schema import refuse_engine

    sqlite = apsw.sqlite_lib_version()
    versions = (
        f"fairturn {version('fairturn')}, Python {platform.python_version()}, SQLite {sqlite}"
    )
    try:
        refuse_engine(sqlite)
    except FairturnError as error:
        return wrong("versions", f"{versions}: {error}")
    return ok("versions", versions)


def python_finding(running: tuple[int, int, int]) -> CheckResult:
    """Check for a Python that parses quoted cookies in quadratic time. The service removes them
    from its requests; other programs in the same environment may not."""
    name = ".".join(map(str, running))
    fixed = _COOKIES_FIXED.get(running[:2])
    if fixed is None or running >= fixed:
        return ok("python", f"{name} has no known denial of service by cookies")
    return warning(
        "python",
        f"{name} parses cookies in quadratic time (CVE-2024-7592); install "
        f"{'.'.join(map(str, fixed))} or newer",
    )


def _environment() -> CheckResult:
    """Check for mistyped variables, which would be ignored silently."""
    known = {variable_of(name) for name in known_settings()} | _OWN_VARIABLES
    unknown = sorted(
        name for name in os.environ if name.startswith("FAIRTURN_") and name not in known
    )
    if unknown:
        return warning("environment", f"{', '.join(unknown)}: not a setting of fairturn, ignored")
    return ok("environment", "every FAIRTURN_ variable is a setting")


def _file_system(path: Path, *, allowed: bool) -> CheckResult:
    from fairturn.stores.sqlite.schema import network_below

    kind = network_below(path.absolute())
    if kind is None:
        return ok("file system", "local")
    finding = f"{path} is on {kind}, where SQLite's locks are not reliable"
    if allowed:
        return warning("file system", f"{finding}; allow_network accepts the risk")
    return wrong("file system", f"{finding}; use a local disk")


def _disk(path: Path) -> CheckResult:
    from fairturn.stores.sqlite.connection import RESERVE_BYTES

    stat = os.statvfs(path.absolute().parent)
    free = stat.f_bavail * stat.f_frsize
    finding = f"{size(free)} free"
    if free >= max(RESERVE_BYTES, FREE_BYTES_FEW):
        return ok("disk", finding)
    result = wrong if free < RESERVE_BYTES else warning
    return result("disk", f"{finding}; below {size(RESERVE_BYTES)} no documents are accepted")


# ── The file ─────────────────────────────────────────────────────────────────────────────────────


def _schema(examiner: "FileInspector | ServerInspector", how: str = "") -> CheckResult:
    version_, newest = examiner.schema()
    if version_ == 0:
        created = f"it is created {how}".rstrip()
        return warning("schema", f"there is none; {created} when the queue is next opened")
    if version_ > newest:
        return wrong(
            "schema",
            f"version {version_} is newer than this release ({newest}); install the fairturn that "
            "migrated it",
        )
    if version_ < newest:
        migrated = f"it is migrated to {newest} {how}".rstrip()
        return warning("schema", f"version {version_}; {migrated} when the queue is next opened")
    return ok("schema", f"version {version_}, the newest")


def _log(examiner: "FileInspector") -> CheckResult:
    log_bytes = examiner.log_bytes()
    finding = f"the write-ahead log has {size(log_bytes)}"
    if log_bytes > LOG_BYTES_MANY:
        return warning("log", f"{finding}; a long read transaction prevents a checkpoint")
    return ok("log", finding)


def _lock(path: Path) -> CheckResult:
    """Check whether a process is stopped while it holds the write lock, or holds it for long."""
    from fairturn.stores.sqlite.connection import are_listed, holder_of

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
        f"{holder} holds the write lock; no process can write until it continues "
        f"(kill -CONT {holder.pid}) or is killed",
    )


def _epoch(epoch: int, is_copy: bool) -> CheckResult:
    if is_copy:
        return ok("epoch", f"{epoch}; a copy by fairturn backup: its first write begins a new one")
    restored = "after a restore from anything but a fairturn backup, run: fairturn restored"
    return ok("epoch", f"{epoch}; {restored}")


def _queue(found: "Findings", now: int) -> Iterator[CheckResult]:
    from fairturn.model import Settings

    try:
        yield ok("settings", f"mode {Settings.from_json(found.settings).mode}")
    except (FairturnError, ValueError, TypeError) as error:
        yield wrong("settings", f"they cannot be read: {error}")
    yield _waiting(found, now)
    yield _leases(found)
    yield _repairs(found)


def _waiting(found: "Findings", now: int) -> CheckResult:
    if found.oldest_waiting_at is None:
        return ok("waiting", "no document waits")
    oldest = f"the oldest document has been waiting since {timestamp(found.oldest_waiting_at)}"
    if not found.running and now - found.oldest_waiting_at >= WAITING_LONG_US:
        return warning("waiting", f"{oldest}, and none is running; is a worker running?")
    return ok("waiting", f"{oldest}, {duration(max(0, now - found.oldest_waiting_at))}")


def _leases(found: "Findings") -> CheckResult:
    running = f"{number(found.running, 'document')} running"
    since = found.expired_since_us
    if found.expired and since is None:
        return wrong(
            "leases",
            f"{running}, claimed before the machine was booted; no worker is running: start one",
        )
    if found.expired and since is not None and since > LEASE_LATE_US:
        return wrong(
            "leases",
            f"{running}, {found.expired:,} of them with a lease that expired up to "
            f"{duration(since)} ago; no worker is running: start one",
        )
    return ok("leases", f"{running}, no lease has expired")


def _repairs(found: "Findings") -> CheckResult:
    if not found.repairs:
        return ok("repairs", "no claim has found a flow that did not agree with the documents")
    return warning(
        "repairs",
        f"claims have repaired {number(found.repairs, 'flow')} that did not agree with the "
        "documents; recount everything with: fairturn doctor --thorough",
    )


def _clock(found: "Findings", now: int) -> CheckResult:
    if to_datetime(now).year < YEAR_MIN:
        return wrong("clock", f"the time is {timestamp(now)}; set the clock of this machine")
    if found.newest_at is not None and found.newest_at > now + CLOCK_STEP_US:
        return warning(
            "clock",
            f"the time is {timestamp(now)}, and the newest document is from "
            f"{timestamp(found.newest_at)}: the clock was set back; counts will reset late "
            "until the clock catches up",
        )
    return ok("clock", timestamp(now))


# ── The contents ─────────────────────────────────────────────────────────────────────────────────


def _contents(
    find: Callable[[], list[ContentRef]],
    contents: "Contents",
    where: str,
    clock: Clock,
    *,
    thorough: bool,
) -> Iterator[CheckResult]:
    from fairturn.clock import TIMESTAMP_MAX
    from fairturn.contents.local import SWEEP_AGE_US

    refs = {ref.name: ref for ref in find()}
    present = set(contents.names(TIMESTAMP_MAX))
    old = set(contents.names(clock.now() - SWEEP_AGE_US))
    missing = refs.keys() - present
    if missing:  # unless their documents were deleted since they were listed
        missing &= {ref.name for ref in find()}
    if missing:
        yield wrong(
            "contents",
            f"{number(len(missing), 'stored file')} of {len(refs):,} missing in {where}, "
            f"such as {min(missing)}; restore from a backup",
        )
    else:
        yield ok("contents", f"{_all(len(refs))} present")
    if thorough:
        yield _checksums(contents.open, [refs[name] for name in refs.keys() & present])
    stray = old - refs.keys()
    if stray:
        yield warning(
            "strays",
            f"{number(len(stray), 'stored file')} without a document, left by a crash; "
            "fairturn prune deletes them",
        )


def _checksums(read: Callable[[Any], Any], refs: list[Any]) -> CheckResult:
    damaged = []
    with progress("Reading contents", len(refs)) as advance:
        for n, ref in enumerate(refs):
            try:
                read(ref).close()
            except FairturnError as error:
                damaged.append(str(error))
            advance(n + 1)
    if damaged:
        return wrong("checksums", f"{number(len(damaged), 'stored file')} damaged: {damaged[0]}")
    return ok("checksums", f"{_all(len(refs))} undamaged")


def _all(contents: int) -> str:
    return "the only stored file is" if contents == 1 else f"each of {contents:,} stored files is"
