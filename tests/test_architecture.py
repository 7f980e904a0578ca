"""The rules of the architecture, as checks on the text of the installed package.

Each rule is a function from a text to sentences about violations. It is used twice: on the real
files, where it must find nothing, and on small bad ones, where it must find something, because a
rule that cannot fail protects nothing.
"""

import ast
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first. A part is a module of fairturn, or a package with all its modules except those that
# are parts of their own. It imports from the lines above its own; the modules of one part may
# import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "stores.urls",
        "validation.text",
        "stores.crash",
        "stores.ids",
        "clock",
        "priority",
        "i18n",
        "explain.reasons",
    ),
    ("scheduling.flows", "scheduling.outages", "simulator.charts", "access.keys"),
    ("scheduling.turns", "model"),
    ("explain.snapshot", "wire"),
    ("stores.contract", "scheduling"),
    ("contents.local", "stores"),
    ("contents", "validation", "explain", "integrations.counts", "service.telemetry"),
    ("config", "access", "explain.sentences"),
    ("queue",),
    ("worker",),
    ("client",),
    ("maintenance", "simulator.demo"),
    ("cli", "service", "dashboard", "integrations", "simulator", "stores.conformance"),
)
# The only imports between two parts of one line: importer, and imported.
WITHIN_A_LAYER = {
    ("cli", "simulator"),
    ("cli", "service"),
    ("cli", "dashboard"),
    ("dashboard", "service"),
    ("dashboard", "simulator"),
}

LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
TOP = len(LAYERS) - 1

NOUNS_IN_ING = {"scheduling"}
MEANINGLESS_NAMES = {"utils", "helpers", "common", "base", "core", "manager", "misc"}

# A reference to one of these can read the time, whether called at once or passed on. Sleeping, and
# the conversion of a given moment, read nothing and are allowed.
CLOCK_READERS = re.compile(
    r"time\.(time|monotonic|perf_counter|process_time|thread_time|clock_gettime)(_ns)?"
    r"|datetime\.datetime\.(now|utcnow|today)"
    r"|datetime\.date\.today"
    r"|uuid\.uuid[167]"
    r"|os\.times"
)
# These convert a moment, but use the present when the call has fewer arguments than this.
ARGUMENTS_TO_CONVERT = {
    "time.gmtime": 1,
    "time.localtime": 1,
    "time.ctime": 1,
    "time.asctime": 1,
    "time.strftime": 2,
}
# A database has a clock too. Capitals, as in all our SQL, distinguish a statement from a sentence.
SQL_STATEMENT = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER)\b")
SQL_CLOCK = re.compile(
    r"\bCURRENT_(TIMESTAMP|TIME|DATE)\b|'now'|\b(now|unixepoch|julianday|clock_timestamp)\(\)",
    re.IGNORECASE,
)
SLEEPERS = re.compile(r"(time|asyncio|anyio|trio|gevent)\.sleep")

# The groups keep this line, and the bad examples below, from matching.
HOME_FOLDER = re.compile(r"(?<![\w.])/((home|Users)/\w|(root)/)|\b[A-Z]:\\(Users)\\")
FOLDERS_MADE_BY_TOOLS = {"build", "dist", "__pycache__"}

ARCHITECTURE_LINES_MAX = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    @property
    def part(self) -> str:
        return part_of(self.name)

    def nodes(self) -> list[ast.AST]:
        return nodes_in(self.source, self.name)

    def at(self, node: ast.AST) -> str:
        return f"{self.name}, line {getattr(node, 'lineno', 0)}"


# The rules.


def imports_against_the_layers(module: Module) -> Iterator[str]:
    if module.part and module.part not in LAYER_OF:
        yield (
            f"{module.name} has no place yet: put '{module.part}' into LAYERS in"
            " tests/test_architecture.py, and into ARCHITECTURE.md"
        )
        return
    for node, target in imports_of(module):
        if target.split(".")[0] != "fairturn":
            continue
        imported = part_of(target)
        if imported not in LAYER_OF:
            imported = ""  # One of the public names, as in `from fairturn import Queue`.
        if not may_import(module.part, imported):
            yield f"{module.at(node)}: {module.part or 'fairturn'} must not import {target}"


