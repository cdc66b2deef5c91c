"""Options, variables and metrics in docs/operating.md and the Dockerfile exist. docs/api.md has the whole API."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.cli.main import main
from kvtier.cli.serve import _tenants

ROOT = Path(__file__).resolve().parents[2]
API, OPERATING = ((ROOT / "docs" / name).read_text() for name in ("api.md", "operating.md"))


@pytest.fixture
def flags(capsys):
    main(["completion", "bash", "--json"])
    return json.loads(capsys.readouterr().out)


def test_api_page_lists_the_paths_of_the_spec(server):
    spec = server.get("/openapi.json").json()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in spec.items() for method in methods}
    documented = {*re.findall(r"`((?:GET|POST) /[^`]*)`", API)} - {"GET /", "GET /openapi.json"}
    assert documented == served


def test_curl_command_on_api_page_gets_a_completion(server):
    command = shlex.split(re.search(r"^    (curl .*?\})'$", API, re.DOTALL | re.MULTILINE)[0])
    url = command[command.index("-s") + 1].replace("http://127.0.0.1:8000", "")
    body = json.loads(command[command.index("-d") + 1]) | {"model": server.model}
    assert server.post(url, body).json()["choices"][0]["finish_reason"] == "length"


def test_api_page_documents_every_completion_field(server):
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    fields = {*schemas["ChatRequest"]["properties"], *schemas["CompletionRequest"]["properties"]}
    section = API[API.index("## Completions") : API.index("## Errors")]
    assert {name for name in fields if f"`{name}`" not in section} == set()


def test_api_page_documents_every_state_field(server):
    server.post("/v1/completions", {"model": server.model, "prompt": "x", "max_tokens": 1})
    state = server.state()
    section = API[API.index("## GET /state") :]
    nested = (state, state["tiers"][0], state["hits"], state["ttft"], state["recent"][0], state["ghost"])
    missing = {name for each in nested for name in each if f"`{name}`" not in section}
    assert missing == {"holds"}  # only tests use this field


def test_options_and_variables_on_operating_page_exist(flags):
    known = {flag for names in flags.values() for flag in names}
    # options of pip, docker and helm
    other = {"--index-url", "--build-arg", "--time", "--read-only", "--tmpfs", "--cap-drop", "--security-opt", "--set"}
    for text in (OPERATING, (ROOT / "Dockerfile").read_text().split("ENTRYPOINT")[1]):
        assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)} - other <= known
    without_flag = {"KVTIER_API_KEY", "KVTIER_ADMIN_KEY", "KVTIER_CONFIG", "KVTIER_CACHE_DIR"}
    without_flag |= {"KVTIER_NATIVE_DIR", "KVTIER_CPU_ISA"}
    variables = {*re.findall(r"KVTIER_[A-Z_]+", OPERATING)} - without_flag
    assert variables <= {"KVTIER_" + flag[2:].upper().replace("-", "_") for flag in known}


def test_example_settings_on_operating_page_are_valid(flags):
    file = tomllib.loads(re.search(r"```toml\n(.*?)```", OPERATING, re.DOTALL)[1])
    assert {f"--{name}" for name in file["serve"]} <= {*flags["serve"]}
    tenants = _tenants(file["tenants"], {})
    assert [(tenant.name, tenant.admin) for tenant in tenants] == [("shop", False), ("operator", True)]


def test_metrics_page_lists_every_metric_of_a_server(server):
    server.post("/v1/completions", {"model": server.model, "prompt": "x", "max_tokens": 2, "ignore_eos": True})
    page = server.get("/metrics").text
    texts = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    labels = {
        family.name + ("_total" if family.type == "counter" else ""): {*sample.labels} - {"le"}
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    rows = dict(re.findall(r"^\| `([\w:]+)` (\| .*)$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    served = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    assert {*rows} ^ {*served} == set()
    for name, row in rows.items():
        _, kind, named, text, _ = (cell.strip() for cell in row.split("|"))
        assert (kind, text) == (served[name], texts[name]), name
        expected = {*re.findall(r"\w+", named)} | ({"model_name", "engine"} if name.startswith("vllm:") else set())
        assert name not in labels or expected == labels[name], name


def test_metrics_on_operating_page_exist(server):
    metrics = server.get("/metrics").text
    for name in re.findall(r"`(kvtier_[a-z_]+)", OPERATING):
        assert f"# TYPE {name} " in metrics, name
