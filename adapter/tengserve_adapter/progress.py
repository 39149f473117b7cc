"""What the person who starts the server reads: progress while models load, then lines to paste."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

from tengserve_backend.engine.base import ModelInfo

_PROMPT = "My name is Olivier and I"
# "My name is Olivier and I" for the quick-start model; any ids below the vocabulary size do for another one.
_PROMPT_IDS = (5965, 1462, 314, 11256, 380, 1153, 284, 339)


def say(text: str) -> None:
    """One line for the person at the terminal, on stdout, at once; a closed stdout is no reason to fail."""
    try:
        print(text, flush=True)  # noqa: T201 - the command's own output
    except OSError:
        # The reader of a pipe has gone; what is served does not depend on it. Nothing more can be said.
        sys.stdout = None  # print() then does nothing, as Python documents


class ProgressPrinter:
    """Prints the loading of models on stderr: one rewritten line on a terminal, one line a stage elsewhere.

    Called from the loading thread; `close` may come from another.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()
        self._lock = threading.Lock()
        self._last: tuple[str, str, int] | None = None

    def __call__(self, model: str, stage: str, fraction: float) -> None:
        """The model's stage and how far it is, from 0.0 to 1.0."""
        percent = round(100 * min(max(fraction, 0.0), 1.0))
        with self._lock:
            if self._last == (model, stage, percent):
                return
            new_stage = self._last is None or self._last[:2] != (model, stage)
            # Without a terminal, only the start of a stage and its end are worth a line.
            if self._rewrites or new_stage or percent == 100:
                self._write(f"loading {model}: {stage} {percent} %", new_stage=new_stage)
            self._last = (model, stage, percent)

    def close(self) -> None:
        """Leave the rewritten line."""
        with self._lock:
            if self._rewrites and self._last is not None:
                self._put("\n")
            self._last = None

    def _write(self, text: str, *, new_stage: bool) -> None:
        if not self._rewrites:
            self._put(text + "\n")
        elif new_stage and self._last is not None:
            self._put("\n" + text)
        else:
            self._put("\r\x1b[K" + text)

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # stderr is gone; loading goes on.
            self._rewrites = False


def sample_commands(url: str, model: ModelInfo, *, is_default: bool) -> list[str]:
    """curl command lines that work when pasted into a shell.

    Args:
        url: where the server listens, as a client on this machine reaches it.
        model: a model that is ready.
        is_default: whether /infer and /infer_token, which name no model, mean this one.
    """
    ids = [token_id % model.vocab_size for token_id in _PROMPT_IDS]
    greedy = {"max_new_tokens": 20}
    generate = {"text_input": _PROMPT, "parameters": greedy}
    commands = []
    if is_default:
        commands = [
            _curl(f"{url}/infer", {"inputs": _PROMPT, "parameters": greedy}),
            _curl(f"{url}/infer", {"inputs": _PROMPT, "stream": True, "parameters": greedy}, stream=True),
            _curl(f"{url}/infer_token", {"input_id": ids, "parameters": greedy}),
        ]
    base = f"{url}/v2/models/{model.name}"
    return [
        *commands,
        _curl(f"{base}/generate", generate),
        _curl(f"{base}/generate_stream", generate, stream=True),
    ]


def ready_text(url: str, commands: Sequence[str]) -> str:
    """The block that is printed when the server is ready."""
    return "\n".join([f"tengserve is ready at {url}. Try:", *(f"  {command}" for command in commands)])


def _curl(url: str, body: object, *, stream: bool = False) -> str:
    options = "-sN" if stream else "-s"
    return f"curl {options} {shlex.quote(url)} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
