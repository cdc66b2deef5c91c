"""Ray's prefix-affinity router for calls of kvtier's front end."""

from __future__ import annotations

from typing import Any

# The public module ray.serve.llm.request_router needs pyarrow; this one does not.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


class BlockAffinityRouter(PrefixCacheAffinityRouter):
    """Compares prompts by their block hashes. Equal prefixes have equal hashes, so its rule works as on text."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        ticket = pending_request.args[0]
        return "".join(f"{value:016x}" for value in ticket.hashes.tolist()) or "-"
