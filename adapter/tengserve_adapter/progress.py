"""What the person who starts the server reads: progress while models load, then lines to paste."""

from __future__ import annotations

import json
import math
import shlex
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.inference import Datatype, TensorSpec

_ERASE = "\r\x1b[K"

_PROMPT = "My name is Olivier and I"
# "My name is Olivier and I" for the quick-start model; any ids below the vocabulary size do for another one.
_PROMPT_IDS = (5965, 1462, 314, 11256, 380, 1153, 284, 339)
_MAX_ELEMENTS = 16
"""More do not make a line to paste."""
_BINARY_ONLY = frozenset({Datatype.FP16, Datatype.BF16})


def say(text: str) -> None:
    """One line for the person at the terminal, on stdout, at once; a closed stdout is no reason to fail."""
    try:
        print(text, flush=True)  # noqa: T201 - the command's own output
    except OSError:
        # The reader of a pipe has gone; what is served does not depend on it. Nothing more can be said.
        sys.stdout = None  # print() then does nothing, as Python documents


class ProgressPrinter:
    """Prints the loading of models on stderr: one rewritten line on a terminal, one line a stage elsewhere.

    It is also the stream of the log, so that a record and the rewritten line do not stand in each other's way. Every
    method may be called from any thread.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()
        self._lock = threading.Lock()
        self._last: tuple[str, str, int] | None = None
        self._moves = False
        self._line = ""

    def __call__(self, model: str, stage: str, fraction: float) -> None:
        """The model's stage and how far it is, from 0.0 to 1.0."""
        percent = round(100 * min(max(fraction, 0.0), 1.0))
        with self._lock:
            if self._last == (model, stage, percent):
                return
            new_stage = self._last is None or self._last[:2] != (model, stage)
            self._last = (model, stage, percent)
            # A stage that tells only its start or its end has no way between them to show.
            self._moves = 0 < percent < 100 or (self._moves and not new_stage)
            line = f"loading {model}: {stage}" + (f" {percent} %" if self._moves else "")
            if self._rewrites:
                self._line = line
                self._put(_ERASE + line)
            elif new_stage or (self._moves and percent == 100):
                self._put(line + "\n")

    def loaded(self, model: str, seconds: float) -> None:
        """The model is loaded: this line stays."""
        with self._lock:
            self._end(f"loaded {model} in {seconds:.0f} s\n" if seconds >= 1 else f"loaded {model} in under 1 s\n")

    def failed(self) -> None:
        """The load has ended without a model; the log says why."""
        with self._lock:
            self._end("")

    def write(self, text: str) -> None:
        """Print lines of the log above the rewritten line."""
        with self._lock:
            self._put(_ERASE + text + self._line if self._line else text)

    def flush(self) -> None:
        """Nothing: every write is out at once."""

    def _end(self, text: str) -> None:
        self._put(_ERASE + text if self._line else text)
        self._line, self._last, self._moves = "", None, False

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # stderr is gone; loading goes on.
            self._rewrites, self._line = False, ""


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


def tensor_commands(url: str, name: str, inputs: Sequence[TensorSpec]) -> list[str]:
    """The same for a model that takes tensors: a request with one small tensor for each input that it needs.

    A model whose inputs a line cannot hold, for their number of elements or because JSON has no such datatype, tells
    instead which they are.

    Args:
        url: where the server listens.
        name: of a model that is ready.
        inputs: of the model.
    """
    model = f"{url}/v2/models/{name}"
    needed = [spec for spec in inputs if not spec.optional]
    shapes = {spec.name: [max(1, dimension) for dimension in spec.shape] for spec in needed}
    small = sum(map(math.prod, shapes.values())) <= _MAX_ELEMENTS
    if not needed or not small or any(spec.datatype in _BINARY_ONLY for spec in needed):
        return [f"curl -s {shlex.quote(model)}"]
    tensors = [
        {
            "name": spec.name,
            "datatype": spec.datatype.value,
            "shape": shapes[spec.name],
            "data": [_element(spec.datatype)] * math.prod(shapes[spec.name]),
        }
        for spec in needed
    ]
    return [_curl(f"{model}/infer", {"inputs": tensors})]


def _element(datatype: Datatype) -> object:
    match datatype:
        case Datatype.BYTES:
            return _PROMPT
        case Datatype.BOOL:
            return True
        case Datatype.FP32 | Datatype.FP64:
            return 0.5
        case _:
            return 1


def ready_text(
    url: str, ready: Sequence[str], failed: Sequence[str], default: str | None, commands: Sequence[str]
) -> str:
    """The block that is printed when the server is ready.

    Args:
        url: where the server listens.
        ready, failed: names of the models that answer, and of those that did not load.
        default: the model that /infer and /infer_token mean, if there is one.
        commands: what to try.
    """
    lines = [f"tengserve is ready at {url}"]
    if len(ready) + len(failed) > 1:
        lines.append(f"Models: {', '.join(ready)}" + (f" (not loaded: {', '.join(failed)})" if failed else ""))
        if default is None:
            lines.append(
                "/infer and /infer_token name no model, so they are off: --default-model NAME switches them on"
            )
        elif default in failed:
            lines.append(f"/infer and /infer_token mean {default}, which is not loaded")
        else:
            lines.append(f"/infer and /infer_token mean {default}")
    if not ready:
        lines.append(f"It has no model yet: curl -X POST {url}/v2/repository/models/NAME/load loads one")
    return "\n".join([*lines, *(["Try:"] if commands else []), *(f"  {command}" for command in commands)])


def _curl(url: str, body: object, *, stream: bool = False) -> str:
    options = "-sN" if stream else "-s"
    return f"curl {options} {shlex.quote(url)} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
