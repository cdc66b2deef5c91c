"""Functions that Vllm.run executes inside a vLLM process, because they need vLLM's objects."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

from vllm_driver import Answer, Driver


class Ledger:
    """Compares the bytes of every loaded block with the bytes that vLLM computed for the same block.

    The Ledger is independent of kvtier: it identifies blocks by vLLM's block hashes, and observes loads through the
    calls that vLLM makes. vLLM may compute a block several times with different rounding. Each result is valid.
    """

    def __init__(self, driver: Driver) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._driver = driver
        self._computed: dict[Any, set[int]] = {}
        """vLLM's block hash -> checksums of the computed bytes."""
        self._local: dict[str, int] = {}
        """Request -> number of leading blocks that vLLM found on the device."""
        self._loads: dict[str, tuple[int, int]] = {}
        """Request -> range of its loaded blocks that have not been compared yet."""
        self._done: dict[str, int] = {}
        """Request -> number of leading blocks that need not be recorded as computed.

        These are local hits, loaded blocks (`_look` compares them), and blocks already recorded.
        """
        self._failed: set[int] = set()
        self.num_compared = 0
        driver.after_step.append(self._after_step)
        connector = driver.scheduler.connector
        self._wrap(connector, "get_num_new_matched_tokens", self._asked)
        self._wrap(connector, "update_state_after_alloc", self._allocated)
        self._wrap(connector, "request_finished", self._finished)
        worker = get_kv_transfer_group()
        errors = worker.get_block_ids_with_load_errors
        worker.get_block_ids_with_load_errors = lambda: self._note_failed(errors())

    @staticmethod
    def _wrap(target: Any, name: str, before: Any) -> None:
        inner = getattr(target, name)

        def outer(*args: Any) -> Any:
            before(*args)
            return inner(*args)

        setattr(target, name, outer)

    def _note_failed(self, blocks: set[int]) -> set[int]:
        self._failed |= blocks
        return blocks

    @property
    def _block_tokens(self) -> int:
        return self._driver.scheduler.block_size

    def _asked(self, request: Any, num_computed_tokens: int) -> None:
        name = request.request_id
        self._local[name] = self._done[name] = num_computed_tokens // self._block_tokens
        self._loads.pop(name, None)

    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        del blocks
        if num_external_tokens:
            first = self._local[request.request_id]
            stop = first + num_external_tokens // self._block_tokens
            self._loads[request.request_id] = first, stop
            self._done[request.request_id] = stop

    def _finished(self, request: Any, block_ids: Sequence[int]) -> None:
        # An aborted request may still be loading. Its computed blocks were recorded after the last step.
        if request.status.name != "FINISHED_ABORTED":
            self._look(request, list(block_ids))
        for kept in (self._local, self._loads, self._done):
            kept.pop(request.request_id, None)

    def _after_step(self) -> None:
        manager = self._driver.scheduler.kv_cache_manager
        for request in self._driver.scheduler.running:
            self._look(request, manager.get_block_ids(request.request_id)[0])

    def _look(self, request: Any, table: Sequence[int]) -> None:
        name = request.request_id
        num_full = min(request.num_computed_tokens, request.num_tokens) // self._block_tokens
        first, stop = self._loads.pop(name, (0, 0))
        for block in range(first, stop):
            if table[block] in self._failed:  # vLLM recomputes this block and all later blocks
                self._failed.difference_update(table[first:stop])
                self._done[name] = block
                break
            checksum, valid = self._checksum(table[block]), self._computed.get(request.block_hashes[block], set())
            assert checksum in valid, (
                f"block {block} of {name} (loaded: {first} to {stop}) has bytes that vLLM never computed for it: "
                f"{self._describe(table[block], checksum)}; {len(valid)} valid results"
            )
            self.num_compared += 1
        for block in range(self._done.get(name, 0), num_full):
            self._computed.setdefault(request.block_hashes[block], set()).add(self._checksum(table[block]))
        self._done[name] = max(self._done.get(name, 0), num_full)

    def _describe(self, block: int, checksum: int) -> str:
        """Describe the content of a wrong block."""
        pages = [cache[block] for cache in self._driver.caches]
        poisoned = [layer for layer, page in enumerate(pages) if bool((page.isnan() | (page == UNWRITTEN)).any())]
        others = sum(checksum in known for known in self._computed.values())
        return f"poison in layers {poisoned}, equal to {others} other blocks"

    def _checksum(self, block: int) -> int:
        checksum = 0
        for cache in self._driver.caches:
            checksum = zlib.crc32(cache[block].contiguous().numpy().tobytes(), checksum)
        return checksum


