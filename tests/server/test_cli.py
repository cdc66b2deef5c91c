"""Commands of kvtier: settings, suggested corrections, exit codes, JSON output, `inspect` and `verify`."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from kvtier.cli.main import main
from kvtier.server.load import LoadOptions, run_load
from kvtier.storage import DiskStore, Label, Write


def run(*arguments, stdin="", env=None):
    command = [sys.executable, "-m", "kvtier", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, input=stdin, env=env)


def refused(capsys, *arguments):
    """Run a command whose arguments are invalid. Return the last line of its error output."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---- invalid arguments ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serv",), "unknown command 'serv'"),
        (("serv",), "did you mean serve?"),
        (("serve", "--prot", "80"), "unknown option --prot; did you mean --port?"),
        (("serve", "--prot=80"), "unknown option --prot; did you mean --port?"),
        (("serve", "--por", "80"), "did you mean --port?"),  # options cannot be abbreviated
        (("generate", "--temprature", "1"), "did you mean --temperature?"),
        (("doctor", "more"), "unexpected argument 'more'"),
        (("serve", "--port", "http"), "invalid int value: 'http'"),
        (("serve", "--log-level", "loud"), "invalid choice: 'loud'"),
        (("completion", "tcsh"), "invalid choice: 'tcsh'"),
    ],
)
def test_error_for_invalid_argument_names_it_or_its_correction(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


# ---- settings ----


def is_json(capsys, *arguments):
    """True if `kvtier completion` prints JSON. The tests use this command because it is the fastest."""
    assert main(["completion", "bash", *arguments]) == 0
    return capsys.readouterr().out.startswith("{")


def test_flag_overrides_environment_which_overrides_file(monkeypatch, tmp_path, capsys):
    file = tmp_path / "kvtier.toml"
    file.write_text("[completion]\njson = true\n")
    assert not is_json(capsys)
    assert is_json(capsys, "--config", str(file))
    monkeypatch.setenv("KVTIER_CONFIG", str(file))
    assert is_json(capsys)
    monkeypatch.setenv("KVTIER_JSON", "no")
    assert not is_json(capsys)
    assert is_json(capsys, "--json")


def test_error_for_invalid_settings_names_the_cause(capsys, monkeypatch, tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text("[serve]\nprot = 80\n")
    assert f"{file}: [serve] has no option prot; did you mean port?" in refused(capsys, "serve", "--config", str(file))
    for text, message in (
        ("[serv]\nport = 80\n", "unknown table [serv]; did you mean serve?"),
        ("port = = 80\n", "cannot be read as TOML"),
    ):
        file.write_text(text)
        assert main(["completion", "bash", "--config", str(file)]) == 1
        assert message in capsys.readouterr().err
    assert main(["completion", "bash", "--config", str(tmp_path / "none.toml")]) == 1
    assert "none.toml" in capsys.readouterr().err
    monkeypatch.setenv("KVTIER_PROT", "80")
    assert main(["completion", "bash"]) == 1
    assert "did you mean KVTIER_PORT?" in capsys.readouterr().err
    monkeypatch.delenv("KVTIER_PROT")
    monkeypatch.setenv("KVTIER_OF_ANOTHER_PROGRAM", "1")
    assert main(["completion", "bash"]) == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('port = "high"', "serve.port must be of type int, got 'high'"),
        ('json = "perhaps"', "serve.json must be true or false"),
        ('log-level = "loud"', "must be one of debug, info, warning, error"),
    ],
)
def test_error_for_invalid_config_value_states_valid_values(capsys, tmp_path, table, message):
    file = tmp_path / "kvtier.toml"
    file.write_text(f"[serve]\n{table}\n")
    assert message in refused(capsys, "serve", "--config", str(file))


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        (
            '[[tenants]]\nname = "a"\nkey = "12345678"\nadmn = true',
            "has no field admn; did you mean admin?",
        ),
        ('[[tenants]]\nname = "a"', "needs a name and a key"),
        ('[[tenants]]\nname = "a"\nkey = 12345678', "[[tenants]] key must be a string, got a value of type int"),
        ('[[tenants]]\nname = "a"\nkey = "12345678"\nhost_blocks = "8"', "host_blocks must be an integer"),
        ('[[tenants]]\nname = "a"\nkey = "12345678"\ndevice_blocks = -8', "must not be negative"),
        ('[[tenants]]\nname = "a"\nkey = "short"', "at least 8 are needed"),
        ('tenants = "a"', "[[tenants]]"),
        (
            '[[tenants]]\nname = "a"\nkey = "12345678"\n[[tenants]]\nname = "b"\nkey = "12345678"',
            "share a name or a key",
        ),
    ],
)
def test_error_for_invalid_tenants_does_not_show_keys(capsys, tmp_path, tenants, message):
    file = tmp_path / "kvtier.toml"
    file.write_text(tenants)
    assert main(["serve", "--config", str(file), "--model", "/no/such"]) == 1
    output = capsys.readouterr().err
    assert message in output
    assert "12345678" not in output


def test_public_address_without_keys_is_refused(capsys):
    assert main(["serve", "--host", "0.0.0.0", "--model", "/no/such"]) == 1
    assert "there are no API keys" in capsys.readouterr().err


# ---- help and completion ----


