"""Convert a GGUF file into a folder of Hugging Face files.

transformers does the work; this adds what it leaves out: the digit split of the "smollm" tokenizer, and the other ids
that end an answer.

It runs in a process of its own, `python -m tengserve_backend.execution.gguf GGUF TARGET`: most of the time goes into
Python loops, which would keep the server from answering health probes; a stop can end it at once; and the memory that
it took is given back. The process writes lines of JSON: `{"progress": FRACTION}`, or `{"errno": NUMBER}` when the
result cannot be written.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from tengserve_backend.devices.npu.guard import forgo
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.source import Progress

_log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_STAGE = "converting the GGUF weights (only once)"
_POLL_S = 0.2
_EXIT_TIMEOUT_S = 30.0
_LOGGED_BYTES = 4000
_END_OF_GENERATION = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer whether or not the file's metadata says so, as in llama.cpp."""


def convert_gguf(gguf: Path, target: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, tokenizer files and float32 safetensors into an empty folder.

    Blocks; the converting process ends when `progress` raises.

    Raises:
        ConfigurationError: the file is no GGUF file, or none that transformers can read.
        OSError: the files cannot be written.
    """
    with gguf.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ConfigurationError("the file is no GGUF file, or is damaged")
    progress(_STAGE, 0.0)
    command = [sys.executable, "-m", __name__, str(gguf), str(target)]
    # Progress bars of libraries are for people at a terminal; ours goes through `progress`.
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(  # noqa: S603 - our own module with two paths, and no shell
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, env=environment
        ) as process,
    ):
        try:
            write_errno = _follow(cast(IO[bytes], process.stdout), progress)
            status = process.wait(_EXIT_TIMEOUT_S)
        finally:
            process.kill()  # Harmless when it has ended.
        if status == 0:
            return
        complaints.seek(0, os.SEEK_END)
        complaints.seek(max(0, complaints.tell() - _LOGGED_BYTES))
        _log.error("the GGUF converter ended with status %d: %s", status, complaints.read().decode(errors="replace"))
    if write_errno is not None:
        raise OSError(write_errno, os.strerror(write_errno))
    raise ConfigurationError(
        "the GGUF file cannot be converted: it may be damaged, or of an architecture that transformers does not read "
        "from GGUF, or memory may be short; the server's log has more"
    )


def _follow(output: IO[bytes], progress: Progress) -> int | None:
    """Report the process's progress until it closes its output; the number of the write error that it told, if any."""
    write_errno = None
    done = 0.0
    unfinished = b""
    while True:
        ready, _, _ = select.select([output], [], [], _POLL_S)
        if ready:
            data = os.read(output.fileno(), 65536)
            if not data:
                return write_errno
            *lines, unfinished = (unfinished + data).split(b"\n")
            for message in map(json.loads, lines):
                done = message.get("progress", done)
                write_errno = message.get("errno", write_errno)
        progress(_STAGE, done)  # Also while nothing changes: this is where a stop gets through.


def _main(gguf: Path, target: Path) -> int:
    """The converting process."""
    forgo()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Libraries may print; only our lines may reach the parent.
    parent = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**message: float) -> None:
        parent.write(json.dumps(message) + "\n")

    try:
        _convert(gguf, target, lambda fraction: tell(progress=fraction))
    except _WriteError as error:
        tell(errno=error.errno)
        raise
    return 0


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however it went: a pipe closes with its last writer."""
    os.read(0, 1)  # Nothing is ever written to it.
    os._exit(1)


class _WriteError(Exception):
    """The result could not be written."""

    def __init__(self, cause: Exception, number: int) -> None:
        super().__init__(str(cause))
        self.errno = number


def _convert(gguf: Path, target: Path, report: Callable[[float], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _read_once()
    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    report(0.1)
    metadata = _metadata(gguf)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **place)
    _fix_pre_tokenizer(tokenizer, metadata.get("tokenizer.ggml.pre"))
    report(0.3)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), **place, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config.eos_token_id = _end_ids(metadata, tokenizer)
    report(0.8)
    with _write_errors():
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)
    report(1.0)


def _read_once() -> None:
    """Let what transformers does over and over be done once in this process: that is half of a conversion.

    transformers 5.24 parses the file's metadata three times, each vocabulary and list of merges entry by entry, and
    makes the table of tensor names for every module of the model. It takes both functions from `gguf` as it calls them.
    """
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise _WriteError(error, error.errno or errno.EIO) from error
    except SafetensorError as error:
        # What a full disk becomes inside safetensors.
        raise _WriteError(error, errno.EIO) from error


def _metadata(gguf: Path) -> dict[str, Any]:
    """The few metadata values that are needed here, read without the tensors."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))  # As transformers calls it: of one path there is one reader.
    wanted = (
        "tokenizer.ggml.pre",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    )
    fields = {name: reader.get_field(name) for name in wanted}
    return {name: field.contents() for name, field in fields.items() if field is not None}


def _fix_pre_tokenizer(tokenizer: Any, kind: str | None) -> None:
    """Split text before the merges as the model was trained with.

    transformers 5.24 gives a kind that it does not know GPT-2's split. For "smollm" that is wrong: each digit stands
    alone there, which also changes how white space before a digit is cut.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if kind == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _end_ids(metadata: dict[str, Any], tokenizer: Any) -> list[int]:
    """Every token id that ends an answer, the tokenizer's EOS first."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends += [special.get(text) for text in _END_OF_GENERATION]
    return list(dict.fromkeys(int(end) for end in ends if end is not None))


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), Path(sys.argv[2])))
