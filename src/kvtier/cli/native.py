"""`kvtier build-native`: compiles the native code for a container image."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvtier.engine.native import SOURCE as ENGINE
from kvtier.index.native import SOURCE as INDEX
from kvtier.memory.native import SOURCE as MEMORY
from kvtier.native_code import build
from kvtier.storage.checksum import SOURCE as STORAGE


def build_native(options: argparse.Namespace) -> int:
    """Compile all libraries. Return 1 if a library has no variant that runs on every processor."""
    folder = Path(options.folder).resolve()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    failed = False
    for source in (ENGINE, INDEX, MEMORY, STORAGE):
        error = ""
        for variant, path, error in build(source, folder):
            row = {"library": source.package, "variant": variant.name, "path": str(path), "error": error}
            text = "{library} ({variant}): {error}" if error else "{library} ({variant}): {path}"
            print(json.dumps(row) if options.json else text.format(**row))
        failed |= bool(error)  # the error of the last variant, which runs on every processor
    return int(failed)