def test_every_command_has_examples_and_common_options(capsys):
    main(["completion", "bash", "--json"])
    commands = json.loads(capsys.readouterr().out)
    assert {"serve", "generate", "chat", "bench", "doctor", "inspect", "verify"} <= {*commands}
    for name, flags in commands.items():
        assert "--json" in flags
        assert "--config" in flags
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "examples:\n  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["kvtier", "ser"], ["serve"]),
        (["kvtier", "serve", "--max-ro"], ["--max-rows"]),
        (["kvtier", "--json", "doctor", "--cal"], ["--calibrate"]),
    ],
)
def test_bash_completion_completes_commands_and_options(capsys, words, expected):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    quoted = " ".join(f"'{word}'" for word in words)
    complete = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _kvtier; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{complete}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_script_lists_commands_and_options(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in ("serve", "verify", "max-rows", "shared-words"))


# ---- models ----


def test_generate_and_chat_print_json(tiny_model):
    done = run("generate", "--model", str(tiny_model), "--max-tokens", "4", "--json", stdin="One\nTwo\n")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["One", "Two"]
    assert rows[0]["prompt_tokens"] == 3
    done = run("chat", "--model", str(tiny_model), "--max-tokens", "4", "--json", "--once", "Hello")
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["finish_reason"] in ("length", "stop")


def test_generate_and_chat_report_refused_prompts(tiny_model):
    small, long = ("--model", str(tiny_model), "--blocks", "2", "--max-tokens", "4", "--json"), "x" * 100
    done = run("generate", *small, "short", long)
    assert done.returncode == 1
    assert "kvtier: refused: 100 tokens and one generated token do not fit" in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[0]["finish_reason"] in ("length", "stop")
    assert rows[1]["finish_reason"] == "refused"
    done = run("chat", *small, "--once", long)
    assert done.returncode == 1
    assert "kvtier: refused: " in done.stderr
    assert json.loads(done.stdout)["finish_reason"] == "refused"


def test_bench_reports_statuses_and_latencies(server, capsys):
    assert main(["bench", "--url", server.url, "--clients", "4", "--requests", "8", "--max-tokens", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["statuses"] == {"200": 8}
    assert report["ttft_p50_ms"] > 0
    assert main(["bench", "--url", "http://127.0.0.1:9", "--json"]) == 1
    assert "no kvtier server at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["bench", "--url", f"{server.url}/other", "--json"]) == 1
    assert f"{server.url}/other/v1/models returned status 404 (Not Found)" in capsys.readouterr().err


def test_bench_fails_if_a_request_failed(server, capsys):
    load = ("bench", "--url", server.url, "--clients", "2", "--requests", "3", "--json")
    assert main([*load, "--max-tokens", "99999"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["statuses"] == {"400": 3}
    assert "kvtier: of 3 requests, 3 got status 400" in output.err
    for option in ("--clients", "--requests", "--max-tokens", "--prompt-words"):
        assert main([*load, option, "0"]) == 1
        assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_load_generator_counts_broken_stream_once():
    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n" + b"x" * (1 << 17))  # longer than any valid line
        writer.close()

    async def load():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await run_load(LoadOptions(f"http://127.0.0.1:{port}", "any", clients=2, requests=4))

    report = asyncio.run(load())
    assert report.statuses == {200: 4}
    assert report.num_incomplete == report.num_tokens == 4


# ---- stores ----


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a disk tier that contains twenty objects for each of two models."""
    path = tmp_path / "kv"
    store = DiskStore(path, 64 << 20, segment_bytes=1 << 20, direct=False)
    rng = np.random.default_rng(0)
    for model in (1, 2):
        label = Label(bytes([model]) * 32)
        writes = [Write(rng.bytes(32), label, rng.bytes(5000)) for _ in range(20)]
        assert store.write(writes).ok
    store.close()
    return path


def damage(folder):
    """Flip a bit in one object."""
    segment = sorted(folder.glob("segment-*.kv"))[0]
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(bytes(data))


def test_inspect_counts_objects_by_model(folder, capsys):
    assert main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["objects"], report["bytes"], report["unreadable"]) == (40, 200_000, 0)
    assert report["namespaces"] == {
        "010101010101": {"objects": 20, "bytes": 100_000},
        "020202020202": {"objects": 20, "bytes": 100_000},
    }
    assert main(["inspect", str(folder), "--objects"]) == 0
    output = capsys.readouterr().out
    assert output.count("5,000 bytes") == 40
    assert "40 objects (200,000 bytes" in output


def test_verify_finds_damage_once_and_quarantines_it(folder, capsys):
    assert main(["verify", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["damaged"] == 0
    damage(folder)
    assert main(["verify", str(folder), "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (rows[0]["status"], rows[-1]["damaged"], rows[-1]["objects"]) == ("corrupt", 1, 40)
    assert main(["verify", str(folder)]) == 0
    assert "39 objects checked" in capsys.readouterr().out


def test_verify_counts_invalid_records_and_exits_with_1(folder, capsys):
    table = sorted(folder.glob("segment-*.table"))[0]
    data = bytearray(table.read_bytes())
    data[5000] ^= 1  # inside a record
    table.write_bytes(bytes(data))
    assert main(["verify", str(folder)]) == 1
    output = capsys.readouterr().out
    assert "39 objects checked" in output
    assert "0 damaged, 0 could not be read, 1 invalid records or files" in output


def test_inspect_rejects_invalid_folder_and_reads_folder_in_use(folder, tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none")]) == 1
    assert "is neither a folder nor the URL of a store" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 1
    assert "is not the folder of a disk tier" in capsys.readouterr().err
    store = DiskStore(folder, 64 << 20, direct=False)
    try:
        assert main(["inspect", str(folder)]) == 0
        assert "40 objects" in capsys.readouterr().out
    finally:
        store.close()
