"""`kvtier serve --cluster ray` starts a cluster of its own, and ends it."""

from __future__ import annotations

import psutil
import pytest

from ray_support import SERVE_OPTIONS, ask, wait_until
from server_support import ServerProcess


@pytest.mark.usefixtures("_ray_is_installed")
def test_serve_command_starts_and_ends_a_fleet(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.9:1")  # the address of another cluster, which must not be used
    server = ServerProcess(tmp_path / "log", "--model", str(tiny_model), "--replicas", "2", *SERVE_OPTIONS)
    try:
        assert ask(server.client(), "hello", 8, stream=True) == ask(server.client(), "hello", 8, stream=False)
        assert server.get("/health").status_code == 200
        pids = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        assert len(pids) > 5
    finally:
        code = server.stop(120)
    assert code == 0, server.log
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "end of the cluster")
