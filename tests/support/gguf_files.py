"""Tiny GGUF files with random weights, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HIDDEN = 32
FEED_FORWARD = 64
HEADS = 2
CONTEXT = 128

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>")
_NORMAL, _CONTROL = 1, 3


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def write_tiny_llama_gguf(file: Path, seed: int = 7) -> dict[str, np.ndarray[Any, Any]]:
    """Write a one-layer llama in float32 with a byte-level tokenizer of the "smollm" kind; its tensors by GGUF name."""
    from gguf import GGUFWriter

    # One merge beside the bytes: two blanks.
    tokens = [*_CONTROL_TOKENS, *_byte_characters(), "ĠĠ"]
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in _CONTROL_TOKENS else _NORMAL for token in tokens])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(False)

    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        "output_norm.weight": (HIDDEN,),
    }
    random = np.random.default_rng(seed)
    tensors = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
