"""The kvtier command: help, `doctor`, invalid bytes, full disks, closed pipes and unreadable files."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.cli import main
from kvtier.memory import best_host

ROOT = Path(__file__).resolve().parents[2]


def run_kvtier(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    return exited.value.code


# ---- command ----


def test_python_m_kvtier_runs_the_command():
    done = run_kvtier("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["kvtier"] == kvtier.__version__


def test_cli_unknown_command_exits_2_and_lists_commands():
    done = run_kvtier("cure")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "cure" in done.stderr
    assert "doctor" in done.stderr  # the error lists the known commands
    assert "Traceback" not in done.stderr


def test_console_script_entry_point_is_main():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["kvtier"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


# ---- version and help ----


def test_cli_version_matches_package(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


def test_cli_help_lists_commands(capsys):
    assert exit_code("--help") == 0
    output = capsys.readouterr().out
    assert "usage: kvtier" in output
    assert "doctor" in output
    assert "show the hardware, packages and usable copy paths" in output


def test_cli_command_help_lists_options(capsys):
    assert exit_code("doctor", "--help") == 0
    output = capsys.readouterr().out
    assert "--json" in output
    assert "--calibrate" in output


@pytest.mark.parametrize("arguments", [(), ("cure",), ("doctor", "--no-such-option"), ("doctor", "extra")])
def test_cli_invalid_arguments_exit_2_with_usage(capsys, arguments):
    assert exit_code(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "usage: kvtier" in output.err


# ---- doctor ----


def test_doctor_prints_one_line_per_finding(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    findings = dict(line.split("  ", 1) for line in lines)
    assert findings["kvtier"].strip() == kvtier.__version__
    assert findings["torch"].strip().startswith(torch.__version__)
    assert findings["best host memory"].strip() == str(best_host())
    assert len(findings) == len(lines)


def test_doctor_json_matches_text_output(capsys):
    main(["doctor"])
    table = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert main(["doctor", "--json"]) == 0
    output = capsys.readouterr().out
    findings = json.loads(output)
    assert output.count("\n") == 1
    assert {name: value.strip() for name, value in table.items()} == findings


def test_doctor_lists_working_copy_paths(capsys):
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    host, loop = findings["copy cpu to cpu"].rsplit(", ", 1)
    assert loop == "loop"
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    assert host == "host" or (not has_compiler and host.startswith("no host ("))


def test_doctor_reports_gpus_or_their_absence(capsys):
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in findings["cuda:0"]
        assert "copy cuda:0 to pinned" in findings
    else:
        assert findings["GPU"] == "none: everything runs on the CPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU and save the result")
def test_doctor_calibrate_without_gpu_succeeds(capsys):
    assert main(["doctor", "--calibrate"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "none: everything runs on the CPU" in output.out


def test_doctor_shows_the_cache_directory(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "cache"))
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["cache directory"] == str(tmp_path / "cache")


def test_doctor_reports_unusable_cache_directory(monkeypatch, capsys):
    """The exit code is 0 even if the command reports a problem."""
    monkeypatch.setenv("KVTIER_CACHE_DIR", "/dev/null/kvtier")
    assert main(["doctor", "--json"]) == 0
    assert "/dev/null/kvtier" in json.loads(capsys.readouterr().out)["cache directory"]


# ---- invalid bytes, closed pipes, unreadable files ----


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
BAD_BYTES = b"\xff\xfe"


def run_raw(*arguments: str | bytes, output: str | None = None, stdin: bytes = b"", **environment: str):
    """Run kvtier in a subprocess. If `output` is given, standard output is written to that file."""
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(open(output, "wb")) if output else subprocess.PIPE
        return subprocess.run(
            [sys.executable, "-m", "kvtier", *arguments],
            input=stdin,
            stdout=target,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )


def assert_fails_with_one_line(done, code: int = 1) -> None:
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr, done.stderr
    assert b"Exception ignored" not in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith(b"kvtier")]) == 1, done.stderr


@pytest.mark.parametrize("arguments", [["completion", "bash"], ["--help"], ["serve", "--help"], ["--version"]])
def test_cli_writing_to_full_disk_fails_with_one_line(arguments):
    done = run_raw(*arguments, output="/dev/full")
    assert_fails_with_one_line(done)
    assert b"No space left" in done.stderr


def test_cli_with_closed_pipe_exits_silently():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "kvtier", "completion", "bash"], stdout=closed, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("locale", [{}, C_LOCALE], ids=["utf-8", "C"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([BAD_BYTES], 2),
        (["inspect", BAD_BYTES], 1),
        (["inspect", "/tmp/no-such-f\u00f6lder"], 1),  # decodable as UTF-8, but the folder does not exist
        (["replay", BAD_BYTES], 1),
        (["inspect", "x", "--config", BAD_BYTES], 1),
        (["generate", BAD_BYTES], 1),
        (["chat", "--once", BAD_BYTES], 1),
        (["generate", "--stop", BAD_BYTES, "x"], 1),
    ],
)
def test_cli_with_undecodable_argument_fails_with_one_line(locale, arguments, code):
    encoded = [arg if isinstance(arg, bytes) else arg.encode() for arg in arguments]
    assert_fails_with_one_line(run_raw(*encoded, **locale), code)


def test_cli_with_undecodable_input_fails_with_one_line():
    assert_fails_with_one_line(run_raw("generate", stdin=BAD_BYTES))


def test_cli_with_unreadable_config_fails_with_one_line(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(BAD_BYTES)
    for path in (tmp_path, tmp_path / "bytes.toml", tmp_path / "none.toml"):
        assert_fails_with_one_line(run_raw("completion", "bash", "--config", str(path)))