def reaches_through_a_queue(module: Module) -> Iterator[str]:
    """Only `queue.py` uses `queue.store`; others call the queue, its `queries` or its `keys`."""
    if module.part in ("queue", "stores", "stores.conformance", "maintenance"):
        return
    for node in module.nodes():
        if not isinstance(node, ast.Attribute) or node.attr != "store":
            continue
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name.lstrip("_") in ("queue", "restored"):
            yield f"{module.at(node)}: call a method of the queue, not {name}.store"


def may_import(part: str, imported: str) -> bool:
    if part == imported:
        return True
    if part == "":
        return LAYER_OF[imported] < TOP
    if imported == "":
        return LAYER_OF[part] == TOP
    return LAYER_OF[imported] < LAYER_OF[part] or (part, imported) in WITHIN_A_LAYER


def reads_of_the_time(module: Module) -> Iterator[str]:
    if module.name == "fairturn.clock":
        return
    for node, name in names_of(module):
        if CLOCK_READERS.fullmatch(name):
            yield f"{module.at(node)}: {name} reads the time, which only clock.py does"
        if name in {"time.*", "datetime.*"}:
            yield f"{module.at(node)}: `import *` hides whether the time is read"
    for call, name in calls_of(module):
        if len(call.args) + len(call.keywords) < ARGUMENTS_TO_CONVERT.get(name, 0):
            yield f"{module.at(call)}: {name} reads the time when no moment is handed in"
    for node, text in strings_of(module):
        for problem in reads_of_the_database_clock(text):
            yield f"{module.at(node)}: {problem}"


def reads_of_the_database_clock(text: str) -> Iterator[str]:
    found = SQL_CLOCK.search(text)
    if found and SQL_STATEMENT.search(text):
        yield f"{found[0]} reads the clock of the database; hand the moment in"


def calls_of_sleep(module: Module) -> Iterator[str]:
    named = [node for node, name in names_of(module) if SLEEPERS.fullmatch(name)]
    called = [call for call, name in calls_of(module) if name.split(".")[-1] == "sleep"]
    for place in sorted({module.at(node) for node in [*named, *called]}):
        yield f"{place}: a test moves the clock or waits on an event; it does not sleep"


def meaningless_names(module: Module) -> Iterator[str]:
    for name in module.name.split("."):
        if name.strip("_") in MEANINGLESS_NAMES:
            yield f"{module.name}: '{name}' does not say what is inside"


def gerund_names(module: Module) -> Iterator[str]:
    name = module.name.split(".")[-1]
    if name.endswith("ing") and name not in NOUNS_IN_ING:
        yield f"{module.name}: name the module with a noun of the field, not with a gerund"


def imports_of_sqlite3(module: Module) -> Iterator[str]:
    for node, target in imports_of(module):
        if target.split(".")[0] in {"sqlite3", "_sqlite3"}:
            yield (
                f"{module.at(node)}: use apsw, which brings its own engine; that of the system may"
                " be one that can damage a database when it resets the write-ahead log"
            )


def home_folders(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if HOME_FOLDER.search(line):
            yield f"line {number} names a folder of one machine: {line.strip()}"


def more_lines_than_one_reading(text: str) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines > ARCHITECTURE_LINES_MAX:
        yield f"there are {lines} lines, and {ARCHITECTURE_LINES_MAX} are allowed"


def differences_from_the_parts(text: str, title: str, parts: set[str]) -> Iterator[str]:
    """Compare the first column of the table below `title` with the existing parts."""
    named = parts_named_below(title, text)
    for part in sorted(parts - named):
        yield f"'{part}' is in no line of the table below '{title}'"
    for part in sorted(named - parts):
        yield f"the table below '{title}' names '{part}', which does not exist"


def parts_named_below(title: str, text: str) -> set[str]:
    lines = iter(text.partition(f"{title}")[2].splitlines())
    rows = takewhile(is_row, dropwhile(lambda line: not is_row(line), lines))
    columns = [row.split("|")[1] for row in rows]
    return {name for column in columns for name in re.findall(r"`([\w./]+?)(?:\.py|/)?`", column)}


def is_row(line: str) -> bool:
    return line.startswith("|")


# What the rules ask of a module.


@lru_cache(maxsize=1)  # one module: all rules check it before the next
def nodes_in(source: str, name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source, filename=name)))


