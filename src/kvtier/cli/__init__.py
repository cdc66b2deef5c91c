"""The `kvtier` command and its subcommands."""

from kvtier.cli.main import main

__all__ = ["main"]
