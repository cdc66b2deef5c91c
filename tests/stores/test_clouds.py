"""Check the Azure store against Azurite, and the requests of the Google Cloud Storage store against a stub."""

from __future__ import annotations

import base64
import contextlib
import json
import uuid
from urllib.parse import quote, unquote

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from gcs_stub import TOKEN
from kvtier.errors import StoreError
from kvtier.storage import ObjectStatus
from kvtier.storage.open import open_store
from storage_support import all_keys, get, key_of, payload_of, put
from store_servers import AZURE_ACCOUNT, AZURE_KEY


@pytest.fixture
def azure_url(azure_port):
    def url(container: str = "test", key: str = AZURE_KEY) -> str:
        user = f"{AZURE_ACCOUNT}:{quote(key, safe='')}"
        return f"az://{user}@{container}/{uuid.uuid4().hex}?endpoint=http://127.0.0.1:{azure_port}/{AZURE_ACCOUNT}"

    return url


@pytest.fixture
def gcs_url(gcs, monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
    gcs.requests.clear()
    return f"gs://test/some/prefix-{uuid.uuid4().hex}?endpoint=http://127.0.0.1:{gcs.server_port}"


def test_azure_stores_share_objects_and_skip_equal_writes(azure_url):
    url = azure_url()
    with contextlib.closing(open_store(url)) as one, contextlib.closing(open_store(url)) as other:
        assert put(one, 1).ok
        assert put(other, 1)[0].reason == "already stored"
        assert put(other, 1, version=1)[0].reason == ""
        assert get(one, 1)[1] == payload_of(1, version=1)
        assert all_keys(one) == [key_of(1)]


def test_azure_error_for_wrong_key_hides_the_key(azure_url):
    wrong = "d3Jvbmcta2V5LXdyb25nLWtleS13cm9uZy1rZXktd3Jvbmc="
    with pytest.raises(StoreError, match="cannot open az://test/") as refused:
        open_store(azure_url(key=wrong))
    assert wrong not in str(refused.value)


def test_azure_missing_container_raises(azure_url):
    with pytest.raises(StoreError, match="cannot open az://absent/"):
        open_store(azure_url("absent"))


def test_gcs_requests_have_bearer_token_and_prefix(gcs, gcs_url):
    with contextlib.closing(open_store(gcs_url)) as store:
        assert put(store, 1).ok
        assert put(store, 1)[0].reason == "already stored"  # the stub checks x-goog-if-generation-match
        assert get(store, 1)[1] == payload_of(1)
        assert store.remove([key_of(1)]).ok
        assert get(store, 1)[0].status is ObjectStatus.MISSING
    prefix = gcs_url.partition("?")[0].removeprefix("gs://test/")
    path = f"/test/{prefix}/{key_of(1).hex()}"
    asked = [(method, unquote(each)) for method, each in gcs.requests]
    assert asked[0] == ("GET", f"/test?list-type=2&prefix={prefix}/")
    assert {method for method, each in asked if each == path} == {"PUT", "GET", "HEAD", "DELETE"}


def test_gcs_error_for_wrong_token_hides_the_token(gcs_url, monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "wrong-token")
    with pytest.raises(StoreError, match="cannot open gs://test/some/prefix") as refused:
        open_store(gcs_url)
    assert "wrong-token" not in str(refused.value)


def signed_claims(token: str, key: rsa.RSAPublicKey) -> dict[str, object]:
    """Return the claims of a JSON web token. If the RS256 signature is wrong, raise InvalidSignature."""
    signed, _, signature = token.rpartition(".")
    key.verify(base64url(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    header, claims = (json.loads(base64url(part)) for part in signed.split("."))
    assert header["alg"] == "RS256"
    return claims


def base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@pytest.mark.parametrize("is_right_key", [True, False])
def test_gcs_requests_are_signed_by_the_service_account(gcs, tmp_path, monkeypatch, is_right_key):
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN", raising=False)
    key, other = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    account = {"private_key": key.private_bytes(*form).decode(), "private_key_id": "id", "client_email": "kv@test"}
    (tmp_path / "account.json").write_text(json.dumps({"type": "service_account", **account}))
    claims = []

    def accepts(token: str) -> bool:
        try:
            claims.append(signed_claims(token, (key if is_right_key else other).public_key()))
        except InvalidSignature:
            return False
        return True

    monkeypatch.setattr(gcs, "accepts", accepts)
    url = f"gs://test/{uuid.uuid4().hex}?endpoint=http://127.0.0.1:{gcs.server_port}"
    url += f"&credentials={tmp_path}/account.json"
    if not is_right_key:
        with pytest.raises(StoreError, match="401 Unauthorized") as refused:
            open_store(url)
        assert "PRIVATE KEY" not in str(refused.value)
        return
    with contextlib.closing(open_store(url)) as store:
        assert put(store, 1).ok
        assert get(store, 1)[1] == payload_of(1)
    assert {(each["iss"], each["sub"]) for each in claims} == {("kv@test", "kv@test")}
    assert all(each["iat"] < each["exp"] for each in claims)


def test_gcs_unreadable_credentials_raise(tmp_path):
    (tmp_path / "credentials").write_text("not a service account")
    with pytest.raises(StoreError, match="cannot open gs://test"):
        open_store(f"gs://test/kv?credentials={tmp_path}/credentials")
