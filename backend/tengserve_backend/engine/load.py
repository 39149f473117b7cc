"""From a folder of Hugging Face files to a running engine."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from tengserve_backend.devices.base import DeviceBackend
from tengserve_backend.devices.select import select_device
from tengserve_backend.engine.assembly import Capacity, assemble
from tengserve_backend.engine.base import ModelInfo
from tengserve_backend.engine.native import ModelDefaults, NativeEngine
from tengserve_backend.engine.recovery import device_lost
from tengserve_backend.engine.summary import tell
from tengserve_backend.errors import ConfigurationError, TengserveError
from tengserve_backend.execution.attention.tier import AttentionTier
from tengserve_backend.execution.changeover import RunningModel, change_over
from tengserve_backend.execution.choose import ForwardChoice, build_forward, choose_forward
from tengserve_backend.execution.forward import ModelForward, compute
from tengserve_backend.execution.fusion import told
from tengserve_backend.execution.fusion.quantized import Quantization
from tengserve_backend.execution.loader import (
    DTYPES,
    eos_token_ids,
    load_config,
    load_generation_config,
    load_model,
    vocabulary_size,
)
from tengserve_backend.execution.step_profile import StepProfile
from tengserve_backend.generation import ModelLimits
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource, Progress
from tengserve_backend.scheduling.budget import StepTokens
from tengserve_backend.scheduling.scheduler import SchedulerLimits
from tengserve_backend.scheduling.step import ScheduledSequence, Step
from tengserve_backend.text.tokenizer import load_tokenizer

_log = logging.getLogger(__name__)

# What MindIE's ATB back end uses when neither the request nor the weights name one (MindIE native API, /infer_token:
# top_k).
_DEFAULT_TOP_K = 1000
_REPORT_S = 0.2


def load_engine(
    source: ModelSource, weights_dir: Path, progress: Progress, *, step_profile: Path | None = None
) -> NativeEngine:
    """Load the model and start its engine. Blocks until the first step would run.

    Args:
        source: the model.
        weights_dir: its files.
        progress: told how far it is; an error that it raises ends the load.
        step_profile: a folder for a trace of the engine's last steps; None measures nothing.

    Raises:
        ConfigurationError: the settings, the weights and the machine do not fit; the message says what to change.
        DeviceLostError: the device failed meanwhile.
    """
    progress("reading the configuration", 0.0)
    device = select_device(
        source.settings.device,
        cpu_kernels=source.settings.cpu_kernels == "auto",
        cpu_threads=source.settings.cpu_threads,
        cpu_affinity=source.settings.cpu_affinity,
        quantization=Quantization(source.settings.quantization),
        waiting=functools.partial(_wait_for_kernels, source, progress),
    )
    try:
        return _load(source, weights_dir, progress, device, step_profile)
    except TengserveError:
        raise
    except Exception as error:
        if device.is_fault(error):
            raise device_lost(device, source.name, error) from None  # It is in the log.
        if device.is_out_of_memory(error):
            raise ConfigurationError(
                f"the model does not fit into the memory of {device.name}; use another device, a smaller model, or a "
                "smaller maxBatchedTokens"
            ) from error
        raise


def _load(
    source: ModelSource, weights_dir: Path, progress: Progress, device: DeviceBackend, step_profile: Path | None
) -> NativeEngine:
    settings = source.settings
    config = load_config(weights_dir, trust_remote_code=settings.trust_remote_code)
    text_config = config.get_text_config()
    dtype = model_dtype(settings, config, device)
    progress("loading the tokenizer", 0.0)
    tokenizer = load_tokenizer(weights_dir, trust_remote_code=settings.trust_remote_code)
    generation_config = load_generation_config(weights_dir, config)
    progress("loading the weights", 0.0)
    model = load_model(
        weights_dir,
        config,
        dtype=dtype,
        device=device.torch_device,
        trust_remote_code=settings.trust_remote_code,
    )
    progress("checking the forward", 0.0)
    vocab_size = vocabulary_size(model, text_config)
    if fused := device.fuse(model, settings.npu_fusions):
        _log.info("model %s uses fused operators: %s", source.name, told(fused))
    choice = choose_forward(
        model, device, vocab_size=vocab_size, dtype=dtype, portable=settings.attention == "portable"
    )
    limits = _limits(settings, text_config)
    _check_tier(choice.attention, settings, longest=limits.max_sequence_tokens)
    steps = SchedulerLimits(_step_tokens(settings, device), max_running=settings.max_batch_size)
    peak = _activation_peak(choice, model, device, dtype=dtype, steps=steps, longest=limits.max_sequence_tokens)
    total_blocks = _total_blocks(settings, limits, choice, device, reserved=peak)
    forward = build_forward(choice, model, total_blocks=total_blocks, device=device, dtype=dtype)
    info = ModelInfo(
        name=source.name,
        version=source.version,
        architecture=type(model).__name__,
        vocab_size=vocab_size,
        limits=limits,
        full_text_enabled=settings.full_text_enabled,
        device=device.name,
        dtype=str(dtype).removeprefix("torch."),
        attention_tier=forward.tier,
        fused=tuple(fused),
        quantization=settings.quantization,
    )
    tell(info, settings, total_blocks=total_blocks, block_size=forward.block_size, step_tokens=steps.tokens)
    if choice.reason:
        _log.warning("model %s runs one sequence at a time, which is slower: %s", info.name, choice.reason)
    progress("starting", 1.0)
    engine = assemble(
        forward=forward,
        info=info,
        defaults=ModelDefaults(
            top_k=_top_k(generation_config), eos_ids=frozenset(eos_token_ids(generation_config, text_config))
        ),
        tokenizer=tokenizer,
        device=device,
        capacity=Capacity(
            steps=steps,
            total_blocks=total_blocks,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            prefix_caching=settings.prefix_caching and choice.packed,
        ),
        clock=None
        if step_profile is None
        else StepProfile(step_profile / f"{source.name}-{source.version}.trace.json"),
    )
    if (upgrade := device.upgrade()) is not None:
        running = RunningModel(
            name=source.name,
            model=model,
            forward=forward,
            choice=choice,
            dtype=dtype,
            vocab_size=vocab_size,
            portable=settings.attention == "portable",
        )
        upgrade.add_done_callback(
            lambda done: engine.interleave(lambda blocks: change_over(running, done.result(), blocks))
        )
    return engine


def _wait_for_kernels(source: ModelSource, progress: Progress, kernels: Future[Any]) -> None:
    """Wait for a build of minutes; `progress` is how a stop gets in between."""
    _log.info(
        "model %s: quantization %s needs the kernels: waiting for their build",
        source.name,
        source.settings.quantization,
    )
    while not kernels.done():
        progress("waiting for the kernels", 0.0)
        wait([kernels], timeout=_REPORT_S)


def model_dtype(settings: ModelSettings, config: Any, device: DeviceBackend) -> torch.dtype:
    """The number format that a model is served in.

    Raises:
        ConfigurationError: the device does not compute in it.
    """
    if settings.dtype != "auto":
        dtype = DTYPES[settings.dtype]
        device.check_dtype(dtype)
        return dtype
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return device.default_dtype(stored)


def _limits(settings: ModelSettings, text_config: Any) -> ModelLimits:
    positions = getattr(text_config, "max_position_embeddings", None)
    return ModelLimits(
        max_seq_len=settings.max_seq_len,
        max_input_len=settings.max_input_token_len,
        max_iter_times=settings.max_iter_times,
        max_position_embeddings=None if positions is None else int(positions),
    )


def _step_tokens(settings: ModelSettings, device: DeviceBackend) -> StepTokens:
    """What the operator says of all steps; else the device's own, with a token for each running sequence."""
    if settings.max_batched_tokens is not None:
        return StepTokens(settings.max_batched_tokens, beside_streams=settings.max_batched_tokens)
    default = device.default_step_tokens()
    return StepTokens(max(default.most, settings.max_batch_size), default.beside_streams)


