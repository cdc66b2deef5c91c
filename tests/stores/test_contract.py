"""Stores on real servers, and Google Cloud Storage on a stub, fulfil the store contract."""

from __future__ import annotations

import uuid
from urllib.parse import quote

import pytest

from gcs_stub import TOKEN
from kvtier.storage.open import open_store
from store_servers import AZURE_ACCOUNT, AZURE_KEY, S3_KEY, S3_SECRET

pytest.register_assert_rewrite("store_contract")
from store_contract import *  # noqa: E402, F403

AZURE = f"az://{AZURE_ACCOUNT}:{quote(AZURE_KEY, safe='')}@test/{{id}}"
SECRET = bytes(range(32))
STORES = {
    "redis": ("redis_port", "redis://127.0.0.1:{0}/0?prefix={id}:", None),
    "redis, sealed": ("redis_port", "redis://127.0.0.1:{0}/0?prefix={id}:&ttl=1h", SECRET),
    "redis, compressed": ("redis_port", "redis://127.0.0.1:{0}/0?prefix={id}:&compression=zlib", None),
    "redis cluster": ("cluster_ports", "redis://127.0.0.1:{0[0]}?cluster=yes&prefix={id}:", None),
    "s3": ("s3_port", f"s3://{S3_KEY}:{S3_SECRET}@test/{{id}}?endpoint=http://127.0.0.1:{{0}}&region=us-east-1", None),
    "s3, sealed": (
        "s3_port",
        f"s3://{S3_KEY}:{S3_SECRET}@test/{{id}}?endpoint=http://127.0.0.1:{{0}}&region=us-east-1",
        SECRET,
    ),
    "azure": ("azure_port", f"{AZURE}?endpoint=http://127.0.0.1:{{0}}/{AZURE_ACCOUNT}", None),
    "azure, sealed": ("azure_port", f"{AZURE}?endpoint=http://127.0.0.1:{{0}}/{AZURE_ACCOUNT}", SECRET),
    "gcs, stub": ("gcs", "gs://test/{id}?endpoint=http://127.0.0.1:{0.server_port}", None),
    "mooncake": ("mooncake_client", "", None),
    "memory, then redis": ("redis_port", ["memory:?bytes=64MiB&write=no", "redis://127.0.0.1:{0}?prefix={id}:"], None),
}


@pytest.fixture(params=STORES)
def store(request, monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
    server, urls, secret = STORES[request.param]
    place, unique = request.getfixturevalue(server), uuid.uuid4().hex
    urls = [urls] if isinstance(urls, str) else urls
    filled = [url.format(place, id=unique) for url in urls]
    made = open_store(filled, secret=secret) if filled[0] else place(f"{unique}-")
    yield made
    made.close()
