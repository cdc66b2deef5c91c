"""kvtier: a tiered KV-cache runtime for LLM inference.

This module imports no submodules, so that the index, the scheduler and the replay can be used without torch.
"""

__version__ = "0.1.0"
