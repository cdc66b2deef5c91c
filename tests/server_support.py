"""For tests of the server: a tiny model with a tokenizer of bytes, and real server processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 2048


def make_tiny_model(folder: Path) -> Path:
    """A Llama of 2 layers with random weights, whose 259 tokens are the bytes and three special ones."""
    import tokenizers
    import torch
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in special])
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=257,
        bos_token_id=None,
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.ndim == 1))
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


class ServerProcess:
    """`kvtier serve` in a process of its own, on a free port. Its log is kept in a file."""

    def __init__(self, log: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._log = log
        self._clients: dict[str, openai.OpenAI] = {}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtier", "serve", "--port", "0", "--json", *arguments],
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server did not start:\n{self.log}"
        told = json.loads(line)
        self.url, self.model = told["address"], told["model"]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engine_pid(self) -> int:
        """Of the engine process: the child that is not multiprocessing's own helper."""
        for child in psutil.Process(self.process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError("there is no engine process")

    def client(self, key: str = "no key") -> openai.OpenAI:
        """OpenAI's own, one for each key; closed with the server."""
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        return self._clients[key]

    def async_client(self, key: str = "no key") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def get(self, path: str, key: str = "") -> httpx.Response:
        return httpx.get(self.url + path, headers=_headers(key), timeout=60)

    def post(self, path: str, body: Any = None, key: str = "", **options: Any) -> httpx.Response:
        options = options or {"json": body}
        return httpx.post(
            self.url + path, headers={**_headers(key), **options.pop("headers", {})}, timeout=60, **options
        )

    def state(self, key: str = "") -> dict[str, Any]:
        answer = self.get("/state", key)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_for(
        self, condition: Callable[[dict[str, Any]], bool], seconds: float = 30, key: str = ""
    ) -> dict[str, Any]:
        """Look at the state until it is as it should be."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.state(key)):
            assert time.monotonic() < deadline, f"not in {seconds} s: {state}"
            time.sleep(0.02)
        return state

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM; returns the exit code."""
        for client in self._clients.values():
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
