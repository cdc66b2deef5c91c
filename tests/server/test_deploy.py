"""The files in deploy/ use metrics that a server has, and Prometheus accepts them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from server_support import VERIFY

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "kvtier.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "kvtier.json").read_text())


def dashboard_queries() -> list[str]:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [query.replace('{instance=~"$instance"}', "") for query in queries]


def rule_queries() -> list[str]:
    return re.findall(r"^ *expr: (.*)$", RULES.read_text(), re.MULTILINE)


def test_metrics_in_dashboard_and_rules_exist(server):
    page = server.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    names = {
        name for query in dashboard_queries() + rule_queries() for name in re.findall(r"(?:kvtier_|vllm:)\w+", query)
    }
    assert len(names) > 12
    assert {re.sub(r"_bucket$", "", name) for name in names} - known == set()


def test_panels_of_the_dashboard_have_unique_ids_and_titles():
    for key in ("id", "title"):
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (apt-get install prometheus)")
def test_promtool_accepts_the_rules_and_the_configuration():
    for command in (["check", "rules", str(RULES)], ["check", "config", str(RULES.with_name("prometheus.yml"))]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (apt-get install prometheus)")
def test_queries_return_data_from_a_real_prometheus(start, tmp_path):
    ports = []
    for _ in range(2):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
    disk = ("--host-blocks", "64", "--disk", str(tmp_path / "kv"))
    server = start("--blocks", "64", *disk, "--metrics-port", str(ports[0]))
    config = RULES.with_name("prometheus.yml").read_text().replace("15s", "1s").replace("9400", str(ports[0]))
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(RULES, tmp_path)
    options = ["--config.file", str(tmp_path / "prometheus.yml"), "--storage.tsdb.path", str(tmp_path / "tsdb")]
    address = f"http://127.0.0.1:{ports[1]}"
    with (tmp_path / "prometheus.log").open("w") as log:
        prometheus = subprocess.Popen(
            ["prometheus", *options, "--web.listen-address", f"127.0.0.1:{ports[1]}"], stdout=log, stderr=log
        )
    # Queries of calls, decisions and errors return data only after such an event; these have data from the start.
    always = [query for query in dashboard_queries() if not re.search("decisions|store_objects", query)]
    assert len(always) > 12

    def without_data() -> list[str]:
        body = {"model": server.model, "prompt": "0123456789" * 20, "max_tokens": 20, "temperature": 0}
        assert server.post("/v1/completions", body).status_code == 200
        empty = []
        for query in always:
            try:
                answer = httpx.get(f"{address}/api/v1/query", params={"query": query}, verify=VERIFY, timeout=30)
            except httpx.ConnectError:
                return always
            assert answer.status_code in (200, 503), answer.text  # 503 while Prometheus starts
            if answer.status_code == 503 or not answer.json()["data"]["result"]:
                empty.append(query)
        return empty

    try:
        deadline = time.monotonic() + 60
        while missing := without_data():
            assert time.monotonic() < deadline, missing
            time.sleep(0.2)
    finally:
        prometheus.terminate()
        prometheus.wait()