def start_comparing_loads(driver: Driver) -> None:
    driver.kept["ledger"] = Ledger(driver)


def num_compared_blocks(driver: Driver) -> int:
    """Return the number of loaded blocks whose bytes were compared."""
    return driver.kept["ledger"].num_compared


FREED, UNWRITTEN = float("nan"), 1e30
"""FREED is the poison for free blocks. UNWRITTEN is the poison for newly assigned blocks. It is not NaN, because vLLM's
CPU attention multiplies the values after the end of a sequence by 0, and NaN * 0 is NaN."""


def poison_free_blocks(driver: Driver) -> None:
    """Fill each device block with poison when vLLM discards its content.

    vLLM discards the content when it frees a block that is not in the prefix cache, and when it assigns a block to a
    request. Therefore, a save that holds no reference to its block saves poison. A request that runs before its load
    has ended reads poison.
    """
    pool = driver.pool
    free, get = pool.free_blocks, pool.get_new_blocks

    def fill(blocks: Sequence[Any], poison: float) -> None:
        for block in blocks:
            for cache in driver.caches:
                cache[block.block_id].fill_(poison)

    def free_blocks(blocks: Any) -> None:
        given = list(blocks)
        free(given)
        fill([each for each in given if each.ref_cnt == 0 and not each.is_null and each.block_hash is None], FREED)

    def get_new_blocks(*args: Any, **options: Any) -> Any:
        found = get(*args, **options)
        fill(found, UNWRITTEN)
        return found

    pool.free_blocks, pool.get_new_blocks = free_blocks, get_new_blocks


def conversations(driver: Driver, prompts: Sequence[Sequence[int]], seed: int, **options: Any) -> dict[int, Answer]:
    """Answer prompts that arrive at random times, up to 6 concurrently."""
    draws, names, left = random.Random(seed), {}, list(enumerate(prompts))
    while left or driver.waiting:
        while left and len(driver.waiting) < 6 and draws.random() < 0.7:
            number, prompt = left.pop(0)
            names[number] = driver.add(prompt, **options)
        if driver.waiting:
            driver.step()
    driver.finish()
    return {number: driver.answers.pop(name) for number, name in names.items()}


def check_idle(driver: Driver) -> None:
    """Finish all requests. Raise AssertionError if requests, used device blocks or state of the connector are left."""
    driver.finish()
    assert not driver.scheduler.requests, f"requests are left: {list(driver.scheduler.requests)}"
    used = {each.block_id: each.ref_cnt for each in driver.pool.blocks if each.ref_cnt and not each.is_null}
    assert not used, f"device blocks are still in use: {used}"
    for each in connectors(driver):
        side = each.scheduler
        kept = ("_requests", "_offers", "_planned_loads", "_loads", "_saves", "_orphans")
        left = {name: getattr(side, name) for name in kept if getattr(side, name)}
        assert not left, f"the scheduler side still has {left}"
        side.check()
        if not side.manager.stores:
            assert not side.manager.leases, f"host blocks are still leased: {side.manager.leases}"


def connectors(driver: Driver) -> list[Any]:
    """Return kvtier's connectors in the scheduler, including connectors inside a MultiConnector."""
    top = driver.scheduler.connector
    return [each for each in getattr(top, "_connectors", [top]) if hasattr(each, "make_worker")]


def overwrite_cached_block(driver: Driver, target: int, source: int) -> None:
    """Overwrite the KV of a device block in vLLM's prefix cache with the KV of another cached block."""
    cached = [each.block_id for each in driver.pool.blocks if each.block_hash is not None]
    for cache in driver.caches:
        cache[cached[target]] = cache[cached[source]]


# ---- aborts and resets


def abort_while_loading(driver: Driver, prompt: Sequence[int]) -> str:
    """Abort a request whose load is in flight. Return the state of the request before the abort."""
    faults = _faults()
    faults.loads_may_run.clear()
    name = driver.add(prompt)
    driver.step_until(lambda: driver.state(name) == "WAITING_FOR_REMOTE_KVS", "the request loads")
    driver.step()
    state = driver.state(name)
    driver.abort(name)
    driver.step()
    faults.loads_may_run.set()
    check_idle(driver)
    return state


