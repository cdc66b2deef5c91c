"""The dashboard and the rules in deploy/ use only metrics of the server, and Prometheus accepts all their queries."""

from __future__ import annotations

import json
import math
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
RULE_TESTS = RULES.with_name("kvtier.rules.test.yml")
DASHBOARD = json.loads((DEPLOY / "grafana" / "kvtier.json").read_text())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def dashboard_queries() -> list[str]:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [query.replace('{instance=~"$instance"}', "") for query in queries]


def rule_queries() -> list[str]:
    return re.findall(r"^ *expr: (.*)$", RULES.read_text(), re.MULTILINE)


def test_metrics_in_dashboard_and_rules_exist(server):
    page = server.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    names = {
        name
        for query in dashboard_queries() + rule_queries()
        for name in re.findall(r"(?:kvtier_|vllm:|process_)\w+", query)
    }
    assert len(names) > 12
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} - known == set()


def test_panels_of_the_dashboard_have_unique_ids_and_titles():
    for key in ("id", "title"):
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (apt-get install prometheus)")
def test_promtool_accepts_the_rules_and_the_configuration():
    for command in (["check", "rules", str(RULES)], ["check", "config", str(RULES.with_name("prometheus.yml"))]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (apt-get install prometheus)")
def test_every_alert_fires_in_its_unit_test():
    done = subprocess.run(["promtool", "test", "rules", str(RULE_TESTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = re.findall(r"^ *alertname: (\w+)$", RULE_TESTS.read_text(), re.MULTILINE)
    assert sorted(tested) == sorted(re.findall(r"^ *- alert: (\w+)$", RULES.read_text(), re.MULTILINE))


class Prometheus:
    """A real Prometheus that uses the configuration and the rules of deploy/ and scrapes one server every second."""

    def __init__(self, folder: Path, metrics_port: int) -> None:
        config = RULES.with_name("prometheus.yml").read_text().replace("15s", "1s").replace("9400", str(metrics_port))
        (folder / "prometheus.yml").write_text(config)
        shutil.copy(RULES, folder)
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        options = ["--config.file", str(folder / "prometheus.yml"), "--storage.tsdb.path", str(folder / "tsdb")]
        with (folder / "prometheus.log").open("w") as log:
            command = ["prometheus", *options, "--web.listen-address", f"127.0.0.1:{port}"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._client = httpx.Client(verify=VERIFY, timeout=30)

    def get(self, path: str, **params: str) -> dict | None:
        """Return the data of a reply, or None while Prometheus starts."""
        try:
            answer = self._client.get(f"{self._address}/api/v1/{path}", params=params)
        except httpx.ConnectError:
            return None
        if answer.status_code == 503:
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, query: str) -> list[float]:
        """Return the numbers of an instant query, without NaN."""
        data = self.get("query", query=query)
        found = [float(sample["value"][1]) for sample in data["result"]] if data is not None else []
        return [value for value in found if not math.isnan(value)]

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()


class Load:
    """Sends requests that use all tiers of a server. Some of the requests fail."""

    def __init__(self, server) -> None:
        self._server = server
        self._number = 0

    def run(self) -> None:
        """Send one of four prompts. After every twelve requests, four other prompts are used.

        Every fourth call also causes a 503.
        """
        prompt = f"{self._number // 12:04}{self._number % 4}" * 40
        body = {"model": self._server.model, "prompt": prompt, "max_tokens": 20, "temperature": 0}
        assert self._post("/v1/completions", body) == 200
        self._number += 1
        if self._number % 4 == 0:
            assert self._post("/control/sleep") == 200
            assert self._post("/v1/completions", body) == 503
            assert self._post("/control/wake") == 200

    def _post(self, path: str, body: dict | None = None) -> int:
        return self._server.post(path, body).status_code


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (apt-get install prometheus)")
def test_every_query_returns_data_from_a_real_prometheus(start, tmp_path):
    port = free_port()
    # Four prompts of 13 blocks fit into host memory, but not on the device. Therefore, blocks are evicted and loaded.
    tiers = ("--blocks", "24", "--host-blocks", "64", "--disk", str(tmp_path / "kv"), "--disk-bytes-per-day", "1GiB")
    server = start(*tiers, "--metrics-port", str(port))
    load, prometheus = Load(server), Prometheus(tmp_path, port)
    # The query of an alert returns data only while the alert fires. This test therefore removes the threshold from the
    # query. The unit tests of the rules check that each alert fires.
    alerts = [re.fullmatch(r"(.*) (?:==|>) [\d.]+", query)[1] for query in rule_queries()]
    queries = dashboard_queries() + alerts
    assert len(queries) > 25

    moving = [query for query in dashboard_queries() if "rate(" in query]

    def is_empty(query: str) -> bool:
        """True if a query has no data yet, or if it is a rate on the dashboard and its value is still 0."""
        values = prometheus.values(query)
        return not values or (query in moving and sum(values) <= 0)

    try:
        deadline = time.monotonic() + 300
        while queries := [query for query in queries if is_empty(query)]:
            assert time.monotonic() < deadline, queries
            load.run()
        (group,) = prometheus.get("rules")["groups"]
        assert [rule["name"] for rule in group["rules"] if rule["health"] not in ("ok", "unknown")] == []
        assert len(group["rules"]) == len(alerts)
        (target,) = prometheus.get("targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
    finally:
        prometheus.close()