def part_of(name: str) -> str:
    """Return the name in LAYERS, as `stores` of `fairturn.stores.sqlite`; empty for `fairturn`
    itself."""
    names = name.split(".")[1:]
    longest_first = (".".join(names[:n]) for n in range(len(names), 0, -1))
    return next((part for part in longest_first if part in LAYER_OF), "".join(names[:1]))


def imports_of(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Return every import with the full name of what is imported, also for a type checker only."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    for node in module.nodes():
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and full_name(node.func, {}).split(".")[-1] in {
            "import_module",
            "__import__",
        }:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node, argument.value


def names_of(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Return every import and dotted name in full: `t.time` is `time.time` after `import time as
    t`."""
    yield from imports_of(module)
    meanings = meanings_of_imported_names(module)
    for node in module.nodes():
        if isinstance(node, ast.Attribute):
            yield node, full_name(node, meanings)


def calls_of(module: Module) -> Iterator[tuple[ast.Call, str]]:
    meanings = meanings_of_imported_names(module)
    for node in module.nodes():
        if isinstance(node, ast.Call):
            yield node, full_name(node.func, meanings)


def strings_of(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for node in module.nodes():
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        yield node, "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


def meanings_of_imported_names(module: Module) -> dict[str, str]:
    """Return what names stand for: after `from time import time as t`, `t` is `time.time`."""
    meanings = {}
    for node in module.nodes():
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                meanings[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return meanings


def full_name(node: ast.expr, meanings: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return meanings.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, meanings)}.{node.attr}"
    return "?"  # The result of a call, an element of a list: an expression without a name.


# The files.


def installed_package() -> Path:
    spec = find_spec("fairturn")
    assert spec is not None, "fairturn is not installed"
    assert spec.origin is not None, "fairturn has no __init__.py"
    return Path(spec.origin).resolve().parent


def modules_in(folder: Path) -> list[Module]:
    modules = []
    for path in sorted(folder.rglob("*.py")):
        names = path.relative_to(folder.parent).with_suffix("").parts
        is_package = names[-1] == "__init__"
        name = ".".join(names[:-1] if is_package else names)
        source = path.read_text(encoding="utf-8")
        modules.append(Module(name=name, source=source, is_package=is_package))
    assert modules, f"there are no modules in {folder}"
    return modules


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the source files. A folder whose name begins with a dot belongs to a tool."""
    for path in sorted(folder.iterdir()):
        if path.name in FOLDERS_MADE_BY_TOOLS or path.name == ".git":
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and (path.name == ".ci" or not path.name.startswith(".")):
            yield from files_in(path)


# The promises.


def test_the_tests_import_the_installed_wheel_and_never_the_sources() -> None:
    site_packages = Path(sysconfig.get_path("purelib")).resolve()
    places_of_import = {Path(entry).resolve() for entry in sys.path}

    assert installed_package() == site_packages / "fairturn"
    assert ROOT / "src" not in places_of_import


def test_every_module_of_the_package_keeps_the_rules() -> None:
    rules = [
        imports_against_the_layers,
        reaches_through_a_queue,
        reads_of_the_time,
        meaningless_names,
        gerund_names,
        imports_of_sqlite3,
    ]

    problems = [
        problem
        for module in modules_in(installed_package())
        for rule in rules
        for problem in rule(module)
    ]

    assert not problems, "\n".join(problems)


def test_no_sql_file_of_the_package_reads_the_clock_of_the_database() -> None:
    problems = [
        f"{path.name}: {problem}"
        for path in sorted(installed_package().rglob("*.sql"))
        for problem in reads_of_the_database_clock(path.read_text(encoding="utf-8"))
    ]

    assert not problems, "\n".join(problems)


def test_no_test_sleeps() -> None:
    problems = [
        problem for module in modules_in(ROOT / "tests") for problem in calls_of_sleep(module)
    ]

    assert not problems, "\n".join(problems)


def test_no_file_names_a_folder_of_one_machine() -> None:
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in files_in(ROOT)
        for problem in home_folders(path.read_text(encoding="utf-8", errors="replace"))
    ]

    assert not problems, "\n".join(problems)


def test_architecture_md_can_be_read_in_one_sitting() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

    assert not list(more_lines_than_one_reading(text))


def test_the_map_of_architecture_md_names_every_part_of_the_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    entries = {path.stem for path in installed_package().iterdir()}
    parts = entries - {"__init__", "__pycache__", "py"}  # py.typed

    assert not list(differences_from_the_parts(text, "## Map", parts))


@pytest.mark.parametrize("folder", ["stores/sqlite", "stores/postgres", "worker", "simulator"])
def test_architecture_md_names_every_module_of_a_package(folder: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = installed_package() / folder
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    functions = {f"functions/{path.name}" for path in package.glob("functions/*.sql")}

    problems = list(differences_from_the_parts(text, f"Inside `{folder}/`", modules | functions))

    assert not problems, "\n".join(problems)


# The rules can fail, and they fail only where they should.

MODULES_THAT_BREAK_A_RULE = [
    (imports_against_the_layers, "fairturn.model", "from fairturn.stores.contract import Store"),
    (imports_against_the_layers, "fairturn.scheduling.flows", "from fairturn import model"),
    (imports_against_the_layers, "fairturn.priority", "from .scheduling import turns"),
    (imports_against_the_layers, "fairturn.stores.sqlite", "from ..contents.local import Folder"),
    (imports_against_the_layers, "fairturn.queue", "import fairturn.worker"),
    (imports_against_the_layers, "fairturn.queue", "from fairturn import Document"),
    (imports_against_the_layers, "fairturn.config", "def f():\n    import fairturn.queue"),
    (imports_against_the_layers, "fairturn.config", "import_module('fairturn.dashboard')"),
    (imports_against_the_layers, "fairturn.simulator.run", "from fairturn.cli import main"),
    (imports_against_the_layers, "fairturn", "from fairturn.cli import main"),
    (imports_against_the_layers, "fairturn.novelty", ""),
    (reaches_through_a_queue, "fairturn.service.documents", "service.queue.store.find(wanted)"),
    (reaches_through_a_queue, "fairturn.worker", "self._queue.store"),
    (reads_of_the_time, "fairturn.queue", "import time\ntime.time()"),
    (reads_of_the_time, "fairturn.queue", "import time as t\nt.monotonic_ns()"),
    (reads_of_the_time, "fairturn.queue", "from time import perf_counter"),
    (reads_of_the_time, "fairturn.queue", "from time import *"),
    (reads_of_the_time, "fairturn.queue", "import time\ndef f(clock=time.clock_gettime): ..."),
    (reads_of_the_time, "fairturn.queue", "import time\ntime.localtime()"),
    (reads_of_the_time, "fairturn.queue", "import datetime\ndatetime.datetime.now()"),
    (reads_of_the_time, "fairturn.queue", "from datetime import datetime as d\nd.utcnow()"),
    (reads_of_the_time, "fairturn.queue", "from datetime import date\ndate.today()"),
    (reads_of_the_time, "fairturn.stores.ids", "import uuid\nuuid.uuid7()"),
    (reads_of_the_time, "fairturn.stores.sqlite", "SQL = 'SELECT CURRENT_TIMESTAMP'"),
    (reads_of_the_time, "fairturn.stores.sqlite", "SQL = f'UPDATE {table} SET a = now()'"),
    (calls_of_sleep, "tests.test_worker", "import time\ntime.sleep(1)"),
    (calls_of_sleep, "tests.test_worker", "from asyncio import sleep"),
    (calls_of_sleep, "tests.test_worker", "import time\nWorker(pause=time.sleep)"),
    (calls_of_sleep, "tests.test_worker", "driver.page.sleep(1)"),
    (meaningless_names, "fairturn.utils", ""),
    (meaningless_names, "fairturn.stores._base", ""),
    (gerund_names, "fairturn.stores.sqlite.claiming", ""),
    (imports_of_sqlite3, "fairturn.stores.sqlite", "import sqlite3"),
    (imports_of_sqlite3, "fairturn.stores.sqlite", "from sqlite3.dbapi2 import connect"),
]

TEXTS_THAT_BREAK_A_RULE = [
    (home_folders, "see /" + "home/ada/fairturn"),
    (home_folders, "see /" + "Users/ada/fairturn"),
    (home_folders, "see /" + "root/.cache"),
    (home_folders, "see C:\\" + "Users\\ada"),
    (more_lines_than_one_reading, "a line\n" * 151),
    (reads_of_the_database_clock, "CREATE TABLE t (at REAL DEFAULT (unixepoch()))"),
]

TABLE = """Inside `x/`:

| module | step |
|---|---|
| `a.py`, `b/` | `c.py` |
| `f/d.sql` | |

| `e.py` | |
"""

MODULES_THAT_KEEP_THE_RULE = [
    (imports_against_the_layers, "fairturn.stores.contract", "from fairturn.priority import Count"),
    (imports_against_the_layers, "fairturn.stores.sqlite", "from . import memory"),
    (imports_against_the_layers, "fairturn.cli.replay", "from fairturn.simulator import run"),
    (imports_against_the_layers, "fairturn.dashboard.app", "from fairturn import Queue"),
    (imports_against_the_layers, "fairturn", "from fairturn.config import open_queue"),
    (reaches_through_a_queue, "fairturn.service.documents", "service.queue.queries.find(wanted)"),
    (reaches_through_a_queue, "fairturn.queue", "self.store.find(wanted)"),
    (reads_of_the_time, "fairturn.clock", "import time\ntime.time()"),
    (reads_of_the_time, "fairturn.worker", "import time\ntime.sleep(1)"),
    (
        reads_of_the_time,
        "fairturn.validation.text",
        "from datetime import datetime\ndatetime(2024, 1, 1)",
    ),
    (reads_of_the_time, "fairturn.validation.text", "import time\ntime.gmtime(moment)"),
    (reads_of_the_time, "fairturn.queue", "self.clock.now()\n'Call now() first.'"),
    (calls_of_sleep, "tests.test_worker", "clock.advance(1)\nevent.wait(timeout=5)"),
    (imports_of_sqlite3, "fairturn.stores.sqlite", "import apsw"),
]


@pytest.mark.parametrize("rule, name, source", MODULES_THAT_BREAK_A_RULE)
def test_a_module_that_breaks_a_rule_is_reported(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    module = Module(name=name, source=source, is_package=name == "fairturn")

    assert list(rule(module))


@pytest.mark.parametrize("rule, text", TEXTS_THAT_BREAK_A_RULE)
def test_a_text_that_breaks_a_rule_is_reported(
    rule: Callable[[str], Iterator[str]], text: str
) -> None:
    assert list(rule(text))


@pytest.mark.parametrize("rule, name, source", MODULES_THAT_KEEP_THE_RULE)
def test_a_module_that_keeps_the_rule_is_not_reported(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    module = Module(name=name, source=source, is_package=name == "fairturn")

    assert not list(rule(module))


@pytest.mark.parametrize("parts", [{"a", "b"}, {"a", "b", "f/d.sql", "c"}, {"b", "f/d.sql"}, set()])
def test_a_table_that_differs_from_the_parts_is_reported(parts: set[str]) -> None:
    assert list(differences_from_the_parts(TABLE, "Inside `x/`", parts))


def test_a_table_that_names_every_part_is_not_reported() -> None:
    assert not list(differences_from_the_parts(TABLE, "Inside `x/`", {"a", "b", "f/d.sql"}))
    assert list(differences_from_the_parts(TABLE, "Inside `y/`", {"a"}))
