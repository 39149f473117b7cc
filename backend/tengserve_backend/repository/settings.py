"""Settings of one LLM, read from the `parameters` of its config.pbtxt. This table is their documentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Options of one LLM."""

    weights: str = "."
    device: str = "auto"
    dtype: str = "auto"
    max_seq_len: int = 2560
    max_input_token_len: int = 2048
    max_iter_times: int = 512
    full_text_enabled: bool = False
    max_batch_size: int = 32
    max_batched_tokens: int | None = None
    kv_cache_memory: str = "auto"
    max_waiting_requests: int = 256
    max_waiting_tokens: int = 262144
