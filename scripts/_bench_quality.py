"""What number formats cost in quality: each beside plain transformers in float32, told the same text at every token.

The text is this project's own documentation. A model reads it in pieces, each from its beginning; at every token its
most probable next token is compared with that of float32, and its probability of the token that really follows makes
the perplexity.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _bench_weights import weights_folder

from tengserve_backend.devices.select import select_device
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.fusion.quantized import Quantization
from tengserve_backend.execution.loader import DTYPES, load_config, load_model
from tengserve_backend.text.tokenizer import load_tokenizer

_DOCS = Path(__file__).resolve().parents[1] / "docs"
TEXT = ("life-of-a-request.md", "npu.md", "cpu.md", "scope.md", "performance.md")
FORMATS = ("bfloat16", "float32+int8", "bfloat16+int8", "float32+int4", "bfloat16+int4")


@dataclass(frozen=True, slots=True)
class Readings:
    """What a model thinks at each token.

    Attributes:
        next_tokens: the most probable next one.
        losses: minus the log probability of the one that follows.
    """

    next_tokens: torch.Tensor
    losses: torch.Tensor


@torch.inference_mode()
def read(model: Any, pieces: torch.Tensor) -> Readings:
    """What a model thinks of token ids [pieces, length], one piece after the other."""
    chosen, losses = [], []
    for piece in pieces:
        logits = model(input_ids=piece[None], use_cache=False).logits[0, :-1].float()
        chosen.append(logits.argmax(-1))
        losses.append(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none"))
    return Readings(torch.cat(chosen), torch.cat(losses))


def load(folder: Path, name: str) -> Any:
    """The model in a format such as bfloat16+int4, as a CPU serves it."""
    dtype, _, quantization = name.partition("+")
    device = select_device("cpu", quantization=Quantization(quantization or "none"))
    model = load_model(folder, load_config(folder), dtype=DTYPES[dtype], device=device.torch_device)
    device.fuse(model, ())
    return model


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench quality", description=__doc__)
    parser.add_argument("--weights", type=Path, help="a folder of Hugging Face files (default: the quick-start model)")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"which (default {','.join(FORMATS)})")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece (default 512)")
    parser.add_argument("--pieces", type=int, default=40, help="at most so many pieces (default 40)")
    options = parser.parse_args()
    folder = options.weights or weights_folder()
    text = "\n".join((_DOCS / name).read_text("utf-8") for name in TEXT)
    ids = torch.tensor(load_tokenizer(folder).encode(text))
    count = min(options.pieces, len(ids) // options.length)
    pieces = ids[: count * options.length].view(count, options.length)
    plain = load_model(folder, load_config(folder), dtype=torch.float32, device=torch.device("cpu"))
    reference = read(plain, pieces)
    del plain
    print(f"{count} {'piece' if count == 1 else 'pieces'} of {options.length} tokens from docs/: {', '.join(TEXT)}\n")
    print("| format | top-1 as float32 | perplexity | to float32's |")
    print("| --- | --- | --- | --- |")
    base = math.exp(reference.losses.mean())
    print(f"| float32, plain transformers | 1.0000 | {base:.3f} | 1.0000 |", flush=True)
    for name in options.formats.split(","):
        try:
            own = read(load(folder, name), pieces)
        except ConfigurationError as error:
            parser.error(error.message)
        same = float((own.next_tokens == reference.next_tokens).double().mean())
        perplexity = math.exp(own.losses.mean())
        print(f"| {name} | {same:.4f} | {perplexity:.3f} | {perplexity / base:.4f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
