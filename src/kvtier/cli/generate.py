"""`kvtier generate` and `kvtier chat`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from kvtier.cli.engine_options import add_engine_options, engine_options
from kvtier.cli.parser import Commands, Parser, add_command
from kvtier.errors import ArgumentError

if TYPE_CHECKING:
    from kvtier.engine.llm import LLM
    from kvtier.engine.params import Output, SamplingParams


def add(commands: Commands) -> None:
    """`generate` and `chat`."""
    text = "Continue prompts, or each line of standard input, with a model on this machine."
    examples = """
    kvtier generate "The capital of France is"
    kvtier generate --temperature 0.8 --seed 1 --json < prompts.txt
    """
    command = add_command(commands, "generate", text, examples, generate)
    command.add_argument("prompt", nargs="*", help="the prompts; without any, the lines of standard input")
    _add_options(command)
    text = "Talk to a model in the terminal. An empty line ends it; what was read before is not read again."
    examples = """
    kvtier chat
    kvtier chat --once "What is the capital of France?" --json
    kvtier chat --system "Answer in French." --first "Hello"
    """
    command = add_command(commands, "chat", text, examples, chat)
    command.add_argument("--system", help="a system message to begin with")
    command.add_argument("--first", metavar="MESSAGE", help="send this message first, then ask for more")
    command.add_argument("--once", metavar="MESSAGE", help="send one message, print the answer and end")
    _add_options(command)


def generate(options: argparse.Namespace) -> int:
    """Print the continuation of every prompt."""
    params = _params(options)
    prompts = [_text(prompt) for prompt in options.prompt or [line.rstrip("\n") for line in sys.stdin]]
    llm = _llm(options)
    num_failed = 0
    for prompt, answers in zip(prompts, llm.generate(prompts, params), strict=True):
        for answer in answers:
            num_failed += _tell_failure(answer)
            if options.json:
                _print_json({"prompt": prompt, "text": answer.text, **_counts(answer)})
            else:
                print(f"{prompt}{answer.text}")
                _note(options, answer)
    llm.close()
    return 1 if num_failed else 0


def chat(options: argparse.Namespace) -> int:
    """A conversation, each answer printed as it is written."""
    params = _params(options)
    messages = [{"role": "system", "content": _text(options.system)}] if options.system else []
    first = _text(options.once or options.first or "")
    llm = _llm(options)
    if first and not options.json:
        print(f"> {first}")
    is_failed = False
    while not is_failed and (text := first or _ask(options)):
        first = ""
        messages.append({"role": "user", "content": text})
        answer, last = _answer(llm, messages, params, options)
        messages.append({"role": "assistant", "content": answer})
        is_failed = _tell_failure(last)
        if options.once:
            break
    llm.close()
    return 1 if is_failed else 0


def _answer(
    llm: LLM, messages: list[dict[str, str]], params: SamplingParams, options: argparse.Namespace
) -> tuple[str, Output]:
    """The whole text, and what was told of its end."""
    text, output = "", None
    llm.engine.add(llm.tokenizer.encode_chat(messages), params)
    while llm.engine.has_work():
        for output in llm.engine.step():
            text += output.text
            if not options.json:
                print(output.text, end="", flush=True)
    assert output is not None
    if options.json:
        _print_json({"text": text, **_counts(output)})
    else:
        print()
        _note(options, output)
    return text, output


def _tell_failure(answer: Output | Any) -> bool:
    """Whether an answer is missing, or half of it is; then say why."""
    from kvtier.engine.params import FinishReason

    if answer.finish_reason not in (FinishReason.REFUSED, FinishReason.ERROR):
        return False
    print(f"kvtier: {answer.finish_reason.value}: {answer.error}", file=sys.stderr)
    return True


def _ask(options: argparse.Namespace) -> str:
    try:
        return _text(input("> " if sys.stdin.isatty() and not options.json else ""))
    except EOFError:
        return ""


def _counts(answer: Any) -> dict[str, Any]:
    return {
        "finish_reason": answer.finish_reason.value,
        "prompt_tokens": answer.num_prompt_tokens,
        "cached_tokens": answer.num_cached_tokens,
    }


def _print_json(told: dict[str, Any]) -> None:
    is_utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")  # what others cannot encode must be a JSON escape
    print(json.dumps(told, ensure_ascii=not is_utf8), flush=True)


def _text(given: str) -> str:
    """A prompt as UTF-8 text, whatever the locale; an ArgumentError if its bytes are none."""
    try:
        given.encode()
        return given
    except UnicodeEncodeError:  # Python keeps bytes that the locale cannot decode as surrogates
        pass
    try:
        return os.fsencode(given).decode("utf-8")
    except UnicodeError as error:
        raise ArgumentError(f"the prompt {given[:40]!a} is not valid UTF-8: {error}") from error


def _note(options: argparse.Namespace, answer: Output | Any) -> None:
    if options.verbose:
        print(f"[{answer.num_prompt_tokens} tokens, {answer.num_cached_tokens} of them cached]", file=sys.stderr)


def _llm(options: argparse.Namespace) -> LLM:
    from kvtier.server.engine_process import make_llm

    return make_llm(engine_options(options))


def _params(options: argparse.Namespace) -> SamplingParams:
    from kvtier.engine.params import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=tuple(map(_text, options.stop)),
    )


def _add_options(command: Parser) -> None:
    add_engine_options(command)
    add_option = command.add_argument
    add_option("--max-tokens", type=int, default=256, help="the longest answer")
    add_option("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add_option("--top-p", type=float, default=1.0, help="keep the likeliest tokens that reach this probability")
    add_option("--top-k", type=int, default=0, help="keep so many of the likeliest tokens; 0 keeps all")
    add_option("--seed", type=int, help="the same seed gives the same answer")
    add_option("--stop", action="append", default=[], help="end the answer before this text; may be repeated")
    add_option("-v", "--verbose", action="store_true", help="say how much of the prompt was cached")
