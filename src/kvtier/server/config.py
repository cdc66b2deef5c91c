"""What a server is made from: the engine's options, limits, and who may ask."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.engine.packaged import DEFAULT_MODEL
from kvtier.errors import ArgumentError, RangeError

MAX_PRIORITY = 1000
"""Of a request, and of what a tenant may be allowed; the lowest is its negative."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How large the tiers are, and how blocks go between them."""

    block_tokens: int = 16
    blocks: int = 1024
    """Of the device tier."""
    host_blocks: int = 0
    """Of the host tier; 0 for none."""
    disk: str = ""
    """The folder of the disk tier; empty for none."""
    disk_bytes: str = "8GiB"
    """Of all its files together."""
    shared: tuple[str, ...] = ()
    """URLs of stores that others use, too (redis://, s3://, mooncake://)."""
    policy: str = "lru"
    """Whose blocks go first, in the memory tiers: lru, fifo, arc, s3fifo or cost."""
    write: str = "write_through"
    """When blocks go down a tier: write_through, write_through_selective (used again) or write_back (room is low)."""
    wait_seconds: float = 5.0
    """The most that a request waits for its blocks from stores."""
    always_load: bool = False
    """Load cached blocks also where computing them again is expected to be faster."""
    kv_shards: int = 0
    """Objects into which a stored block is cut by KV heads; 0: as many as ranks. The same for all who share a store."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine process makes its engine. Plain values: they travel to another process."""

    model: str = DEFAULT_MODEL
    device: str = "cpu"
    dtype: str = "f32"
    tiers: TierOptions = field(default_factory=TierOptions)
    tensor_parallel: int = 1
    """Ranks, each a process, that share the model's heads."""
    invariant: bool = False
    """Compute every token the same way whatever shares its batch: the same answer, bit for bit, and slower (CPU)."""
    max_rows: int = 64
    """Requests in a step."""
    max_step_tokens: int = 512
    """Tokens in a step: longer ones make prefill faster and the gaps between others' tokens wider."""
    draft_tokens: int = 0
    threads: int = 0
    """Of torch; 0 leaves one core to the front end where there is more than one."""
    record: str = ""
    """A new file for what `kvtier replay` reads of every request: keys, lengths and times; empty for none."""


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
    """In which a body must have arrived."""
    request_seconds: float = 600.0
    """From the first byte of a request to the last one of its answer."""
    waiting: int = 256
    """Answers that wait for a place in a step; more get 429."""
    answers: int = 16
    """n times the number of prompts, of one request."""
    drain_seconds: float = 30.0
    """How long requests may take to finish after SIGTERM."""
    prepare_seconds: float = 5.0
    """For a worker process to parse and tokenize one large body, or to compile one JSON schema; 400 after that."""
    prepare_processes: int = 2
    """Worker processes for that; each is started when it is first needed."""
    buffered_bytes: int = 64 << 20
    """Of request bodies in the front end's memory at a time; more get 503. A tenant may use half of it."""
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
    """Who asks: their own cache (by salt) and their own share."""

    name: str
    key: str = field(repr=False)
    admin: bool = False
    max_requests: int = 0
    """At a time; 0 for no limit."""
    tokens_per_minute: int = 0
    """Prompt (without what was cached) and answer; 0 for no limit."""
    device_blocks: int = 0
    """Of the device tier, under whatever `cache_salt`; whoever needs more evicts its own. 0 for no limit."""
    host_blocks: int = 0
    """The same of the host tier."""
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
    """All of it."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    """The model's name in the API; the option's own last part without one."""
    tenants: tuple[Tenant, ...] = ()
    """With none, whoever reaches the port may ask, and whoever does so from this machine may control."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise RangeError(f"a port is in [0, 65536), got {self.port}")
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names) or len({tenant.key for tenant in self.tenants}) < len(names):
            raise ArgumentError("two tenants share a name or a key; each needs its own")
        if not self.tenants and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ArgumentError(
                f"--host {self.host} is reachable from elsewhere and there are no API keys; "
                "set KVTIER_API_KEY (and KVTIER_ADMIN_KEY), or name tenants in the TOML file"
            )

    @property
    def model_name(self) -> str:
        """What /v1/models calls the model."""
        return self.name or self.engine.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
