"""Right answers for the gate of `scripts/bench serving`: plain transformers, one prompt at a time, greedy."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from _bench_weights import weights_folder
from transformers import AutoModelForCausalLM, GenerationConfig

from tengserve_adapter.bench.gate import OUTPUT_TOKENS, Expected, Reference, gate_prompts, write_reference
from tengserve_adapter.bench.requests import Prompt
from tengserve_adapter.bench.workloads import Prompts
from tengserve_backend.text.tokenizer import Tokenizer, load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make(folder: Path, dtype: str) -> Reference:
    """The answers of the model in a folder."""
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype]).eval()
    # In place of the model's own, which ends answers and may punish repetition; padding is asked for and not used.
    model.generation_config = GenerationConfig(
        max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    answers = tuple(answer(model, tokenizer, prompt) for prompt in gate_prompts(Prompts(tokenizer.encode)))
    return Reference(f"transformers {metadata.version('transformers')} {dtype}", answers)


@torch.inference_mode()
def answer(model: Any, tokenizer: Tokenizer, prompt: Prompt) -> Expected:
    """The most probable token after the other."""
    ids = torch.tensor([prompt.ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids))
    chosen = output[0, len(prompt.ids) :].tolist()
    return Expected(prompt, tuple(chosen), tokenizer.decode(chosen, skip_special_tokens=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench reference", description=__doc__)
    parser.add_argument("file", type=Path, help="where to write the answers")
    parser.add_argument("--weights", type=Path, help="a folder of Hugging Face files (default: the quick-start model)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="default float32")
    options = parser.parse_args()
    reference = make(options.weights or weights_folder(), options.dtype)
    write_reference(reference, options.file)
    print(f"{len(reference.answers)} answers of {reference.made_by} are in {options.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
