"""kvtier: a tiered KV-cache runtime for LLM inference.

Importing this package imports nothing else, so that the deciding side (index, scheduler, replay) stays free of torch.
"""

__version__ = "0.1.0"
