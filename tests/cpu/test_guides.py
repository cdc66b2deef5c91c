"""The code and the commands in the documentation work, and links, file names and the index are correct."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from kvtier.cli.main import add_commands, main
from kvtier.cli.parser import Parser
from kvtier.index.policies import POLICIES
from kvtier.integrations.sglang.config import HiCacheSettings, RankIdentity
from kvtier.integrations.sglang.page_store import PageStore
from tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
DOCS = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
CONFIG, POLICY, MODEL = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text(), re.M | re.S)


BLOCKS = {
    f"{page}-{number}": block
    for page in ("tiers.md", "storage.md", "stores.md", "sglang.md")
    for number, block in enumerate(
        re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    )
}


@pytest.mark.parametrize("name", BLOCKS)
def test_python_block_in_docs_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(textwrap.dedent(BLOCKS[name]), f"docs/{name}", "exec"), {})


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_cli_accepts_commands_in_docs(page):
    parser = Parser()
    add_commands(parser.add_subparsers(parser_class=Parser))
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S))
    indented = "\n".join(re.findall(r"^ {4}(\S.*)$", page.read_text(), re.M))
    code = (fenced + "\n" + indented).replace("\\\n", " ")
    for command in re.findall(r"^kvtier ([a-z]+ .*)$", code, re.M):
        parser.parse_args(shlex.split(command, comments=True))


@pytest.mark.parametrize("page", [page for page in DOCS if not page.name.startswith("log")], ids=lambda path: path.name)
def test_benchmarks_and_make_targets_in_docs_exist(page):
    text = page.read_text()
    for name, options in re.findall(r"python -m benchmarks\.(\w+)((?: --?[\w-]+(?: [\w/.]+)?)*)", text):
        source = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert [flag for flag in re.findall(r"--[a-z-]+", options) if f'"{flag}"' not in source] == []
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    mentioned = re.findall(r"^    make ([a-z]+)|`make ([a-z]+)", text, re.MULTILINE)
    assert {first or second for first, second in mentioned} <= {*targets}


def test_transformers_guide_second_run_hits(tmp_path, monkeypatch, capsys):
    """Run the program in docs/transformers.md twice, with a tiny model instead of SmolLM2."""
    monkeypatch.chdir(tmp_path)
    model = make_tiny_model(tmp_path / "model")
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "transformers.md").read_text(), re.M | re.S)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in program
    program = program.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model)).replace("20GiB", "64MiB&free=0")
    found = []
    for _ in range(2):
        exec(compile(program, "docs/transformers.md", "exec"), {})
        found += re.findall(r"(\d+) of (\d+) tokens were loaded", capsys.readouterr().out)
    (first, total), (second, _) = found
    assert first == "0"
    assert int(total) - 32 <= int(second) < int(total)  # at most one block of 32 tokens is computed again


def test_sglang_guide_extra_config_is_accepted(tmp_path):
    """Parse the settings of the command in docs/sglang.md. SGLang passes the settings in the same form."""
    (given,) = re.findall(
        r"--hicache-storage-backend-extra-config '(.*?)'", (ROOT / "docs" / "sglang.md").read_text(), re.S
    )
    extra = json.loads(given)
    assert (extra["module_path"], extra["class_name"]) == ("kvtier.integrations.sglang", "KvtierStorage")
    settings = HiCacheSettings.parse(extra)
    assert settings.store == ("disk:/nvme/kv?bytes=200GiB",)
    here = HiCacheSettings((f"disk:{tmp_path}?bytes=4MiB&free=0",), revision=settings.revision)
    PageStore(here, RankIdentity("MODEL")).close()


def test_planner_guide_commands_run_on_generated_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "planner.md").read_text().replace("\\\n", " ")
    commands = dict.fromkeys(re.findall(r"^kvtier ((?:replay|plan) .*)$", page, re.M))
    assert len(commands) == 5
    for command in commands:
        trace = command.replace("conversation_trace.jsonl", "synthetic:sessions=12,turns=2")
        assert main(shlex.split(trace)) == 0
        assert "TTFT" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"plan.html", "replay.html"}


def test_extending_guide_config_contains_the_sqlite_store():
    names: dict = {}
    exec(compile(CONFIG, "docs/extending.md", "exec"), names)
    assert [store.name for store in names["config"].cache.stores] == ["sqlite"]


def test_extending_guide_policy_has_hits_in_replay(capsys, monkeypatch):
    monkeypatch.setitem(POLICIES, "lfu", POLICIES["lru"])  # monkeypatch removes "lfu" after the test
    exec(compile(POLICY, "docs/extending.md", "exec"), {})
    rates = re.findall(r"^(\w+): ([\d.]+)% of (\d+) blocks$", capsys.readouterr().out, re.M)
    assert [name for name, _, _ in rates] == ["lru", "lfu"]
    assert rates[0][2] == rates[1][2]
    assert rates[0][1] != rates[1][1]
    assert min(float(rate) for _, rate, _ in rates) > 5


def test_extending_guide_model_generates_tokens(capsys):
    exec(compile(MODEL, "docs/extending.md", "exec"), {})
    tokens = [int(token) for token in re.findall(r"\d+", capsys.readouterr().out)]
    assert len(tokens) == 4
    assert max(tokens) < 100


def test_concepts_guide_kv_bytes_per_token_match_models():
    from kvtier.engine import ModelConfig
    from kvtier.engine.checkpoint import GgufFile, resolve

    page = (ROOT / "docs" / "concepts.md").read_text()
    models = GgufFile(resolve("smollm2")).config, ModelConfig("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
    small, large = (2 * each.num_layers * each.num_kv_heads * each.head_dim * 2 / 1024 for each in models)
    assert f"{small:g} KiB for SmolLM2-135M in bf16 and {large:g} KiB for Llama-3-8B" in page


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_docs_link_targets_exist(page):
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_docs_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in DOCS if page.name != "README.md" and f"({page.name})" not in index] == []


@pytest.mark.parametrize("page", ["extending.md", "tuning.md", "concepts.md", "operating.md"])
def test_files_named_in_docs_exist(page):
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+\w)`", (ROOT / "docs" / page).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_docs_reference_is_up_to_date():
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_reference.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
