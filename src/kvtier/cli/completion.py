"""`kvtier completion`: completion scripts for shells."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping

from kvtier.cli.parser import Commands, Parser, add_command

_BASH = """\
# kvtier completion bash > ~/.local/share/bash-completion/completions/kvtier
_kvtier() {{
  local words command i
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ ${{COMP_WORDS[i]}} != -* ]] && command=${{COMP_WORDS[i]}} && break
  done
  case $command in
{cases}
    *) words="{commands} --help --version" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  [[ ${{#COMPREPLY[@]}} == 0 ]] && COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -F _kvtier kvtier
"""
_ZSH_HEAD = "#compdef kvtier\nautoload -U +X bashcompinit && bashcompinit\n"


def add(commands: Commands) -> None:
    text = "Print a shell completion script."
    examples = """
    source <(kvtier completion bash)
    kvtier completion zsh > "${fpath[1]}/_kvtier"
    kvtier completion fish > ~/.config/fish/completions/kvtier.fish
    """

    def run(options: argparse.Namespace) -> int:
        parsers: dict[str, Parser] = dict(commands.choices)
        words = {name: _flags(parser) for name, parser in parsers.items()}
        if options.json:
            print(json.dumps(words))
        elif options.shell == "fish":
            print(*_fish(words, parsers), sep="\n")
        else:
            cases = "\n".join(f'    {name}) words="{" ".join(flags)}" ;;' for name, flags in words.items())
            script = _BASH.format(cases=cases, commands=" ".join(words))
            print(_ZSH_HEAD + script if options.shell == "zsh" else script, end="")
        return 0

    command = add_command(commands, "completion", text, examples, run, "SHELL")
    command.add_argument("shell", choices=("bash", "fish", "zsh"), metavar="SHELL", help="bash, fish or zsh")


def _flags(parser: Parser) -> list[str]:
    names = [name for action in parser.options.values() for name in action.option_strings]
    return ["--help", "--config", *(name for name in names if name.startswith("--"))]


def _fish(words: Mapping[str, list[str]], parsers: Mapping[str, Parser]) -> Iterator[str]:
    for name, flags in words.items():
        text = (parsers[name].description or "").replace("'", "")
        yield f"complete -c kvtier -n __fish_use_subcommand -a {name} -d '{text}'"
        for flag in flags:
            yield f"complete -c kvtier -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}"
