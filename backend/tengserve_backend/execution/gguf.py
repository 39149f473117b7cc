"""Convert a GGUF file into a folder of Hugging Face files.

transformers does the work; this adds what it leaves out: the digit split of the "smollm" tokenizer, and the other
ids that end an answer.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError, TengserveError
from tengserve_backend.repository.source import Progress

_log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_CONVERTING = "converting the GGUF weights (only once)"
_END_OF_GENERATION = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer whether or not the file's metadata says so, as in llama.cpp."""


def convert_gguf(gguf: Path, target: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, tokenizer files and float32 safetensors into an empty folder.

    Raises:
        ConfigurationError: the file is no GGUF file, or none that transformers can read.
    """
    with gguf.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ConfigurationError("the file is no GGUF file, or is damaged")
    progress(_CONVERTING, 0.0)
    # Heavy, and needed only when there is something to convert.
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = str(gguf.parent)
    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        metadata = _metadata(gguf)
        progress(_CONVERTING, 0.1)
        tokenizer = AutoTokenizer.from_pretrained(folder, **place)
        _fix_pre_tokenizer(tokenizer, metadata.get("tokenizer.ggml.pre"))
        progress(_CONVERTING, 0.3)
        model = AutoModelForCausalLM.from_pretrained(
            folder, **place, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except TengserveError:
        raise  # From `progress`, which may end the load.
    except Exception as error:  # A reader of foreign files may raise anything; the operator gets one sentence.
        raise ConfigurationError(
            f"the GGUF file cannot be converted ({type(error).__name__}); "
            f"it may be damaged, or of an architecture that transformers does not read from GGUF"
        ) from error
    progress(_CONVERTING, 0.8)
    model.generation_config.eos_token_id = _end_ids(metadata, tokenizer)
    try:
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)
    except SafetensorError as error:
        # What a full disk becomes inside safetensors.
        raise OSError(errno.EIO, str(error)) from error
    progress(_CONVERTING, 1.0)


def _metadata(gguf: Path) -> dict[str, Any]:
    """The few metadata values that are needed here, read without the tensors."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
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
    elif kind not in (None, "default", "gpt-2") and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        _log.warning('the tokenizer kind "%s" is read as GPT-2\'s: some text may be split differently', kind)


def _end_ids(metadata: dict[str, Any], tokenizer: Any) -> list[int]:
    """Every token id that ends an answer, the tokenizer's EOS first."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends += [special.get(text) for text in _END_OF_GENERATION]
    return list(dict.fromkeys(int(end) for end in ends if end is not None))