def abort_while_saving(driver: Driver, prompt: Sequence[int]) -> int:
    """Abort a request whose saves are in flight. Return the number of device blocks that the saves still hold."""
    faults = _faults()
    faults.saves_may_run.clear()
    name = driver.add(prompt, max_tokens=64)
    driver.step_until(lambda: driver.state(name) == "RUNNING", "the request runs")
    for _ in range(4):
        driver.step()
    driver.abort(name)
    driver.step()
    held = sum(each.ref_cnt > 0 for each in driver.pool.blocks if not each.is_null)
    faults.saves_may_run.set()
    check_idle(driver)
    return held


def abort_after_reset_while_loading(driver: Driver, prompt: Sequence[int], *, has_run: bool) -> None:
    """Reset the connector while a request loads, then abort the request.

    The load has not written the device blocks of the request yet, so these blocks must not be saved. With `has_run`,
    the request was computed and preempted before, and it loads its own blocks again.
    """
    faults = _faults()
    if has_run:
        name = driver.add(prompt, max_tokens=60)
        driver.step_until(lambda: driver.state(name) == "RUNNING", "the request runs")
        side = connectors(driver)[0].scheduler
        driver.step_until(lambda: side.num_held_blocks == 0, "the saves have ended")
        faults.loads_may_run.clear()
        driver.reset(running=True)
    else:
        faults.loads_may_run.clear()
        name = driver.add(prompt)
    driver.step_until(lambda: driver.state(name) == "WAITING_FOR_REMOTE_KVS", "the request loads")
    driver.step()
    driver.reset(connector=True)
    driver.abort(name)
    driver.step()
    faults.loads_may_run.set()
    check_idle(driver)


def check_offers(driver: Driver) -> None:
    """After every step, check that no request has an offer.

    An offer is a lease on host blocks. It begins in get_num_new_matched_tokens and ends when vLLM allocates device
    blocks. It must end in the step in which it began, so that waiting requests hold no host blocks.
    """

    def check() -> None:
        for each in connectors(driver):
            held = [name for name, tracked in each.scheduler._requests.items() if tracked.offer is not None]
            assert not held, f"offers were not released: {held}"

    driver.after_step.append(check)


def random_aborts(driver: Driver, prompts: Sequence[Sequence[int]], seed: int) -> set[str]:
    """Run requests and abort some at random times, also during copies. Return the states just before the aborts."""
    draws, faults, states, left = random.Random(seed), _faults(), set(), list(prompts)
    while left or driver.waiting:
        if left and len(driver.waiting) < 6 and draws.random() < 0.3:
            driver.add(left.pop(), max_tokens=draws.randrange(1, 40))
        if driver.waiting and draws.random() < 0.03:
            name = draws.choice(sorted(driver.waiting))
            states.add(driver.state(name))
            driver.abort(name)
        for event in (faults.loads_may_run, faults.saves_may_run):
            if draws.random() < 0.1:
                event.clear() if event.is_set() else event.set()
        if driver.scheduler.has_requests():
            driver.step()
        else:
            faults.loads_may_run.set()
            faults.saves_may_run.set()
    faults.loads_may_run.set()
    faults.saves_may_run.set()
    check_idle(driver)
    return states


def reset_while_loading(driver: Driver, prompt: Sequence[int]) -> Answer:
    """Reset the connector while a request loads. Return the answer to the request."""
    faults = _faults()
    faults.loads_may_run.clear()
    name = driver.add(prompt)
    driver.step_until(lambda: driver.state(name) == "WAITING_FOR_REMOTE_KVS", "the request loads")
    driver.step()
    assert not driver.reset(connector=True)  # vLLM keeps the device cache, because the request holds blocks
    driver.step()
    faults.loads_may_run.set()
    check_idle(driver)
    return driver.answers.pop(name)


