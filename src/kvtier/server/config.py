"""Configuration of a server: engine options, limits and tenants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtier.engine.packaged import DEFAULT_MODEL
from kvtier.errors import ArgumentError, RangeError

MAX_PRIORITY = 1000
"""Highest priority of a request; the lowest is -MAX_PRIORITY."""
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
_GPU_STEP_TOKENS = 512
_CPU_STEP_TOKENS = 128
"""On a CPU, larger steps hardly speed up prefill, but delay the tokens of other requests. For a prompt of 2,048 tokens,
steps of 512 instead of 128 tokens reduce the time from 3.4 to 3.1 ms per token (SmolLM2-135M, one core of an EPYC,
2026-11-19)."""
_POLICIES = ("lru", "fifo", "arc", "s3fifo", "cost", "learned")
_WRITES = ("write_through", "write_through_selective", "write_back")


def option(default: Any, help: str, dest: str = "", **arguments: Any) -> Any:
    """Return a dataclass field that is also a command-line option.

    The name of the option is `dest`, or the name of the field if `dest` is empty. `arguments` are passed to argparse.
    """
    return field(default=default, metadata={"help": help, "dest": dest, **arguments})


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Sizes of the tiers, and policies for moving blocks between them."""

    block_tokens: int = option(16, "tokens per block")
    blocks: int = option(1024, "number of blocks in device memory")
    host_blocks: int = option(0, "blocks in host memory; 0: as many as --blocks if there is a store, else none")
    disk: str = option("", "folder of the disk tier, whose contents survive restarts", metavar="FOLDER")
    disk_bytes: str = option("8GiB", "size of the disk tier", metavar="SIZE")
    disk_bytes_per_day: str = option("", "limit of the bytes written to the disk tier in 24 hours", metavar="SIZE")
    disk_secret: str = option("", "encrypt the disk tier with the 32 bytes in this file", metavar="FILE")
    shared: tuple[str, ...] = option((), "store shared with other servers; repeatable", metavar="URL")
    kv_shards: int = option(0, "number of objects per stored block, split by KV heads; 0: one per rank")
    """Servers that share a store need the same value."""
    policy: str = option("learned", "eviction policy of the memory tiers", choices=_POLICIES)
    write: str = option("write_through", "when to copy blocks to the next tier", choices=_WRITES)
    wait_seconds: float = option(5.0, "longest wait for blocks from stores")
    always_load: bool = option(False, "load cached blocks even if computing them is faster")
    inclusive: bool = option(False, "keep recent blocks in host memory even if device memory has them too")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine process. They are pickled and sent to that process."""

    model: str = option(DEFAULT_MODEL, "Hugging Face folder, .gguf file, or the packaged model smollm2")
    device: str = option("cpu", "cpu, cuda or cuda:N")
    dtype: str = option("f32", "f32, bf16 or f16")
    tiers: TierOptions = field(default_factory=TierOptions)
    tensor_parallel: int = option(1, "number of processes that share the model's heads", metavar="RANKS")
    invariant: bool = option(False, "make answers independent of the other requests in a batch; slower")
    products: str = option("exact", "method of multiplying quantised matrices on the CPU", choices=("exact", "integer"))
    """`integer` is faster for few tokens. It rounds the activations, so answers can differ."""
    max_rows: int = option(64, "maximum number of requests per step")
    max_step_tokens: int = option(
        0, "maximum number of tokens per step; longer prompts are split; 0: 512 on a GPU, 128 on a CPU"
    )
    """A higher value delays the tokens of other requests. It makes prefill faster until the processor is busy."""
    phases: int = option(
        0, "steps in flight; with 2, a step is scheduled while the previous step runs; 0: 2 on a GPU, 1 on a CPU"
    )
    draft_tokens: int = option(0, "tokens to draft per step by n-gram lookup; 0: off")
    threads: int = option(0, "number of torch threads; 0: automatic")
    """Automatic: number of usable cores (CPU affinity, cgroup limits) minus one for the front end, but at least 1."""
    events: str = option("", "publish KV events for routers over ZMQ, in vLLM's format", metavar="URL")
    """Anyone who can connect to this address can read the tokens of all prompts, unless `events_token_ids` is False."""
    events_replay: str = option("", "answer requests for missed events at this address", metavar="URL")
    events_token_ids: bool = True
    """False to leave the tokens of prompts out of the events."""
    record: str = option("", "write a trace of the requests, without their text, for kvtier replay", metavar="FILE")

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens per step. An automatic value is at least `max_rows`."""
        automatic = _CPU_STEP_TOKENS if self.device == "cpu" else _GPU_STEP_TOKENS
        return self.max_step_tokens or max(automatic, self.max_rows)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that prevent one client from using all resources of the server."""

    waiting: int = option(256, "answers that may wait for the engine; further requests get 429", "max_waiting")
    answers: int = option(16, "answers per request (n times the number of prompts)", "max_answers")
    body_bytes: int = option(4 << 20, "size of a body; larger bodies get 413", "max_body_bytes")
    body_seconds: float = option(30.0, "time to receive a body")
    request_seconds: float = option(600.0, "time to complete a request")
    drain_seconds: float = option(30.0, "time for requests to finish after SIGTERM")
    prepare_seconds: float = option(5.0, "time to tokenize a long prompt or to compile a schema")
    prepare_processes: int = option(2, "worker processes that tokenize and compile")
    buffered_bytes: int = option(64 << 20, "total size of bodies that are being read or prepared", "max_buffered_bytes")
    """One tenant may use at most half of this size. The first 64 KiB of each body do not count."""
    response_bytes: int = option(64 << 20, "size of a response that is not streamed", "max_response_bytes")
    """Only responses with log-probabilities get this large."""
    engine_reply_seconds: float = option(5.0, "time for the engine process to reply")
    """The replying thread only forwards commands, so it usually replies within milliseconds. 5 s are enough even if the
    machine swaps."""
    engine_step_seconds: float = option(120.0, "time for a step of the engine")
    """The longest step is a prefill of `step_tokens` tokens. For an 8B model, 512 tokens take about 80 s on two CPU
    cores with 100 GFLOP/s in total."""
    control_seconds: float = option(120.0, "time for a call to the control API")
    """Calls that save or clear stores take the longest."""
    connections: int = option(1024, "open connections; fewer if ulimit -n is low", "max_connections")
    connections_per_address: int = option(512, "open connections from one address", "max_connections_per_address")
    """An address is an IPv4 address or an IPv6 /64 network. At most three quarters of all connections can come
    from one address."""
    url_bytes: int = option(8 << 10, "length of a URL; longer URLs get 414", "max_url_bytes")
    header_bytes: int = option(64 << 10, "total size of all headers; larger headers get 431", "max_header_bytes")
    headers: int = 100
    """Maximum number of headers in a request."""
    header_seconds: float = option(10.0, "time to receive the headers of a request")
    idle_seconds: float = option(15.0, "time between two requests on a connection")
    """httpx and OpenAI's client close idle connections after 5 s, before the server does. These clients therefore never
    send a request on a connection that the server is closing."""
    send_seconds: float = option(60.0, "time after which a client that does not read its response is disconnected")
    """nginx's send_timeout has the same default."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise RangeError(f"limits.{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """An API key with its own quotas. A salt in the block keys separates the caches of different tenants."""

    name: str
    key: str = field(repr=False)
    admin: bool = False
    max_requests: int = 0
    """Limit on concurrent requests; 0 for no limit."""
    tokens_per_minute: int = 0
    """Limit on uncached prompt tokens plus generated tokens; 0 for no limit."""
    device_blocks: int = 0
    """Quota in the device tier, for all values of `cache_salt` together; 0 for no quota. A tenant at its quota evicts
    its own blocks."""
    host_blocks: int = 0
    """Quota in the host tier; 0 for no quota."""
    max_priority: int = 0
    """Highest priority of the tenant's requests. A higher `priority` in a request is lowered to this value."""

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
    """Return the name of a tenant, or an empty string in a server without tenants."""
    return tenant.name if tenant is not None else ""


