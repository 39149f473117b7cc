"""The CPU operators as tests load them, and pages to attend over."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tengserve_backend.execution.attention.tier import AttentionSpec
from tengserve_backend.execution.kv_tensors import LayerCache
from tengserve_backend.execution.packed_batch import PackedBatch, Span
from tengserve_backend.native.build import build_library, find_compiler

BLOCK = 16
LIBRARY_VARIABLE = "CPU_OPERATORS_LIBRARY"
"""Names a library to test instead of the one that is built from the sources."""
EXAMPLES_VARIABLE = "CPU_OPERATORS_EXAMPLES"
EXAMPLES = int(os.environ.get(EXAMPLES_VARIABLE, "40"))
"""Of each test that draws its cases."""


@functools.cache
def cpu_operators() -> torch._ops._OpNamespace:
    """torch.ops.tengserve_cpu, loaded; the test is skipped where there is no compiler."""
    library = os.environ.get(LIBRARY_VARIABLE)
    if library is None:
        compiler = find_compiler()
        if compiler is None:
            pytest.skip("there is no C++ compiler to build the operators with")
        library = str(build_library(compiler, jobs=os.cpu_count() or 1))
    torch.ops.load_library(library)
    return torch.ops.tengserve_cpu


@dataclass(frozen=True)
class Heads:
    """Of a layer."""

    query: int
    kv: int
    key_dim: int
    value_dim: int


class Packed:
    """A step of some sequences, their queries and their filled pages: once as plain slots, once as the operators' own.

    Args:
        counts: queries of each sequence.
        contexts: its tokens in the cache, the queries' own included.
        heads, dtype: of the layer.
        seed: of the content, which does not depend on the number of sequences before one.
    """

    def __init__(
        self, counts: Sequence[int], contexts: Sequence[int], heads: Heads, dtype: torch.dtype, seed: int = 0
    ) -> None:
        ops = cpu_operators()
        blocks = [-(-context // BLOCK) for context in contexts]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
        table = torch.zeros((len(counts), max(blocks)), dtype=torch.int32)
        ends = torch.tensor(counts).cumsum(0).tolist()
        spans = [Span(e - n, n, c) for e, n, c in zip(ends, counts, contexts, strict=True)]
        slots = (sum(blocks) + 2) * BLOCK
        # What was never written may hold anything.
        self.plain = LayerCache(
            torch.full((slots, heads.kv, heads.key_dim), float("nan"), dtype=dtype),
            torch.full((slots, heads.kv, heads.value_dim), float("nan"), dtype=dtype),
        )
        self.pages = LayerCache(self.plain.keys.clone(), self.plain.values.clone())
        queries = []
        for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
            table[row, : blocks[row]] = torch.tensor([order.pop() for _ in range(blocks[row])])
            own = torch.arange(context)
            here = table[row, own // BLOCK].long() * BLOCK + own % BLOCK
            content = torch.Generator().manual_seed(1000 * seed + context)
            key = torch.randn(context, heads.kv, heads.key_dim, generator=content).to(dtype)
            value = torch.randn(context, heads.kv, heads.value_dim, generator=content).to(dtype)
            query = torch.randn(context, heads.query, heads.key_dim, generator=content).to(dtype)
            queries.append(query[context - count :])
            self.plain.keys[here], self.plain.values[here] = key, value
            ops.paged_write(key, value, self.pages.keys, self.pages.values, here, BLOCK)
        self.query = torch.cat(queries).transpose(0, 1)
        nothing = torch.empty(0, dtype=torch.int64)
        self.batch = PackedBatch(
            input_ids=nothing,
            position_ids=nothing,
            slots=nothing,
            slots32=nothing,
            block_table=table,
            spans=tuple(spans),
            query_ends=ends,
            contexts=list(contexts),
            logit_rows=nothing,
            block_size=BLOCK,
        )

    def attend(self, spec: AttentionSpec) -> torch.Tensor:
        """By the operator."""
        attended: torch.Tensor = cpu_operators().paged_attention(
            self.query,
            self.pages.keys,
            self.pages.values,
            self.batch.block_table,
            self.batch.query_ends,
            self.batch.contexts,
            BLOCK,
            spec.scaling,
            spec.window,
            spec.chunk,
            spec.softcap,
            spec.sinks,
        )
        return attended