def reset_while_saving(driver: Driver, prompt: Sequence[int], *, running: bool) -> Answer:
    """Reset the connector while a request runs. Return the answer to the request.

    Without `running`, the saves are still in flight during the reset. With `running`, the saves end before the reset,
    and the reset preempts the request.
    """
    faults = _faults()
    faults.saves_may_run.clear()
    name = driver.add(prompt, max_tokens=40)
    driver.step_until(lambda: driver.state(name) == "RUNNING", "the request runs")
    driver.step()
    if running:  # vLLM can preempt the request only if no save holds device blocks
        faults.saves_may_run.set()
        driver.step_until(lambda: not connectors(driver)[0].scheduler.num_held_blocks, "the saves have ended")
    driver.reset(connector=True, running=running)
    driver.step()
    faults.saves_may_run.set()
    check_idle(driver)
    return driver.answers.pop(name)


def pause(driver: Driver, prompts: Sequence[Sequence[int]], mode: str, num_steps: int) -> None:
    """Pause the core while requests run, empty the caches, and resume. Drop the answers."""
    for prompt in prompts:
        driver.add(prompt, max_tokens=30)
    for _ in range(num_steps):
        driver.step()
    driver.engine.engine_core.call_utility("pause_scheduler", mode, True)
    driver.engine.engine_core.call_utility("resume_scheduler")
    driver.finish()
    driver.answers.clear()


def sleep(driver: Driver, prompts: Sequence[Sequence[int]], mode: str, num_steps: int) -> bool:
    """Put the engine to sleep while requests run, then wake it up. Drop the answers. Return True if the engine slept.

    On a CPU, vLLM keeps the memory of the model during sleep. As on a GPU, vLLM empties its own cache and the cache of
    the connector.
    """
    for prompt in prompts:
        driver.add(prompt, max_tokens=30)
    for _ in range(num_steps):
        driver.step()
    core = driver.engine.engine_core
    core.call_utility("sleep", 1, mode)
    is_sleeping = core.call_utility("is_sleeping")
    core.call_utility("wake_up")
    driver.finish()
    driver.answers.clear()
    return is_sleeping


def set_faults(driver: Driver, **faults: int) -> None:
    del driver
    for name, value in faults.items():
        setattr(_faults(), name, value)


def _faults() -> Any:
    import vllm_connectors

    return vllm_connectors.faults_here()


def save_after_reuse(driver: Driver, prompt: Sequence[int], others: Sequence[Sequence[int]]) -> None:
    """Run a request, then others that reuse the free device blocks. No save runs until the last request ends."""
    faults = _faults()
    faults.saves_may_run.clear()
    for each in (prompt, *others):
        name = driver.add(each, max_tokens=1)
        driver.step_until(lambda name=name: name not in driver.waiting, "the request finishes")
    assert any(each.ref_cnt for each in driver.pool.blocks if not each.is_null), "no save holds a device block"
    faults.saves_may_run.set()
    driver.finish()


def slow_copies(driver: Driver, num_steps: int) -> None:
    """Allow copies only after every `num_steps`-th step, so that copies last several steps."""
    faults, count = _faults(), [0]

    def change() -> None:
        count[0] += 1
        for event in (faults.loads_may_run, faults.saves_may_run):
            event.set() if count[0] % num_steps == 0 else event.clear()

    driver.after_step.append(change)


# ---- stores and host memory


def settle_stores(driver: Driver) -> None:
    """Run steps until the stores contain every saved block. To make vLLM run steps, send short requests."""
    from kvtier.messages import Route

    manager = connectors(driver)[0].scheduler.manager
    for _ in range(20_000):
        is_due = any(queue.is_due for queue in manager.queues)
        is_writing = manager.transfers.counts[Route.HOST_TO_STORE].num_in_flight > 0
        if not (is_due or is_writing or manager.transfers.has_plan):
            return
        driver.ask([[3]], max_tokens=1)
    raise AssertionError("the stores did not finish")