def salt_of(tenant: Tenant | None, cache_salt: str | None) -> bytes:
    """Return the salt of block keys, which separates the caches of different tenants and `cache_salt` values."""
    if tenant is None and cache_salt is None:
        return b""
    return f"{tenant_name(tenant)}\0{cache_salt or ''}".encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of the server and its engine process."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)
    host: str = option("127.0.0.1", "address to listen on; a non-local address needs API keys", metavar="ADDRESS")
    port: int = option(8000, "port to listen on; 0: any free port", metavar="PORT")
    metrics_port: int = option(0, "port for GET /metrics without a key; 0: none", metavar="PORT")
    otlp_traces_endpoint: str = option("", "OTLP/HTTP address for traces (extra `otel`)", metavar="URL")
    """For example http://collector:4318/v1/traces. One trace per completion request."""
    names: tuple[str, ...] = option((), "name of the model in the API; repeatable (default: end of --model)", "name")
    allow_origin: tuple[str, ...] = option((), "site whose pages may send requests (CORS); repeatable", metavar="URL")
    keep_billing_line: bool = option(False, "keep the line that some clients put at the head of the system text")
    """The line starts with `x-anthropic-billing-header:` and changes with every request. It is removed by default,
    because the cached prefix would end at this line."""
    tenants: tuple[Tenant, ...] = ()
    """A server without tenants has no keys. It accepts only clients on this machine and treats them as admins."""

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("metrics_port", self.metrics_port)):
            if not 0 <= port < 65536:
                raise RangeError(f"{name} must be in [0, 65536), got {port}")
        if self.metrics_port and self.metrics_port == self.port:
            raise ArgumentError(f"port and metrics_port are both {self.port}; choose another --metrics-port")
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names) or len({tenant.key for tenant in self.tenants}) < len(names):
            raise ArgumentError("two tenants share a name or a key; each tenant needs its own")
        if not self.tenants and self.host not in LOCAL_HOSTS:
            raise ArgumentError(
                f"--host {self.host} is reachable from other machines and there are no API keys; "
                "set KVTIER_API_KEY (and KVTIER_ADMIN_KEY), or add tenants to the TOML file"
            )

        if "*" in self.allow_origin and not self.tenants:
            raise ArgumentError(
                "--allow-origin * lets every web page use this server, which has no API keys; "
                "set KVTIER_API_KEY, or list the origins, such as https://chat.example.com"
            )

    @property
    def model_name(self) -> str:
        """The first name of the model."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.names or (self.engine.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf"),)
