"""Run `kvtier serve` under the restrictions of a hardened container.

The server does not run as root. The root file system is read-only, there is no compiler, and temporary directories are
mounted noexec. Instead of a container, the tests use a mount namespace. Only root can create a mount namespace, so the
tests are skipped for other users.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from native_support import prebuilt_folder
from server_support import ServerProcess

USER = 65534
SCRIPT = r"""
set -eu
native=$1 model=$2 base=$3; shift 3
mount -t tmpfs -o mode=755 image /mnt                     # contains the files of the image
mkdir /mnt/native /mnt/model /mnt/data
cp "$native"/*.so /mnt/native/
cp -r "$model"/. /mnt/model/
chmod -R go+rX /mnt/model
case $base in /root/*)                                    # Python is below /root, which other users cannot enter
    mkdir /mnt/python; mount --bind "$base" /mnt/python
    mount -t tmpfs -o mode=755 home /root; mkdir -p "$base"; mount --bind /mnt/python "$base" ;;
esac
for name in cc gcc clang c99 tcc as ld; do                # no compiler
    for path in $(which -a $name || true); do mount --bind /dev/null "$(readlink -f "$path")"; done
done
mount -t tmpfs -o noexec,nosuid,nodev,mode=700,uid=65534 data /mnt/data
for folder in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o noexec,nosuid,nodev,mode=1777 tmp $folder; done
mount -o remount,ro /mnt
mount -o remount,ro,bind /
cp /bin/true /tmp/true
exec setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs --bounding-set -all "$@"
"""
PROBE = """
! touch /probe 2> /dev/null || { echo the root is writable; exit 1; }
! /tmp/true 2> /dev/null || { echo programs can run from the temporary directory; exit 1; }
! cc --version 2> /dev/null || { echo there is a compiler; exit 1; }
id -u
"""


@pytest.fixture
def container(tiny_model: Path) -> list[str]:
    """Return a prefix for command lines. A command with this prefix runs in the container."""
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", SCRIPT, "container"]
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("mount namespaces need root, unshare and setpriv")
    command += [str(prebuilt_folder()), str(tiny_model), sys.base_prefix]
    probed = subprocess.run([*command, "sh", "-c", PROBE], capture_output=True, text=True, timeout=60)
    if "permission" in probed.stderr.lower() or "not permitted" in probed.stderr:
        pytest.skip(f"this machine allows no mount namespaces: {probed.stderr.strip()}")
    assert (probed.returncode, probed.stdout.strip()) == (0, str(USER)), probed.stdout + probed.stderr
    found = subprocess.run(
        [*command, sys.executable, "-c", "import kvtier"], capture_output=True, text=True, timeout=60
    )
    if found.returncode:
        pytest.skip(f"user {USER} cannot run the environment at {sys.prefix}: {found.stderr.strip()[-200:]}")
    return command


@pytest.mark.parametrize("has_prebuilt", [True, False], ids=["prebuilt", "without"])
def test_hardened_container_serves_with_or_without_prebuilt_code(container, tmp_path, has_prebuilt):
    variables = {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", "KVTIER_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    variables["KVTIER_NATIVE_DIR"] = "/mnt/native" if has_prebuilt else ""
    arguments = ["--model", "/mnt/model", "--disk", "/mnt/data/kv", "--disk-bytes", "64MiB", "--host-blocks", "64"]
    server = ServerProcess(tmp_path / "log", *arguments, env=variables, prefix=container)
    try:
        body = {"model": server.model, "prompt": "a" * 64, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers = [server.post("/v1/completions", body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], server.log
        assert answers[0].json()["choices"][0]["text"] == answers[1].json()["choices"][0]["text"]
        engine = psutil.Process(server.engine_pid)
        assert engine.uids().effective == USER
        assert "CapEff:\t0000000000000000" in Path(f"/proc/{engine.pid}/status").read_text()
        libraries = Path(f"/proc/{engine.pid}/maps").read_text()
        assert ("/mnt/native/engine-" in libraries) == has_prebuilt
        warnings = [line for line in server.log.splitlines() if "which is slower" in line]
        if has_prebuilt:
            assert warnings == []
        else:
            names = ("CPU kernels", "host copies", "checksums", "learned eviction")
            assert [sum(name in line for line in warnings) for name in names] == [1] * 4
            assert all("cannot create the cache directory" in line for line in warnings)
    finally:
        code = server.stop()
    assert code == 0, server.log
