"""What choosing tokens costs on this machine, case by case, beside the model's output projection in the same turn.

Logits are random, so their distribution is flatter than a model's: a top_p reaches further here than it mostly does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from tengserve_backend.execution.sampling.history import TokenHistory
from tengserve_backend.execution.sampling.logprobs import token_logprobs
from tengserve_backend.execution.sampling.row import SamplingRow
from tengserve_backend.execution.sampling.sampler import sample
from tengserve_backend.generation import ResolvedSampling, SamplingParams

_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1}
_ALL = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
CASES: dict[str, dict[str, float]] = {
    "greedy": {"do_sample": False},
    "temperature": {"temperature": 0.7},
    "top_k 50": {"top_k": 50},
    "top_k 1000": {"top_k": 1000},
    "top_k 1000, top_p 0.9": {"top_k": 1000, "top_p": 0.9},
    "top_p 0.9": {"temperature": 0.5, "top_p": 0.9},
    "top_p 0.9, flat": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all filters": _ALL,
    "all filters, penalties": {**_ALL, **_PENALTIES},
    "greedy, penalties": {"do_sample": False, **_PENALTIES},
}


def rows_of(resolved: list[ResolvedSampling], vocabulary: int, chooser: random.Random) -> list[SamplingRow]:
    """Each with a prompt of 1000 tokens and an answer of 300."""
    rows = []
    for sampling in resolved:
        history = None
        if sampling.has_penalties:
            history = TokenHistory(chooser.randrange(vocabulary) for _ in range(1000))
            for _ in range(300):
                history.push(chooser.randrange(vocabulary))
        rows.append(SamplingRow(sampling, 300, history))
    return rows


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--hidden-size", type=int, default=896, help="of the output projection")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(options.rows, options.vocabulary, generator=generator) * 3).to(dtype)
    projection = torch.nn.Linear(options.hidden_size, options.vocabulary, bias=False, dtype=dtype)
    hidden = torch.randn(options.rows, options.hidden_size, generator=generator).to(dtype)

    def resolve(changes: dict[str, float], seed: int) -> ResolvedSampling:
        asked = replace(SamplingParams(do_sample=True, seed=seed), **changes)
        return asked.resolve(default_top_k=0, vocab_size=options.vocabulary, drawn_seed=1)

    works: dict[str, Callable[[], object]] = {}
    chooser = random.Random(1)
    mixed = list(CASES.values())
    for name, batch in {
        **{name: [changes] * options.rows for name, changes in CASES.items()},
        "each another case": [mixed[index % len(mixed)] for index in range(options.rows)],
        "one of all filters, the others greedy": [_ALL] + [CASES["greedy"]] * (options.rows - 1),
    }.items():
        rows = rows_of([resolve(changes, seed) for seed, changes in enumerate(batch)], options.vocabulary, chooser)
        works[name] = lambda rows=rows: sample(logits, rows)
    works["logprobs, 20 alternatives"] = lambda: token_logprobs(logits, [1] * options.rows, 20)

    print(f"{options.rows} rows, vocabulary {options.vocabulary}, {options.dtype}, {options.threads} threads; medians")
    with torch.inference_mode():
        for name, work in works.items():
            timed(work)
            pairs = [(timed(work), timed(lambda: projection(hidden))) for _ in range(options.repeats)]
            ours, beside = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"{name:40} {ours:9.2f} ms   output projection {beside:9.2f} ms")


if __name__ == "__main__":
    main()
