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
    from kvtier.engine.params import SamplingParams


def add(commands: Commands) -> None:
    text = "Generate text from prompts. Without arguments, every line of standard input is a prompt."
    examples = """
    kvtier generate "The capital of France is"
    kvtier generate --temperature 0.8 --seed 1 --json < prompts.txt
    """
    command = add_command(commands, "generate", text, examples, generate, "[PROMPT ...]")
    command.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to continue")
    _add_options(command)
    text = "Chat with a model in the terminal. An empty line ends the conversation."
    examples = """
    kvtier chat
    kvtier chat --once "What is the capital of France?" --json
    kvtier chat --system "Answer in French." --first "Hello"
    """
    command = add_command(commands, "chat", text, examples, chat)
    command.add_argument("--system", metavar="MESSAGE", help="system message of the conversation")
    command.add_argument("--first", metavar="MESSAGE", help="send this message, then read messages from the terminal")
    command.add_argument("--once", metavar="MESSAGE", help="send this message, print the answer and exit")
    _add_options(command)


def generate(options: argparse.Namespace) -> int:
    params = _params(options)
    prompts = [_text(prompt) for prompt in options.prompt or [line.rstrip("\n") for line in sys.stdin]]
    llm = _llm(options)
    num_failed = 0
    for prompt, answers in zip(prompts, llm.generate(prompts, params), strict=True):
        for answer in answers:
            if not options.json:
                print(f"{prompt}{answer.text}")
            num_failed += _report(options, answer, {"prompt": prompt, "text": answer.text})
    llm.close()
    return 1 if num_failed else 0


def chat(options: argparse.Namespace) -> int:
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
        llm.engine.add(llm.tokenizer.encode_chat(messages), params)
        answer, output = "", None
        while llm.engine.has_work():
            for output in llm.engine.step():
                answer += output.text
                if not options.json:
                    print(output.text, end="" if output.finish_reason is None else "\n", flush=True)
        messages.append({"role": "assistant", "content": answer})
        is_failed = _report(options, output, {"text": answer})
        if options.once:
            break
    llm.close()
    return 1 if is_failed else 0


def _report(options: argparse.Namespace, answer: Any, row: dict[str, str]) -> bool:
    """Print an answer (--json) or its token counts (--verbose). After a failure, print the error and return True."""
    from kvtier.engine.params import FinishReason

    reason, num_prompt, num_cached = answer.finish_reason, answer.num_prompt_tokens, answer.num_cached_tokens
    if options.json:
        numbers = {"finish_reason": reason.value, "prompt_tokens": num_prompt, "cached_tokens": num_cached}
        is_utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")  # other encodings need JSON escapes
        print(json.dumps({**row, **numbers}, ensure_ascii=not is_utf8), flush=True)
    elif options.verbose:
        print(f"[prompt: {num_prompt} tokens, {num_cached} cached]", file=sys.stderr)
    is_failed = reason in (FinishReason.REFUSED, FinishReason.ERROR)
    if is_failed:
        print(f"kvtier: {reason.value}: {answer.error}", file=sys.stderr)
    return is_failed


def _ask(options: argparse.Namespace) -> str:
    try:
        return _text(input("> " if sys.stdin.isatty() and not options.json else ""))
    except EOFError:
        return ""


def _text(given: str) -> str:
    """Return a text from the user, decoded as UTF-8 in every locale. Raise ArgumentError for invalid UTF-8."""
    try:
        given.encode()
        return given
    except UnicodeEncodeError:  # surrogates in the text stand for bytes that the locale could not decode
        pass
    try:
        return os.fsencode(given).decode("utf-8")
    except UnicodeError as error:
        raise ArgumentError(f"the text {given[:40]!a} is not valid UTF-8: {error}") from error


def _llm(options: argparse.Namespace) -> LLM:
    from kvtier.server.engine_process import make_llm

    return make_llm(engine_options(options))


def _params(options: argparse.Namespace) -> SamplingParams:
    from kvtier.engine.params import SamplingParams

    names = ("temperature", "top_p", "top_k", "seed", "max_tokens")
    return SamplingParams(**{name: getattr(options, name) for name in names}, stop=tuple(map(_text, options.stop)))


def _add_options(command: Parser) -> None:
    command.add_argument("-v", "--verbose", action="store_true", help="show how many tokens of the prompt were cached")
    add_engine_options(command)
    option = command.add_argument_group("sampling").add_argument
    option("--max-tokens", type=int, default=256, metavar="N", help="maximum number of tokens in an answer")
    option("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0: greedy")
    option("--top-p", type=float, default=1.0, metavar="P", help="sample from the top tokens with total probability P")
    option("--top-k", type=int, default=0, metavar="N", help="sample from the N most likely tokens; 0: all")
    option("--seed", type=int, metavar="N", help="seed for reproducible answers")
    option("--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; repeatable")