def _top_k(generation_config: Any) -> int:
    """generation_config.json's own top_k where it has one; transformers' built-in 50 does not count as one."""
    top_k = generation_config.to_diff_dict().get("top_k")
    return _DEFAULT_TOP_K if top_k is None else int(top_k)


def _check_tier(tier: AttentionTier | None, settings: ModelSettings, *, longest: int) -> None:
    """Refuse settings that the chosen attention cannot serve once the server is as busy as they allow.

    Raises:
        ConfigurationError: it cannot.
    """
    if tier is None:
        return
    for setting, asked, most, what in (
        ("maxBatchSize", settings.max_batch_size, tier.limits.sequences, "sequences in a step"),
        ("maxSeqLen", longest, tier.limits.context, "tokens of a sequence"),
    ):
        if most is not None and asked > most:
            raise ConfigurationError(
                f"{setting} allows {asked} {what}, but attention {tier.name} takes at most {most}; lower it, or set "
                "attention to portable"
            )


def _activation_peak(
    choice: ForwardChoice,
    model: Any,
    device: DeviceBackend,
    *,
    dtype: torch.dtype,
    steps: SchedulerLimits,
    longest: int,
) -> int:
    """Bytes of device memory that the largest step needs besides weights and cache: one such step is run.

    Args:
        steps: what a step may hold.
        longest: tokens that a sequence may have.
    """
    sequences = steps.max_running
    length = min(longest - 1, -(-steps.tokens.most // sequences))
    blocks = -(-length // choice.block_size)
    parts = tuple(
        ScheduledSequence(
            -1 - index, 0, (0,) * length, tuple(range(index * blocks, (index + 1) * blocks)), samples=True
        )
        for index in range(sequences)
    )

    kept: list[ModelForward] = []

    def largest_step() -> None:
        forward = build_forward(choice, model, total_blocks=sequences * blocks, device=device, dtype=dtype)
        # It is still there when the peak is read: its cache is no activation, and may be far larger than these.
        kept.append(forward)
        with torch.inference_mode():
            compute(forward, Step(-1, parts), device.upload)

    peak = device.measure_peak(largest_step)
    if kept:
        kept.clear()
        device.release_memory()
    return peak


def _total_blocks(
    settings: ModelSettings, limits: ModelLimits, choice: ForwardChoice, device: DeviceBackend, *, reserved: int
) -> int:
    """Blocks of the KV cache: what memory allows, and no more than full batches of full sequences could use.

    Where the operator sets nothing the device may hold it smaller.

    Args:
        reserved: bytes that activations will need.
    """
    block_size = choice.block_size
    block_bytes = block_size * choice.bytes_per_token
    full_sequence = -(-limits.max_sequence_tokens // block_size)
    most = settings.max_batch_size * full_sequence
    budget = settings.kv_cache_memory
    if budget.bytes is not None:
        memory = budget.bytes
    elif budget.fraction is not None:
        memory = int(max(0, device.available_memory() - reserved) * budget.fraction)
    else:
        memory = max(0, device.default_cache_memory() - reserved)
        tokens = device.default_cache_tokens(block_size * full_sequence)
        if tokens is not None:
            most = min(most, -(-tokens // block_size))
    total = min(memory // block_bytes, most)
    if total < 1:
        raise ConfigurationError(
            f"the KV cache would have {memory} bytes, but one block of {block_size} tokens needs {block_bytes}; "
            "raise kvCacheMemory"
        )
    available = device.available_memory()
    if total * block_bytes > available:
        # Reserving would succeed on most systems, and the process be killed once the blocks fill.
        raise ConfigurationError(
            f"the KV cache would have {total * block_bytes} bytes, but {available} are available; "
            "lower kvCacheMemory, maxBatchSize or maxSeqLen"
        )
    return int(total)
