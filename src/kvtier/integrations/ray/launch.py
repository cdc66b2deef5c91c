"""Starts a fleet on a running Ray cluster, or on a new cluster that ends with this process."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from kvtier.errors import UnavailableError
from kvtier.integrations.ray.app import fleet_app
from kvtier.integrations.ray.config import RayConfig

_log = logging.getLogger("kvtier.server")
APPLICATION = "kvtier"
_STORE_BYTES = 100 << 20  # size of Ray's object store; only messages above 100 KB use it
_LOOPBACK = "127.0.0.2"  # address of a local cluster; Ray would replace 127.0.0.1 by a public address of the machine
_OTHER_CPUS = 1.0  # for the front end and the actors of Serve


def serve_fleet(config: RayConfig, ready: Callable[[str], object]) -> int:
    """Serve until SIGTERM or SIGINT, then drain and stop the application. Return the exit code.

    If this process started the cluster, stop the cluster too.
    """
    server = config.server
    port = server.port or _free_port(server.host)
    try:
        _connect(config)
        serve.start(http_options=HTTPOptions(host=server.host, port=port))
        serve.run(fleet_app(config), name=APPLICATION)
    except (RuntimeError, ConnectionError, OSError) as error:
        ray.shutdown()
        raise UnavailableError(f"the fleet did not start: {error}") from error
    except BaseException:
        ray.shutdown()
        raise
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    host = f"[{server.host}]" if ":" in server.host else server.host
    ready(f"http://{host}:{port}")
    signal.sigwait(signals)
    _log.info("draining the replicas")
    serve.delete(APPLICATION)
    if not config.address:
        serve.shutdown()
    ray.shutdown()
    return 0


def _connect(config: RayConfig) -> None:
    if config.address:
        ray.init(config.address, log_to_driver=False)
        return
    ray.init(
        "local",  # by default Ray would connect to any cluster that runs on this machine
        num_cpus=max(1, round(config.most_replicas * config.replica_cpus + _OTHER_CPUS)),
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        log_to_driver=False,
        _node_ip_address=_LOOPBACK,
    )


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
