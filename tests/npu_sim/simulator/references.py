"""References for operators that the wheel calls by itself; support.npu_reference has those that our own code calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_MASK_SIZE = 2048
_MAX_INT = 2147483647


def npu_fusion_attention_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _MAX_INT,
    next_tockens: int = _MAX_INT,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: torch.Tensor | None = None,
    actual_seq_kvlen: torch.Tensor | None = None,
    sparse_mode: int = 0,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """What scaled_dot_product_attention becomes on 910B and 910C: layout BNSD, a mask where True hides, no dropout.

    Args:
        query: [B, head_num, S, D].
        key, value: [B, kv heads, T, D].
        atten_mask: with mode 0 broadcast to [B, head_num, S, T]; with mode 2 the 2048 x 2048 upper triangle.
        sparse_mode: 0: the mask as it is; 2: causal from the upper left corner.

    Returns:
        The attention, and five by-products of training, empty here.
    """
    assert pse is None, "no reference for pse"
    assert padding_mask is None, "no reference for padding_mask"
    assert prefix is None, "no reference for prefix"
    assert keep_prob == 1.0, "no reference for dropout"
    assert input_layout == "BNSD", f"no reference for layout {input_layout}"
    assert query.shape[1] == head_num, f"query {tuple(query.shape)}, head_num {head_num}"
    assert sparse_mode in (0, 2), f"no reference for sparse_mode {sparse_mode}"
    groups = head_num // key.shape[1]
    keys = key.float().repeat_interleave(groups, dim=1)
    values = value.float().repeat_interleave(groups, dim=1)
    scores = query.float() @ keys.transpose(-1, -2) * scale
    if sparse_mode == 2:
        assert atten_mask is not None, "sparse_mode 2 needs the mask"
        assert atten_mask.shape[-2:] == (_MASK_SIZE, _MASK_SIZE), "sparse_mode 2 needs the 2048 x 2048 mask"
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif atten_mask is not None:
        scores = scores.masked_fill(atten_mask.bool(), float("-inf"))
    attention = (scores.softmax(-1) @ values).to(query.dtype)
    nothing = torch.zeros(0)
    return attention, nothing, nothing.clone(), nothing.clone(), torch.zeros(1).long(), torch.zeros(1).long()


REFERENCES: Mapping[str, Callable[..., Any]] = {"npu::npu_fusion_attention_v3": npu_fusion_attention_v3}
