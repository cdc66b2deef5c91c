"""`kvtier generate` and `kvtier chat`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.engine.llm import LLM
    from kvtier.engine.sampling import SamplingParams


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`generate` and `chat`."""
    command = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt, or each line of standard input, with a model on this machine.",
    )
    command.add_argument("prompt", nargs="*", help="the prompts; without any, the lines of standard input")
    _options(command)
    command.set_defaults(run=generate)
    command = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model. An empty line or end of input ends it; what was read before is not read again.",
    )
    command.add_argument("--system", help="a system message to begin with")
    command.add_argument("--first", metavar="MESSAGE", help="send this message first, then ask for more")
    command.add_argument("--once", metavar="MESSAGE", help="send one message, print the answer and end")
    _options(command)
    command.set_defaults(run=chat)


def generate(options: argparse.Namespace) -> int:
    """Print the continuation of every prompt."""
    params, llm = _params(options), _llm(options)
    prompts = options.prompt or [line.rstrip("\n") for line in sys.stdin]
    for prompt, answers in zip(prompts, llm.generate(prompts, params), strict=True):
        for answer in answers:
            print(f"{prompt}{answer.text}")
            _note(options, f"{answer.num_prompt_tokens} tokens, {answer.num_cached_tokens} of them cached")
    llm.close()
    return 0


def chat(options: argparse.Namespace) -> int:
    """A conversation, each answer printed as it is written."""
    params, llm = _params(options), _llm(options)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    first = options.once or options.first
    if first:
        print(f"> {first}")
    while text := first or _ask():
        first = None
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": _answer(llm, messages, params, options)})
        if options.once:
            break
    llm.close()
    return 0


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, options: argparse.Namespace) -> str:
    text, output = "", None
    llm.engine.add(llm.tokenizer.encode_chat(messages), params)
    while llm.engine.has_work():
        for output in llm.engine.step():
            text += output.text
            print(output.text, end="", flush=True)
    print()
    if output is not None:
        _note(options, f"{output.num_prompt_tokens} tokens, {output.num_cached_tokens} of them cached")
    return text


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""


def _note(options: argparse.Namespace, what: str) -> None:
    if options.verbose:
        print(f"[{what}]", file=sys.stderr)


def _llm(options: argparse.Namespace) -> LLM:
    from kvtier.cache.host import HostConfig
    from kvtier.cache.manager import CacheConfig
    from kvtier.engine.checkpoint import DEFAULT_MODEL
    from kvtier.engine.engine import EngineConfig
    from kvtier.engine.llm import LLM
    from kvtier.engine.speculate import NgramProposer

    host = HostConfig(options.host_blocks) if options.host_blocks else None
    config = EngineConfig(options.block_tokens, CacheConfig(options.blocks, host=host))
    proposer = NgramProposer(options.draft_tokens) if options.draft_tokens else None
    return LLM(options.model or DEFAULT_MODEL, config, dtype=options.dtype, device=options.device, proposer=proposer)


def _params(options: argparse.Namespace) -> SamplingParams:
    from kvtier.engine.sampling import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
    )


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help="a Hugging Face folder or a .gguf file; a small packaged model without it")
    command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ..")
    command.add_argument("--dtype", default="f32", help="f32, bf16 or f16")
    command.add_argument("--max-tokens", type=int, default=256, help="the longest answer")
    command.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--seed", type=int)
    command.add_argument("--stop", action="append", default=[], help="end the answer before this text; may be repeated")
    command.add_argument("--blocks", type=int, default=1024, help="blocks of KV in the cache")
    command.add_argument("--host-blocks", type=int, default=0, help="blocks of KV in host memory, for what is evicted")
    command.add_argument("--block-tokens", type=int, default=16, help="tokens in a block")
    command.add_argument(
        "--draft-tokens", type=int, default=0, help="guess so many tokens from what was written before"
    )
    command.add_argument("-v", "--verbose", action="store_true", help="say how much of the prompt was cached")
