"""Fixtures that start vLLM for the tests of this folder. The tests are skipped if vLLM is not installed."""

from __future__ import annotations

import contextlib
import importlib.metadata

import pytest

import store_servers
import vllm_models
from vllm_support import Oracle, Template, connector


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_installed():
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed here: make vllm, then make test-vllm")


@pytest.fixture(scope="session")
def vllm(_vllm_is_installed, tmp_path_factory):
    """Yield the template process, which forks vLLM engines. Their default model is the tiny Llama."""
    model = vllm_models.make_llama(tmp_path_factory.mktemp("tiny-llama"))
    template = Template(tmp_path_factory.mktemp("vllm"), model)
    yield template
    template.close()


@pytest.fixture(scope="session")
def oracle(vllm):
    """Yield vLLM with the tiny Llama, without a connector and without prefix caching, as the reference for tokens."""
    with vllm.start(None, enable_prefix_caching=False, num_gpu_blocks_override=64) as engine:
        yield Oracle(engine)


@pytest.fixture(scope="module")
def engine(vllm):
    """Yield vLLM with the connector in one process. The device cache is too small for three prompts of `prompt_of`."""
    with vllm.start(connector(verify_loads=True)) as running:
        yield running


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(store_servers.redis_server(tmp_path_factory.mktemp("redis")))
        except store_servers.NotInstalled as missing:
            pytest.skip(str(missing))


@pytest.fixture(scope="session")
def smollm2(_vllm_is_installed, tmp_path_factory):
    """Return a Hugging Face folder with SmolLM2."""
    return vllm_models.make_smollm2(tmp_path_factory.mktemp("smollm2"))
