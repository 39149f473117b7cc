"""Loading a transformers model and what its files say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from tengserve_backend.errors import ConfigurationError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(weights_dir: Path) -> Any:
    """The model's configuration.

    Raises:
        ConfigurationError: there is none, it is not a decoder-only language model, or it needs code of its own.
    """
    try:
        config = AutoConfig.from_pretrained(weights_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"the model's config.json cannot be used: {_reason(error, weights_dir)}") from error
    if config.is_encoder_decoder:
        raise ConfigurationError(
            f"{config.model_type} is an encoder-decoder model; only decoder-only models are served"
        )
    return config


def load_model(weights_dir: Path, config: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in evaluation mode on the device, with the attention that transformers chooses for it.

    Raises:
        ConfigurationError: the weights cannot be read or do not belong to the configuration.
    """
    # The operator sees our own progress; transformers' bars would only break its lines.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        model = AutoModelForCausalLM.from_pretrained(
            weights_dir,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigurationError(f"the model's weights cannot be loaded: {_reason(error, weights_dir)}") from error
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides nn.Module.to's own signature
    model.train(False)
    return model.requires_grad_(False)


def load_generation_config(weights_dir: Path, config: Any) -> Any:
    """generation_config.json, or what the model's configuration says where there is none."""
    try:
        return GenerationConfig.from_pretrained(weights_dir, local_files_only=True)
    except OSError:
        return GenerationConfig.from_model_config(config)


def eos_token_ids(generation_config: Any) -> tuple[int, ...]:
    """Every id that ends an answer."""
    eos = generation_config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _reason(error: BaseException, weights_dir: Path) -> str:
    """The first line of a library's complaint; clients may see it, so the folder's path goes."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.replace(str(weights_dir), "the model's folder")
