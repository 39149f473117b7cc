"""Right answers for the gate of `scripts/bench serving`: plain transformers, one prompt at a time, greedy."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from _bench_weights import REPOSITORY, only_llm, weights_folder
from transformers import AutoModelForCausalLM, GenerationConfig

from tengserve_adapter.bench.gate import OUTPUT_TOKENS, Expected, Reference, gate_prompts, write_reference
from tengserve_adapter.bench.requests import Prompt
from tengserve_adapter.bench.workloads import Prompts
from tengserve_backend.devices.select import select_device
from tengserve_backend.engine.load import model_dtype
from tengserve_backend.execution.loader import DTYPES, load_config
from tengserve_backend.text.tokenizer import Tokenizer, load_tokenizer

SERVED = "served"
"""The dtype in which the model is served on this machine."""


def make(folder: Path, dtype: str) -> Reference:
    """The answers of the model in a folder."""
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    # In place of the model's own, which ends answers and may punish repetition; padding is asked for and not used.
    model.generation_config = GenerationConfig(
        max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    answers = tuple(answer(model, tokenizer, prompt) for prompt in gate_prompts(Prompts(tokenizer.encode)))
    return Reference(f"transformers {metadata.version('transformers')} {dtype}", answers, dtype)


@torch.inference_mode()
def answer(model: Any, tokenizer: Tokenizer, prompt: Prompt) -> Expected:
    """The most probable token after the other."""
    ids = torch.tensor([prompt.ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids))
    chosen = output[0, len(prompt.ids) :].tolist()
    return Expected(prompt, tuple(chosen), tokenizer.decode(chosen, skip_special_tokens=True))


def served_dtype(repository: Path, folder: Path) -> str:
    """The dtype in which this machine serves the repository's only LLM, whose files are in the folder."""
    settings = only_llm(repository).settings
    device = select_device(settings.device, cpu_kernels=settings.cpu_kernels == "auto")
    dtype = model_dtype(settings, load_config(folder, trust_remote_code=settings.trust_remote_code), device)
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench reference", description=__doc__)
    parser.add_argument("file", type=Path, help="where to write the answers")
    parser.add_argument(
        "--model-repository", type=Path, default=REPOSITORY, help="its only LLM answers (default: the quick start's)"
    )
    parser.add_argument("--weights", type=Path, help="a folder of Hugging Face files, in place of that LLM's own")
    parser.add_argument(
        "--dtype",
        choices=[*sorted(DTYPES), SERVED],
        default="float32",
        help=f"default float32; {SERVED}: the one in which this machine serves the repository's LLM",
    )
    options = parser.parse_args()
    folder = options.weights or weights_folder(options.model_repository)
    dtype = served_dtype(options.model_repository, folder) if options.dtype == SERVED else options.dtype
    reference = make(folder, dtype)
    write_reference(reference, options.file)
    print(f"{len(reference.answers)} answers of {reference.made_by} are in {options.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
