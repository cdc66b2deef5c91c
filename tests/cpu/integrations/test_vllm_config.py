"""Settings of the vLLM connector: defaults, stores, errors that name the setting, and options of single requests."""

from __future__ import annotations

import math

import pytest

from kvtier.cache.config import WaitPolicy, WritePolicy
from kvtier.errors import ArgumentError
from kvtier.integrations.vllm.config import ConnectorConfig, RequestOptions


def test_config_without_settings_has_the_documented_defaults():
    assert ConnectorConfig.parse({}) == ConnectorConfig()
    assert ConnectorConfig.parse({}).host_bytes == 4 << 30


@pytest.mark.parametrize(("given", "expected"), [("16GiB", 16 << 30), ("1.5MB", 1_500_000), (4096, 4096)])
def test_config_host_bytes_accepts_numbers_and_units(given, expected):
    assert ConnectorConfig.parse({"host_bytes": given}).host_bytes == expected


def test_config_store_urls_get_names_and_sharing_from_the_scheme():
    urls = ["disk:/var/kv?bytes=1GiB", "redis://cache:6379", "disk:/other?bytes=1GiB"]
    stores = ConnectorConfig.parse({"stores": urls}).stores
    assert [(store.config.name, store.config.is_shared) for store in stores] == [
        ("disk", False),
        ("redis-1", True),
        ("disk-2", False),
    ]
    assert all(store.is_persistent for store in stores)
    assert not ConnectorConfig.parse({"stores": ["memory:?bytes=1MiB"]}).stores[0].is_persistent


@pytest.mark.parametrize("scheme", ["redis", "rediss", "s3", "gs", "az", "mooncake"])
def test_config_store_on_a_server_is_shared(scheme):
    assert ConnectorConfig.parse({"stores": [f"{scheme}://place"]}).stores[0].config.is_shared


def test_config_store_table_sets_wait_and_write_policy():
    table = {"url": "redis://cache", "name": "shared", "wait": "wait", "write": "write_back", "max_blocks": 7}
    store = ConnectorConfig.parse({"stores": [table]}).stores[0].config
    assert (store.name, store.wait, store.saving.write) == ("shared", WaitPolicy.WAIT, WritePolicy.BACK)
    assert store.saving.max_blocks == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hostbytes": 1}, "unknown setting hostbytes; known: host_bytes"),
        ({"host_bytes": "lots"}, "such as 16GiB"),
        ({"host_bytes": 0}, "must be positive"),
        ({"stores": "disk:/kv"}, "list of URLs"),
        ({"stores": ["/var/kv"]}, "a URL or a table"),
        ({"stores": [{"url": "redis://a", "patience": 1}]}, "redis://a: unknown setting patience"),
        ({"stores": [{"url": "redis://a", "wait": "long"}]}, "redis://a: 'long' is not a valid WaitPolicy"),
        ({"layout": "HND"}, "layout is auto or keep"),
        ({"on_reset": "maybe"}, "on_reset is memory or weights"),
    ],
)
def test_config_invalid_setting_raises_and_names_it(settings, message):
    with pytest.raises(ArgumentError, match=message):
        ConnectorConfig.parse(settings)


def test_config_save_limit_is_quarter_of_device_but_at_least_256():
    config = ConnectorConfig().cache_config(100, 4000)
    assert config.host.saving.max_blocks == 1000
    assert ConnectorConfig().cache_config(100, 400).host.saving.max_blocks == 256
    assert ConnectorConfig(max_saving_blocks=5).cache_config(100, 400).host.saving.max_blocks == 5
    assert not config.owns_device


def test_config_secret_is_read_from_the_file(tmp_path):
    (tmp_path / "key").write_bytes(b"of the operator\n")
    config = ConnectorConfig.parse({"secret_file": str(tmp_path / "key")})
    assert config.cache_config(1, 1).secret == b"of the operator"


def test_request_options_read_kvtier_params():
    options = RequestOptions.parse({"kvtier": {"save": False, "priority": 3, "ttl": 60}, "other": 1})
    assert (options.save, options.load) == (False, True)
    assert (options.retention.priority, options.retention.ttl) == (3, 60)
    assert RequestOptions.parse(None).retention.ttl == math.inf


@pytest.mark.parametrize("given", [{"kvtier": {"sav": False}}, {"kvtier": {"error": "x"}}, {"kvtier": 3}])
def test_request_options_with_invalid_params_contain_error(given):
    options = RequestOptions.parse(given)
    assert options.explain
    assert "unknown setting" in options.error
    assert options.save
    assert options.load
