"""`--disk-secret` keeps one encryption key per tenant. Blocks encrypted with a deleted key are cache misses."""

from __future__ import annotations

from kvtier.storage.disk.keys import TenantKeys

SECRET = bytes(range(32))
API_KEY = "a-key-of-the-default-tenant"
PROMPT = "".join(chr(97 + number * number % 26) for number in range(320))


def test_server_finds_encrypted_blocks_until_key_is_deleted(start, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    disk = tmp_path / "kv"
    arguments = [
        "--disk",
        str(disk),
        "--disk-bytes",
        "64MiB",
        "--disk-secret",
        str(tmp_path / "secret"),
        "--always-load",
    ]

    def cached_tokens() -> int:
        server = start(*arguments, env={"KVTIER_API_KEY": API_KEY})
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/completions", body, API_KEY)
        assert answer.status_code == 200, answer.text
        assert server.stop() == 0
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached_tokens() == 0
    keys = TenantKeys(str(disk / "keys"), SECRET)
    assert keys.tenants == [b"default"]
    assert cached_tokens() >= 256
    assert keys.delete(b"default")
    assert cached_tokens() == 0
