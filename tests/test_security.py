"""SECURITY.md: every threat has tests that exist, and what it calls impossible stays impossible."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "fairturn"
THREATS = 22
# They run code, or can be made to, when they read data.
DESERIALISERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "yaml", "jsonpickle"}
SENDERS = {"httpx", "requests", "urllib.request", "http.client", "aiohttp", "urllib3"}


def threats() -> dict[str, str]:
    """Return the rows of the table of threats by their numbers."""
    text = (ROOT / "SECURITY.md").read_text()
    return dict(re.findall(r"^\| (T\d+) \| (.*) \|$", text, re.MULTILINE))


def test_every_threat_has_a_defence_and_a_test_that_exists() -> None:
    written = {
        name
        for file in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    found = threats()

    assert list(found) == [f"T{n}" for n in range(1, THREATS + 1)]
    for number, row in found.items():
        cited = re.findall(r"`(test_\w+)`", row)
        assert cited, number
        assert set(cited) <= written, number


def imports() -> Iterator[tuple[str, str]]:
    """Yield every import of the package: the module that imports, and what it imports."""
    for file in SOURCES.rglob("*.py"):
        module = file.relative_to(SOURCES).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield module, node.module


def test_nothing_but_json_is_deserialised() -> None:
    found = [(module, name) for module, name in imports() if name.split(".")[0] in DESERIALISERS]

    assert found == []


def test_only_clients_send_requests() -> None:
    """The service, the page and the worker fetch nothing, whatever a request or a document says.
    The client calls the service that its user names; `contents/s3.py` uses the configured
    bucket."""
    found = {
        module for module, name in imports() if name in SENDERS or name.split(".")[0] in SENDERS
    }

    assert {module for module in found if not module.startswith("client/")} == {"contents/s3.py"}
