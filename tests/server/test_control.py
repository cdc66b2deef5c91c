"""Control endpoints for the cache of a running server."""

from __future__ import annotations

import uuid

import pytest

from server_support import ServerProcess

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def tiered(tiny_model, tmp_path_factory):
    """Yield a server with the tiers device, host and disk."""
    folder = tmp_path_factory.mktemp("tiered")
    options = (
        "--blocks",
        "64",
        "--host-blocks",
        "256",
        "--disk",
        str(folder / "kv"),
        "--disk-bytes",
        "64MiB",
        "--always-load",
    )
    process = ServerProcess(folder / "log", "--model", str(tiny_model), "--threads", "1", *options)
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log


def ask(server, prompt, **more):
    """Generate one token after a prompt. Return the number of cached prompt tokens."""
    answer = server.post(TEXT, {"model": server.model, "prompt": prompt, "max_tokens": 1, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def control(server, name, body=None, status=200):
    answer = server.post(f"/control/{name}", {} if body is None else body)
    assert answer.status_code == status, answer.text
    return answer.json()


def fresh(num_tokens=160):
    return (uuid.uuid4().hex * 64)[:num_tokens]


def last_request(server):
    return server.state()["recent"][0]


def test_control_tiers_reports_sizes_and_usage(tiered):
    ask(tiered, fresh())
    tiers = {tier["name"]: tier for tier in tiered.get("/control/tiers").json()["tiers"]}
    assert [*tiers] == ["device", "host", "disk"]
    assert (tiers["device"]["num_blocks"], tiers["host"]["num_blocks"]) == (64, 256)
    for tier in tiers.values():
        assert 0 <= tier["num_pinned"] <= tier["num_used"] <= tier["num_blocks"]
        assert tier["bytes"] >= tier["used_bytes"]
    assert tiers["device"]["num_used"] >= 10
    assert tiers["device"]["bytes"] == 64 * tiers["device"]["block_bytes"]
    assert tiers["disk"]["bytes"] == 64 << 20


def test_state_reports_hits_by_tier_and_bytes_by_direction(tiered):
    prompt = fresh()
    before = tiered.state()["hits"]["by_tier"]["device"]
    ask(tiered, prompt)
    assert ask(tiered, prompt) == 159  # the last token is computed for its logits
    state = tiered.wait_for(lambda state: any(each["target"] == "disk" for each in state["transfers"]))
    assert state["hits"]["by_tier"]["device"] - before >= 144  # nine of the ten blocks
    assert state["recent"][0]["tokens_from"]["device"] >= 144
    directions = {(each["source"], each["target"]): each for each in state["transfers"]}
    assert directions["device", "host"]["bytes"] >= 10 * state["tiers"][0]["block_bytes"]
    assert directions["host", "disk"]["gb_per_s"] >= 0
    ghost = state["ghost"]
    assert ghost["num_blocks"] == 256
    sizes = [point["num_blocks"] for point in ghost["points"]]
    assert sizes == sorted(sizes)
    assert 256 in sizes
    assert all(0 <= point["hit_rate"] <= 1 for point in ghost["points"])


def test_state_estimates_hit_rates_of_learned_policy(tiered, start):
    ask(tiered, fresh())
    ghost = tiered.state()["ghost"]
    assert ghost["policy"] == "learned"
    assert "learned" not in ghost  # the points are already those of the learned policy
    other = start("--policy", "lru")
    ask(other, fresh())
    ghost = other.state()["ghost"]
    assert ghost["policy"] == "lru"
    assert [point["num_blocks"] for point in ghost["learned"]] == [point["num_blocks"] for point in ghost["points"]]


def test_pinned_prompt_survives_eviction_pressure(tiered):
    prompt = fresh()
    ask(tiered, prompt)
    assert control(tiered, "pin", {"name": "mine", "prompt": prompt})["pinned_tokens"] == 160
    assert control(tiered, "pin", {"name": "mine", "prompt": prompt}, 400)["error"]["message"]
    for _ in range(8):
        ask(tiered, fresh())
    assert ask(tiered, prompt) == 159
    assert last_request(tiered)["tokens_from"] == {"device": 159}
    control(tiered, "unpin", {"name": "mine"})
    assert control(tiered, "unpin", {"name": "mine"}, 400)["error"]["message"]


def test_request_without_room_next_to_pins_is_503(start):
    server = start("--blocks", "8")
    ask(server, prompt := fresh(112))
    assert control(server, "pin", {"name": "most", "prompt": prompt})["pinned_tokens"] == 112
    body = {"model": server.model, "prompt": fresh(40), "max_tokens": 1}
    for stream in (False, True):
        refused = server.post(TEXT, {**body, "stream": stream})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_room"
        assert "3 slots of device wanted, 1 free" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
    assert server.state()["recent"][0]["finish"] == "refused"
    long = server.post(TEXT, {**body, "prompt": fresh(10), "max_tokens": 40, "ignore_eos": True}).json()
    # one free block for 16 tokens: 10 prompt tokens and 6 generated ones; the last generated token needs no slot
    assert (long["choices"][0]["finish_reason"], long["usage"]["completion_tokens"]) == ("length", 7)
    control(server, "unpin", {"name": "most"})
    assert server.post(TEXT, body).status_code == 200


def test_demoted_prompt_is_loaded_from_the_host(tiered):
    prompt = fresh()
    ask(tiered, prompt)
    assert control(tiered, "demote", {"prompt": prompt})["blocks"] == 10
    assert ask(tiered, prompt) >= 144
    assert last_request(tiered)["tokens_from"].get("host", 0) >= 128


def test_dropped_prompt_is_removed_from_all_tiers(tiered):
    prompt = fresh()
    ask(tiered, prompt)
    assert control(tiered, "drop", {"prompt": prompt})["blocks"] >= 10
    assert ask(tiered, prompt) < 16  # less than one block: only a few first letters are shared with other prompts


def test_control_prompt_can_be_token_ids_or_salted_messages(tiered):
    messages = [{"role": "user", "content": fresh()}]
    body = {"model": tiered.model, "messages": messages, "max_tokens": 1, "cache_salt": "mine"}
    assert tiered.post("/v1/chat/completions", body).status_code == 200
    assert control(tiered, "drop", {"messages": messages})["blocks"] == 0
    assert control(tiered, "drop", {"messages": messages, "cache_salt": "mine"})["blocks"] > 0
    tokens = [7] * 64
    ask(tiered, tokens)
    assert control(tiered, "drop", {"prompt": tokens})["blocks"] == 4


def test_reset_clears_the_disk_only_if_requested(tiered):
    prompt = fresh()
    ask(tiered, prompt)
    control(tiered, "demote", {"prompt": prompt})  # copies the blocks to the host and the disk before the reset
    control(tiered, "reset")
    assert tiered.state()["tiers"][0]["num_used"] == 0
    # The last block is not fetched, because the last token is always computed.
    assert control(tiered, "prefetch", {"prompt": prompt})["blocks"] == 9
    assert ask(tiered, prompt) >= 144
    control(tiered, "reset", {"clear_stores": True})
    assert ask(tiered, prompt) == 0


def test_sleep_rejects_requests_and_wake_keeps_the_cache(tiered):
    prompt = fresh()
    ask(tiered, prompt)
    control(tiered, "sleep")
    assert tiered.state()["status"] == "sleeping"
    assert tiered.get("/health").status_code == 503
    refused = tiered.post(TEXT, {"model": tiered.model, "prompt": prompt, "max_tokens": 1})
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    control(tiered, "wake")
    assert tiered.get("/health").status_code == 200
    assert ask(tiered, prompt) >= 144


def test_resize_changes_tier_size_and_prompt_limit(tiered):
    prompt = fresh(2000)
    too_long = tiered.post(TEXT, {"model": tiered.model, "prompt": prompt, "max_tokens": 1})
    assert too_long.status_code == 400  # 64 blocks are 1024 tokens
    try:
        control(tiered, "resize", {"tier": "device", "num_blocks": 128})
        assert tiered.state()["tiers"][0]["num_blocks"] == 128
        assert ask(tiered, prompt) == 0
        control(tiered, "resize", {"tier": "host", "num_blocks": 300})
        assert tiered.state()["tiers"][1]["num_blocks"] == 300
    finally:
        control(tiered, "resize", {"tier": "device", "num_blocks": 64})
        control(tiered, "resize", {"tier": "host", "num_blocks": 256})


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("pin", {"prompt": "x"}, "name"),
        ("drop", {}, "prompt"),
        ("drop", {"prompt": []}, "prompt"),
        ("drop", {"prompt": [10**6]}, "prompt"),
        ("drop", {"prompt": "x", "tenant": "unknown"}, "tenant"),
        ("resize", {"tier": "disk", "num_blocks": 5}, "tier"),
        ("resize", {"tier": "device", "num_blocks": 0}, "num_blocks"),
        ("resize", {"tier": "device", "num_blocks": (1 << 31) - 1}, "num_blocks"),  # more than the machine's memory
        ("resize", {"tier": "host", "num_blocks": (1 << 31) - 1}, "num_blocks"),
        ("reset", {"all": True}, "all"),
    ],
)
def test_error_for_invalid_control_body_names_the_field(tiered, name, body, param):
    error = control(tiered, name, body, 400)["error"]
    assert (error["param"] or "").split(".")[0] == (param or "")
