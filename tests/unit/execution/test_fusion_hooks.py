"""What somebody hung on a part of a model is called after the model was fused as before."""

from __future__ import annotations

import pytest
import torch

from support.architectures import build_model
from support.cpu_kernels import kernels_device


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama", "model.norm"),
        ("llama", "model.layers.0.input_layernorm"),
        ("llama", "model.layers.1.mlp"),
        ("llama", "model.layers.1.mlp.up_proj"),
        ("llama", "model.layers.1.mlp.act_fn"),
        ("llama", "model.layers.0.self_attn.k_proj"),
        ("llama-tied", "model.embed_tokens"),
        ("gpt2", "transformer.h.0.mlp.c_fc"),
        ("mixtral", "model.layers.0.mlp.experts"),
    ],
)
@pytest.mark.parametrize("pre", [False, True])
def test_a_hook_on_any_part_is_still_called(name: str, part: str, pre: bool) -> None:
    model = build_model(name)
    called: list[str] = []
    module = model.get_submodule(part)
    if pre:
        module.register_forward_pre_hook(lambda *_: called.append(part))
    else:
        module.register_forward_hook(lambda *_: called.append(part))
    assert kernels_device().fuse(model, ())
    called.clear()
    with torch.inference_mode():
        model(input_ids=torch.arange(2, 22).unsqueeze(0), use_cache=False)
    assert called == [part]
