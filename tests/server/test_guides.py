"""The commands in docs/tuning.md run in the order of the page, and the example in docs/operating.md runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvtier.cli.main import main
from server_support import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
TUNING = (ROOT / "docs" / "tuning.md").read_text()
COMMANDS = re.findall(r"^    ((?:kvtier|curl) .*)$", TUNING, re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"


def kvtier(command, folder):
    words = command.split()
    assert words[0] == "kvtier"
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", *words[1:]], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_commands_on_tuning_page_run_in_order(tiny_model, tmp_path, monkeypatch):
    assert [command.split()[1] for command in COMMANDS] == [
        *("doctor", "serve", "bench", "-s", "-s", "inspect", "verify", "replay", "plan")
    ]
    doctor, serve, bench, *curls = COMMANDS[:5]
    assert "torch" in kvtier(doctor, tmp_path)
    monkeypatch.chdir(tmp_path)
    env = {"KVTIER_MODEL": str(tiny_model), "KVTIER_THREADS": "1"}
    server = ServerProcess(tmp_path / "log", *serve.split()[2:], env=env)
    try:
        assert "requests" in kvtier(bench.replace(ADDRESS, server.url), tmp_path)
        state, metrics = (httpx.get(curl.split()[-1].replace(ADDRESS, server.url)) for curl in curls)
        assert len(state.json()["recent"]) == 32  # the page has `kvtier bench --requests 32`
        explained = server.get(f"/control/explain/{state.json()['recent'][0]['id']}").json()
        section = TUNING[TUNING.index("## Reading explain") : TUNING.index("## Sizes")]
        assert {*re.findall(r"`(\w+)`", section)} <= {*explained}
    finally:
        assert server.stop() == 0
    for name in re.findall(r"`(kvtier_[a-z_]+)", TUNING):
        assert f"# TYPE {name} " in metrics.text, name
    inspect, verify, replay, plan = COMMANDS[5:]
    assert "objects" in kvtier(inspect, tmp_path)
    kvtier(verify, tmp_path)
    assert "lru" in kvtier(replay, tmp_path)
    assert kvtier(plan, tmp_path)


def test_example_client_on_operating_page_gets_an_answer(server):
    page = (ROOT / "docs" / "operating.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace(ADDRESS, server.url)
    done = subprocess.run(
        [sys.executable, "-c", code.replace('"smollm2"', f'"{server.model}"')],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+$", done.stdout.strip())


def test_options_on_tuning_page_exist(capsys):
    main(["completion", "bash", "--json"])
    known = {flag for names in json.loads(capsys.readouterr().out).values() for flag in names}
    assert {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", TUNING)} <= known


def test_policies_on_tuning_page_are_choices_of_serve(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    help_text = capsys.readouterr().out
    section = TUNING[TUNING.index("## Policies") : TUNING.index("## Waiting")]
    for name in [
        *re.findall(r"^\| `(write_\w+)` \|", section, re.MULTILINE),
        "lru",
        "arc",
        "s3fifo",
        "cost",
        "fifo",
        "learned",
    ]:
        assert f"`{name}`" in section
        assert name in help_text
