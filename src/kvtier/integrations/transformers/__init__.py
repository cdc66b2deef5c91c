"""A prefix cache for transformers. Blocks in a store outlive the process (docs/transformers.md).

prefix = PrefixCache(model, "disk:./kv?bytes=20GiB")
model.generate(**inputs, past_key_values=prefix.begin(**inputs))

PrefixCache    begin: match, load, fill a cache        forward hooks: check the tokens, save full blocks
    │  Chain, blocks ↓   ↑ tensors
PrefixTiers    CacheManager without a device tier, CacheController, staging blocks on the model's device
"""

from kvtier.integrations.transformers.caches import PrefixDynamicCache, PrefixStaticCache
from kvtier.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["PrefixCache", "PrefixDynamicCache", "PrefixStaticCache"]
