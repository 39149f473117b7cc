"""Tiny random models of many architectures, in memory: what the oracle tests serve.

Sizes are small and weights large, so that greedy ids change when anything is wrong. Windows are 12 tokens and chunks
16, so that they bite in short prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VOCAB_SIZE = 199

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.15,
}
_TOKENS = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.15,
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _config(model_type: str, without: tuple[str, ...] = (), **fields: Any) -> Any:
    from transformers import AutoConfig

    merged = {**_COMMON, **fields}
    return AutoConfig.for_model(model_type, **{key: value for key, value in merged.items() if key not in without})


def _bare(model_type: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**_TOKENS, **fields})


_GPT_SIZES = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}

PACKED: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("llama"),
    "llama-tied": lambda: _config("llama", tie_word_embeddings=True),
    "qwen2": lambda: _config("qwen2"),
    "qwen2-window": lambda: _config("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=2),
    "qwen3": lambda: _config("qwen3", head_dim=32),
    "mistral": lambda: _config("mistral", sliding_window=12),
    "mixtral": lambda: _config("mixtral", sliding_window=12, num_local_experts=4),
    "gemma2": lambda: _config(
        "gemma2",
        head_dim=16,
        sliding_window=12,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
        layer_types=_MIXED,
    ),
    "gemma3": lambda: _config(
        "gemma3_text", head_dim=16, sliding_window=12, query_pre_attn_scalar=32, layer_types=_MIXED
    ),
    "gemma4": lambda: _config(
        "gemma4_text",
        head_dim=16,
        global_head_dim=32,
        sliding_window=12,
        layer_types=_MIXED,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=0,
    ),
    "gemma3n-shared-kv": lambda: _config(
        "gemma3n_text",
        head_dim=16,
        sliding_window=12,
        layer_types=_MIXED,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        laurel_rank=8,
        activation_sparsity_pattern=None,
    ),
    "phi": lambda: _config("phi"),
    "phi3": lambda: _config("phi3", sliding_window=12),
    "gpt2": lambda: _bare("gpt2", scale_attn_by_inverse_layer_idx=True, **_GPT_SIZES),
    "gptj": lambda: _bare("gptj", rotary_dim=8, **_GPT_SIZES),
    "gpt_neox": lambda: _config("gpt_neox", without=("num_key_value_heads",)),
    "opt": lambda: _bare(
        "opt",
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
        init_std=0.15,
    ),
    "olmo2": lambda: _config("olmo2"),
    "olmo3": lambda: _config("olmo3", sliding_window=12, layer_types=_MIXED),
    "granite": lambda: _config("granite", attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0),
    "qwen3_moe": lambda: _config("qwen3_moe", head_dim=16, num_experts=8, **_EXPERTS),
    "deepseek_v3": lambda: _config(
        "deepseek_v3",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
        **_EXPERTS,
    ),
    "gpt_oss": lambda: _config(
        "gpt_oss",
        head_dim=16,
        sliding_window=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=_MIXED,
    ),
    "llama4": lambda: _config(
        "llama4_text",
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=16,
        interleave_moe_layer_step=2,
        layer_types=["chunked_attention", "full_attention"] * 2,
    ),
    "stablelm": lambda: _config("stablelm"),
    "cohere2": lambda: _config("cohere2", sliding_window=12, layer_types=_MIXED),
    "starcoder2": lambda: _config("starcoder2", sliding_window=12),
    "smollm3": lambda: _config("smollm3"),
    "glm4": lambda: _config("glm4", head_dim=16),
    "exaone4": lambda: _config("exaone4", sliding_window=12, layer_types=_MIXED),
    "mellum-dense": lambda: _config("mellum", head_dim=16, mlp_layer_types=["dense"] * 4),
}
"""Served packed, through the attention registry."""

PER_SEQUENCE: dict[str, Callable[[], Any]] = {
    "bloom": lambda: _bare("bloom", hidden_size=64, n_layer=4, n_head=4),
    "falcon": lambda: _bare(
        "falcon",
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "mpt": lambda: _bare("mpt", d_model=64, n_layers=4, n_heads=4, max_seq_len=256),
    "mamba2": lambda: _bare(
        "mamba2", hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=2, expand=2
    ),
    "qwen3_next": lambda: _config(
        "qwen3_next",
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        shared_expert_intermediate_size=32,
        num_experts=8,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        **_EXPERTS,
    ),
    "llama-dynamic-rope": lambda: _config(
        "llama",
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
}
"""Served one sequence at a time."""


def build_model(name: str, *, seed: int = 1) -> Any:
    """A random model in float32 and evaluation mode; the same for the same name and seed."""
    import torch
    from transformers import AutoModelForCausalLM

    config = {**PACKED, **PER_SEQUENCE}[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if "sink" in parameter_name:
                torch.nn.init.normal_(parameter)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)
