"""Configuration of a server: engine options, limits and tenants."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.engine.packaged import DEFAULT_MODEL
from kvtier.errors import ArgumentError, RangeError

MAX_PRIORITY = 1000
"""Highest priority of a request; the lowest is its negative."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Sizes of the tiers, and how blocks move between them."""

    block_tokens: int = 16
    blocks: int = 1024
    """Size of the device tier."""
    host_blocks: int = 0
    """Size of the host tier; 0 for none."""
    disk: str = ""
    """Folder of the disk tier; empty for none."""
    disk_bytes: str = "8GiB"
    """Size of all its files."""
    shared: tuple[str, ...] = ()
    """URLs of stores shared with other servers (redis://, s3://, mooncake://)."""
    policy: str = "lru"
    """Eviction policy of the memory tiers: lru, fifo, arc, s3fifo or cost."""
    write: str = "write_through"
    """When to copy blocks down: write_through, write_through_selective (on reuse) or write_back (on shortage)."""
    wait_seconds: float = 5.0
    """Longest wait of a request for blocks from stores."""
    always_load: bool = False
    """Load cached blocks even if computing them is expected to be faster."""
    kv_shards: int = 0
    """Objects per stored block, split by KV heads; 0: one per rank. Servers that share a store need the same value."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine process. Plain values: they are sent to another process."""

    model: str = DEFAULT_MODEL
    device: str = "cpu"
    dtype: str = "f32"
    tiers: TierOptions = field(default_factory=TierOptions)
    tensor_parallel: int = 1
    """Ranks, one process each, that share the model's heads."""
    invariant: bool = False
    """Compute each token independently of its batch: answers are reproducible bit for bit, and slower (CPU)."""
    max_rows: int = 64
    max_step_tokens: int = 512
    """Tokens per step: more make prefill faster and the gaps between tokens of other requests longer."""
    draft_tokens: int = 0
    threads: int = 0
    """Threads of torch; 0: all cores but one, which is left to the front end."""
    record: str = ""
    """New file for the trace of `kvtier replay` (keys, lengths and times of requests); empty for none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one client can cost the others."""

    connections: int = 1024
    """Open connections; fewer where RLIMIT_NOFILE is low."""
    connections_per_address: int = 512
    """Open connections from one IPv4 address or IPv6 /64; at most three quarters of `connections`."""
    url_bytes: int = 8 << 10
    header_bytes: int = 64 << 10
    """Names and values of all headers of a request."""
    headers: int = 100
    """Number of headers of a request."""
    header_seconds: float = 10.0
    """Time from the first byte of a request to the end of its headers."""
    idle_seconds: float = 15.0
    """Time between requests of a connection. httpx and OpenAI's client drop idle connections after 5 s: they close
    first, and never send a request into a connection that the server closes."""
    send_seconds: float = 60.0
    """Time for which a client may leave a full send buffer unread; nginx's send_timeout has the same default."""
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    """Time to receive a body."""
    request_seconds: float = 600.0
    """Time from the first byte of a request to the last byte of its response."""
    waiting: int = 256
    """Answers that wait for the engine; more get 429."""
    answers: int = 16
    """n times the number of prompts of one request."""
    drain_seconds: float = 30.0
    """Time for requests to finish after SIGTERM."""
    prepare_seconds: float = 5.0
    """Time to parse and tokenize one large body or to compile one JSON schema; 400 after that."""
    prepare_processes: int = 2
    """Worker processes, started on demand."""
    buffered_bytes: int = 64 << 20
    """Size of all request bodies in the front end's memory; more get 503. A tenant may use half of it."""
    response_bytes: int = 64 << 20
    """Size of a response that is not streamed. Only log-probabilities make one this large."""
    engine_reply_seconds: float = 5.0
    """Time in which the engine process acknowledges a message. Its command thread computes nothing and replies in
    milliseconds; 5 s allow for a machine that swaps."""
    engine_step_seconds: float = 120.0
    """Time in which the engine's thread gets to its next command. The longest step is a prefill of `max_step_tokens`:
    512 tokens of an 8B model take about 80 s at 100 GFLOP/s, which two CPU cores reach."""
    control_seconds: float = 120.0
    """Time for a control call; saving and clearing stores take the longest."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise RangeError(f"limits.{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """An API key with its own cache (by salt) and quotas."""

    name: str
    key: str = field(repr=False)
    admin: bool = False
    max_requests: int = 0
    """Concurrent requests; 0 for no limit."""
    tokens_per_minute: int = 0
    """Uncached prompt tokens and generated tokens; 0 for no limit."""
    device_blocks: int = 0
    """Quota of the device tier, for all values of `cache_salt`. Above it, the tenant evicts its own blocks. 0: none."""
    host_blocks: int = 0
    """Quota of the host tier."""
    max_priority: int = 0
    """Highest effective `priority` of its requests; higher ones are lowered to it. Every tenant's default is 0."""

    def __post_init__(self) -> None:
        if not self.name or "\0" in self.name:
            raise ArgumentError(f"a tenant needs a name without NUL, got {self.name!r}")
        if len(self.key) < 8:
            raise ArgumentError(f"the key of tenant {self.name} has {len(self.key)} characters; at least 8 are needed")
        if min(self.max_requests, self.tokens_per_minute, self.device_blocks, self.host_blocks) < 0:
            raise RangeError(f"the quotas of tenant {self.name} must not be negative")
        if abs(self.max_priority) > MAX_PRIORITY:
            raise RangeError(
                f"max_priority of tenant {self.name} must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], "
                f"got {self.max_priority}"
            )


def tenant_name(tenant: Tenant | None) -> str:
    """Return the name of a tenant; empty in a server without tenants."""
    return tenant.name if tenant is not None else ""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of the server and its engine process."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    """Name of the model in the API; empty for the last part of its path."""
    tenants: tuple[Tenant, ...] = ()
    """Without tenants there are no keys: only clients on this machine are accepted, and all of them are admins."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise RangeError(f"port must be in [0, 65536), got {self.port}")
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names) or len({tenant.key for tenant in self.tenants}) < len(names):
            raise ArgumentError("two tenants share a name or a key; each needs its own")
        if not self.tenants and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ArgumentError(
                f"--host {self.host} is reachable from other machines and there are no API keys; "
                "set KVTIER_API_KEY (and KVTIER_ADMIN_KEY), or add tenants to the TOML file"
            )

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        return self.name or self.engine.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
