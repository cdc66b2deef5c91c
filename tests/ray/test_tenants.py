"""API keys and request limits of tenants apply to a fleet of two replicas."""

from __future__ import annotations

import openai
import pytest

from kvtier.server.config import Tenant
from ray_support import MODEL, wait_until

KEYS = {"one": "first-key", "two": "second-key"}


@pytest.fixture
def fleet(cluster):
    tenants = tuple(Tenant(name, key, max_requests=1) for name, key in KEYS.items())
    cluster.run(2, {"tenants": tenants})
    wait_until(lambda: len(cluster.replicas()) == 2, "two replicas")
    return cluster


def client(fleet, key):
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=0)


def test_tenant_limit_holds_for_the_whole_fleet(fleet):
    """Each tenant may run one request in the whole fleet, so its second request is refused.

    If each replica counted only its own requests, the second request could run on the other replica.
    """
    options = {"model": MODEL, "prompt": "long ", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with client(fleet, KEYS["one"]) as one, client(fleet, KEYS["two"]) as two, client(fleet, "wrong-key") as other:
        stream = one.completions.create(stream=True, **options)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="limit of 1 concurrent"):
            one.completions.create(**options)
        assert two.completions.create(**options | {"max_tokens": 1}).usage.completion_tokens == 1
        with pytest.raises(openai.AuthenticationError):
            other.completions.create(**options)
        stream.close()
