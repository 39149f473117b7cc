"""Loading a transformers model and what its files say about it.

transformers fills weights that it does not find with random numbers, and says so in its log only. Here a model is
loaded whole or refused, in one sentence that a client may see.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from tengserve_backend.errors import ConfigurationError, foreign_reason, shown
from tengserve_backend.execution.default_dtype import making_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(weights_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """The model's configuration.

    Args:
        weights_dir: a folder of Hugging Face files.
        trust_remote_code: as the setting trustRemoteCode.

    Raises:
        ConfigurationError: there is none, it is not a decoder-only language model, or it needs code of its own.
    """
    try:
        fields, _ = PretrainedConfig.get_config_dict(weights_dir, local_files_only=True)
        model_type = fields.get("model_type")
        if "auto_map" in fields and model_type not in CONFIG_MAPPING and not trust_remote_code:
            raise ConfigurationError(
                f"{shown(model_type)} models need the Python code in the model's folder, which runs only when the "
                "parameter trustRemoteCode is true"
            )
        config = AutoConfig.from_pretrained(weights_dir, local_files_only=True, trust_remote_code=trust_remote_code)
    except ConfigurationError:
        raise
    except Exception as error:  # whatever the files make transformers raise, the folder is at fault
        raise ConfigurationError(
            f"the model's config.json cannot be used: {foreign_reason(error, str(weights_dir))}"
        ) from error
    if config.is_encoder_decoder:
        raise ConfigurationError(
            f"{config.model_type} is an encoder-decoder model; only decoder-only models are served"
        )
    brings_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ())
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not brings_class:
        raise ConfigurationError(f"{shown(config.model_type)} is not a language model that generates text from text")
    return config


def load_model(
    weights_dir: Path, config: Any, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> Any:
    """The model in evaluation mode on the device, with the attention that transformers chooses for it.

    Raises:
        ConfigurationError: the weights cannot be read or do not belong to the configuration.
    """
    # The operator sees our own progress; transformers' bars would only break its lines.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        with making_model(dtype):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                weights_dir,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                # Found by the check below, which can say more about it.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever the files make transformers raise, the folder is at fault
        raise ConfigurationError(
            f"the model's weights cannot be loaded: {foreign_reason(error, str(weights_dir))}"
        ) from error
    model, report = loaded
    _check_complete(model, report)
    model.to(device)
    model.train(False)
    return model.requires_grad_(False)


def load_generation_config(weights_dir: Path, config: Any) -> Any:
    """generation_config.json, or what the model's configuration says where there is none.

    Raises:
        ConfigurationError: the file cannot be used.
    """
    if not (weights_dir / "generation_config.json").exists():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(weights_dir, local_files_only=True)
    except Exception as error:  # whatever the file makes transformers raise, the file is at fault
        raise ConfigurationError(
            f"the model's generation_config.json cannot be used: {foreign_reason(error, str(weights_dir))}"
        ) from error


def eos_token_ids(generation_config: Any, text_config: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation configuration's, or the model's own where that names none."""
    for config in (generation_config, text_config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(map(int, eos)) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


def vocabulary_size(model: Any, text_config: Any) -> int:
    """How many token ids the model takes: the rows of its embedding, whatever the tokenizer has."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return int(text_config.vocab_size)


def _check_complete(model: Any, report: Any) -> None:
    """Refuse weights of another model.

    Tensors that the model has no place for are the same mistake when they are inside its own layers: a bias that the
    configuration denies, or layers beyond its number. Others belong to parts that are not served, such as a vision
    tower, and are let go.
    """
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, stored, made = mismatched[0]
        raise _foreign(
            f"{shown(name)} has shape {list(stored)}, where config.json makes it {list(made)}", len(mismatched)
        )
    if missing := report["missing_keys"]:
        raise _foreign(f"{_first(missing)} is missing", len(missing))
    if report["error_msgs"]:
        raise _foreign(shown(str(report["error_msgs"][0])), len(report["error_msgs"]))
    modules = dict(model.named_modules())
    if surplus := [name for name in report["unexpected_keys"] if _inside(name, modules)]:
        raise _foreign(f"{_first(surplus)} has no place in the model that config.json describes", len(surplus))


def _inside(name: str, modules: dict[str, Any]) -> bool:
    """Whether a tensor is a leaf of one of the modules, or of an item that one of its lists does not have."""
    *parents, _ = name.split(".")
    if ".".join(parents) in modules:
        return True
    return any(
        part.isdecimal() and isinstance(modules.get(".".join(parents[:index])), torch.nn.ModuleList)
        for index, part in enumerate(parents)
        if ".".join(parents[: index + 1]) not in modules
    )


def _first(names: Collection[str]) -> str:
    return shown(min(names))


def _foreign(what: str, count: int) -> ConfigurationError:
    more = f" (and {count - 1} more like it)" if count > 1 else ""
    return ConfigurationError(f"the model's weights do not belong to its config.json: {what}{more}")
