"""docs/cli.md documents every command and option, and its programs run."""

import os
import re
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import click
import pytest

from fairturn.cli import COMMANDS
from fairturn.cli.settings import SettingsFile, known_settings, resolve
from tests.commands import SCRIPT

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "cli.md").read_text(encoding="utf-8")
DOCUMENTS = (DOCS / "documents.md").read_text(encoding="utf-8")


def commands() -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    for name in COMMANDS:
        command = import_module(f"fairturn.cli.{name}").command
        found.append((name, command))
        if isinstance(command, click.Group):
            found += [(f"{name} {inner}", each) for inner, each in command.commands.items()]
    return found


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_every_command_and_every_option_stands_in_the_page(
    name: str, command: click.Command
) -> None:
    assert f"`fairturn {name}" in PAGE
    top, *_ = name.split()
    (section,) = re.findall(rf"^### `fairturn {top}\b.*?(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    general = PAGE.partition("## Documents")[0]
    linked = re.findall(r"\(documents\.md#(\w+)\)", section)
    tables = [
        DOCUMENTS.partition(f"## {title.capitalize()}\n")[2].partition("## ")[0] for title in linked
    ]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for option in parameter.opts:
                places = [section, general, *tables]
                assert any(f"`{option}" in place for place in places), option


def test_the_first_program_runs_as_written(tmp_path: Path) -> None:
    (program,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)

    path = os.pathsep.join([str(SCRIPT.parent), os.environ["PATH"]])
    subprocess.run(
        ["sh", "-e", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
    )

    assert (tmp_path / "copy.db").exists()


def test_the_file_of_settings_is_one_and_names_every_setting_that_is_no_queues() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = SettingsFile(Path("fairturn.toml"), tomllib.loads(example))

    found = resolve({}, {}, file)

    named = {name for name, setting in found.items() if setting.given}
    assert named >= {name for name, known in known_settings().items() if known.table != "queue"}
