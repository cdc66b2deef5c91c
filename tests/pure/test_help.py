"""The help text of each command equals its snapshot in tests/pure/help.

To update the snapshots: UPDATE_SNAPSHOTS=1 python -m pytest tests/pure/test_help.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.cli.main import add_commands, main
from kvtier.cli.parser import Parser

SNAPSHOTS = Path(__file__).parent / "help"


def command_names():
    commands = Parser().add_subparsers(parser_class=Parser)
    add_commands(commands)
    return list(commands.choices)


@pytest.mark.parametrize("name", ["kvtier", *command_names()])
def test_help_text_equals_snapshot(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit):
        main(["--help"] if name == "kvtier" else [name, "--help"])
    shown = capsys.readouterr().out
    snapshot = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(shown)
    assert shown == snapshot.read_text()


def test_every_help_snapshot_belongs_to_a_command():
    assert {path.stem for path in SNAPSHOTS.iterdir()} == {"kvtier", *command_names()}