def ask_and_store(driver: Driver, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Answer requests one after the other. After each request, wait until its blocks are in the stores.

    A host slot is in use until the stores have its block. Without the wait, the next request might find no free slot.
    """
    answers = []
    for prompt in prompts:
        answers += driver.ask([prompt])
        settle_stores(driver)
    return answers


def damage_host_memory(driver: Driver, *, waits_for_scrubber: bool) -> int:
    """Overwrite every host block whose checksum the controller's Scrubber has recorded. Return the number of blocks.

    With `waits_for_scrubber`, verify host memory until the Scrubber has found all overwritten blocks.
    """
    import ctypes

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    controller = get_kv_transfer_group().worker.controller
    scrubber, (host,) = controller._scrubber, controller._hosts
    while scrubber._new:  # wait for the checksums of the intact blocks
        scrubber._verify_some()
    slots = sorted(scrubber._sums)
    for slot in slots:
        ctypes.memset(host.pointer + slot * host.slot_bytes, 0x7E, host.slot_bytes)
    while waits_for_scrubber and len(scrubber._damaged) < len(slots):
        scrubber._verify_some()
    del driver
    return len(slots)


def metric_after(driver: Driver, name: str, at_least: float = 1.0) -> float:
    """Send requests until a connector metric reaches `at_least`. vLLM updates metrics at most once per second."""
    for _ in range(5000):
        value = driver.metrics().get(name, 0.0)
        if value >= at_least:
            return value
        driver.ask([[3]], max_tokens=1)
    raise AssertionError(f"{name} must reach {at_least}, got {value}")


# ---- isolation


def _embeddings(seed: int, num_tokens: int) -> Any:
    import torch

    return torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(seed))


def ask_with_embeddings(driver: Driver, seed: int, num_tokens: int) -> Answer:
    """Empty the device cache, then send a request with random embeddings instead of tokens."""
    assert driver.reset()
    (answer,) = driver.ask([{"prompt_embeds": _embeddings(seed, num_tokens)}])
    return answer


def ask_with_audio(driver: Driver, prompt: Sequence[int], num_samples: int, pitches: Sequence[int]) -> list[Answer]:
    """Send the prompt once per pitch, each time with an empty device cache. One prompt token stands for the tone."""
    import numpy as np

    answers = []
    for pitch in pitches:
        sound = np.sin(np.arange(num_samples, dtype=np.float32) * (2 * np.pi * pitch / 16_000))
        assert driver.reset()
        answers += driver.ask([{"prompt_token_ids": prompt, "multi_modal_data": {"audio": (sound, 16_000)}}])
    return answers


def ask_with_images(driver: Driver, prompt: Sequence[int], pixels: int, seeds: Sequence[int]) -> list[Answer]:
    """Send the prompt once per image, each time with an empty device cache. vLLM puts the image before the prompt."""
    import numpy as np
    from PIL import Image

    answers = []
    for seed in seeds:
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8))
        assert driver.reset()
        answers += driver.ask([{"prompt_token_ids": prompt, "multi_modal_data": {"image": image}}])
    return answers


def compare_keys_with_hashes(driver: Driver, adapters: Sequence[str], num_examples: int) -> tuple[int, int]:
    """Check that block keys of random requests are equal if and only if vLLM's hashes are equal.

    Return the number of pairs of equal blocks, and the number of pairs of different blocks.
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_request_block_hasher
    from vllm.v1.core.kv_cache_utils import init_none_hash as init

    from kvtier.index import Namespace
    from kvtier.integrations.vllm.chains import ChainBuilder

    block_tokens, counts = 4, {True: 0, False: 0}
    init(sha256)
    builder = ChainBuilder(Namespace("model", block_tokens=block_tokens), generate_block_hash_extra_keys)
    hasher = get_request_block_hasher(block_tokens, sha256)
    media = st.lists(st.tuples(st.integers(0, 18), st.integers(1, 6), st.sampled_from("xy")), max_size=3)
    drawn = st.fixed_dictionaries(
        {
            "tokens": st.lists(st.integers(0, 1), min_size=4, max_size=24),
            "salt": st.sampled_from([None, "", "a", "b", "a\0b"]),
            "lora": st.sampled_from([None, 0, 1]),
            "media": media,
            "embeds": st.sampled_from([None, None, 1, 2]),
        }
    )

    def changed(pair: tuple[dict[str, Any], dict[str, Any]], keep: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the pair of requests, but copy the fields in `keep` from the first request to the second."""
        return pair[0], {name: pair[name not in keep][name] for name in pair[0]}

    names = st.sets(st.sampled_from(["tokens", "salt", "lora", "media", "embeds"]), min_size=3)

    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(st.tuples(drawn, drawn), names)
    def check(pair: tuple[dict[str, Any], dict[str, Any]], keep: set[str]) -> None:
        compared = changed(pair, keep)
        one, other = (_request(hasher, adapters, **each) for each in compared)
        keys = [builder.build(each) for each in (one, other)]
        for block in range(min(len(one.block_hashes), len(other.block_hashes))):
            is_equal = one.block_hashes[block] == other.block_hashes[block]
            counts[is_equal] += 1
            first, second = (each.key_list(block, block + 1) for each in keys)
            assert (first == second) == is_equal, f"block {block}: hashes are equal: {is_equal}; requests: {compared}"

    check()
    del driver
    return counts[True], counts[False]


def _request(hasher: Any, adapters: Sequence[str], **drawn: Any) -> Any:
    """Return a vLLM Request. Skip media that overlap other media or extend beyond the prompt."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    features, end = [], 0
    for offset, length, identifier in sorted(drawn["media"]):
        if offset >= end and offset + length <= len(drawn["tokens"]):
            place = PlaceholderRange(offset=offset, length=length)
            features.append(MultiModalFeatureSpec(None, "image", identifier, place))
            end = offset + length
    lora = drawn["lora"]
    embeds = None if drawn["embeds"] is None else _embeddings(drawn["embeds"], len(drawn["tokens"]))
    return Request(
        "request",
        None if embeds is not None else drawn["tokens"],
        SamplingParams(max_tokens=1),
        None,
        prompt_embeds=embeds,
        mm_features=features if embeds is None else None,
        lora_request=None if lora is None else LoRARequest("ab"[lora], lora + 1, adapters[lora]),
        cache_salt=drawn["salt"],
        block_hasher=hasher,
    )


def num_loaded(driver: Driver) -> int:
    """Return the number of blocks that kvtier has loaded."""
    from kvtier.messages import Route

    return connectors(driver)[0].scheduler.manager.transfers.counts[Route.HOST_TO_DEVICE].num_blocks


# ---- soak


def soak_round(driver: Driver, prompts: Sequence[Sequence[int]], seed: int, seconds: float) -> dict[str, int]:
    """Run random requests, aborts, resets and faults for some seconds. Then check that the engine is idle.

    Return the number of events of each kind, and the memory of this process in KiB.
    """
    import ctypes
    import time

    import psutil

    draws, faults, end = random.Random(seed), _faults(), time.monotonic() + seconds
    counts = dict.fromkeys(("steps", "requests", "aborts", "resets", "errors"), 0)
    while time.monotonic() < end or driver.waiting:
        if time.monotonic() < end:
            _soak_action(driver, prompts, draws, counts)
        else:
            faults.loads_may_run.set()
            faults.saves_may_run.set()
        if driver.scheduler.has_requests():
            driver.step()
            counts["steps"] += 1
        else:
            faults.loads_may_run.set()
            faults.saves_may_run.set()
    faults.fail_loads = faults.fail_saves = 0
    check_idle(driver)
    assert driver.reset(), "the device cache cannot be reset"
    counts["errors"] = sum(answer.finish not in ("length", "stop") for answer in driver.answers.values())
    driver.answers.clear()
    ledger = driver.kept["ledger"]
    ctypes.CDLL(None).malloc_trim(0)  # do not count freed memory that malloc keeps
    return counts | {"compared": ledger.num_compared, "KiB": psutil.Process().memory_info().rss >> 10}


def _soak_action(
    driver: Driver, prompts: Sequence[Sequence[int]], draws: random.Random, counts: dict[str, int]
) -> None:
    faults = _faults()
    if len(driver.waiting) < 7 and draws.random() < 0.2:
        number = draws.randrange(len(prompts))
        driver.add(prompts[number], max_tokens=1 + 11 * number % 60, salt=draws.choice([None, None, "a"]))
        counts["requests"] += 1
    if driver.waiting and draws.random() < 0.02:
        driver.abort(draws.choice(sorted(driver.waiting)))
        counts["aborts"] += 1
    for event in (faults.loads_may_run, faults.saves_may_run):
        if draws.random() < 0.1:
            event.clear() if event.is_set() else event.set()
    if draws.random() < 0.01:
        faults.fail_loads, faults.fail_saves = draws.choice([(0, 0), (3, 0), (0, 3), (5, 7)])
    if draws.random() < 0.002:
        driver.reset(connector=draws.random() < 0.5)
        counts["resets"] += 1
