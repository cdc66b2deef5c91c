"""Check the features of S3 stores: conditional puts, signatures and foreign objects."""

from __future__ import annotations

import contextlib
import uuid

import pytest

from kvtier.errors import StoreError
from kvtier.storage import ObjectStatus
from kvtier.storage.open import open_store
from storage_support import get, key_of, payload_of, put
from store_servers import S3_KEY, S3_SECRET, raw_s3


def url_of(port, prefix, key=S3_KEY, secret=S3_SECRET, options="") -> str:
    return f"s3://{key}:{secret}@test/{prefix}?endpoint=http://127.0.0.1:{port}&region=us-east-1{options}"


def test_s3_equal_block_is_not_uploaded_again(s3_port):
    import obstore

    prefix = uuid.uuid4().hex
    path = f"{prefix}/{key_of(1).hex()}"
    with contextlib.closing(open_store(url_of(s3_port, prefix))) as one:
        assert put(one, 1)[0].reason == ""
        first = obstore.head(raw_s3(s3_port), path)
        with contextlib.closing(open_store(url_of(s3_port, prefix))) as other:
            assert put(other, 1)[0].reason == "already stored"
            assert obstore.head(raw_s3(s3_port), path) == first
            assert put(other, 1, version=1)[0].reason == ""
        assert get(one, 1)[1] == payload_of(1, version=1)


def test_s3_object_that_expires_soon_is_uploaded_again(s3_port):
    prefix = uuid.uuid4().hex
    with contextlib.closing(open_store(url_of(s3_port, prefix, options="&ttl=1h"))) as short:
        put(short, 1)
    with contextlib.closing(open_store(url_of(s3_port, prefix, options="&ttl=2h"))) as long:
        assert put(long, 1)[0].reason == ""
        assert put(long, 1)[0].reason == "already stored"


def test_s3_error_for_wrong_credentials_hides_the_secret(s3_port):
    with pytest.raises(StoreError, match="cannot open") as refused:
        open_store(url_of(s3_port, "p", secret="another-secret"))
    assert "another-secret" not in str(refused.value)
    assert "credentials" in str(refused.value)


def test_s3_foreign_objects_under_prefix_are_ignored(s3_port):
    import obstore

    prefix = uuid.uuid4().hex
    for name in ("readme.txt", "folder/" + "0" * 64):
        obstore.put(raw_s3(s3_port), f"{prefix}/{name}", b"not ours")
    with contextlib.closing(open_store(url_of(s3_port, prefix))) as store:
        put(store, 1)
        assert [each.key for each in store.scan().objects] == [key_of(1)]
        assert store.contains([key_of(2)])[0].status is ObjectStatus.MISSING
