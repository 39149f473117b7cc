"""What a load tells: the limits in effect, and a warning for each setting that something lowers."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from support.cpu_kernels import kernels_device
from support.tiny_model import build_tiny_model
from tengserve_backend.engine.load import load_engine
from tengserve_backend.errors import PromptTooLongError
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.repository.settings import read_settings
from tengserve_backend.repository.source import ModelSource

POSITIONS = 512
SMALL = {"device": "cpu", "cpuKernels": "off", "maxBatchSize": "2"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=POSITIONS)


def load(tiny: Path, **parameters: str) -> Any:
    source = ModelSource("tiny", "1", tiny, read_settings({**SMALL, **parameters}))
    return load_engine(source, tiny, lambda stage, fraction: None)


def told(caplog: pytest.LogCaptureFixture, tiny: Path, **parameters: str) -> tuple[str, list[str]]:
    """The line that sums up a load, and its warnings."""
    with caplog.at_level(logging.INFO, logger="tengserve_backend"):
        load(tiny, **parameters).stop()
    (summary,) = [text for text in caplog.messages if text.startswith("model tiny version 1: ")]
    return summary, [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_line_tells_the_limits_in_effect(caplog: pytest.LogCaptureFixture, tiny: Path) -> None:
    summary, warnings = told(caplog, tiny, maxSeqLen="256", maxInputTokenLen="100")
    assert (
        "LlamaForCausalLM in float32 on cpu, attention portable, prompts of up to 100 tokens, sequences of up to 256, "
        "KV cache of 512 tokens in 32 blocks, steps of up to "
    ) in summary
    assert warnings == []


def test_defaults_that_the_model_lowers_are_told_without_a_warning(
    caplog: pytest.LogCaptureFixture, tiny: Path
) -> None:
    summary, warnings = told(caplog, tiny)
    assert "prompts of up to 512 tokens, sequences of up to 513, " in summary
    assert warnings == []


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"maxSeqLen": "32768"},
            ["maxSeqLen is 32768, but 513 is in effect: the model was built for 512 positions"],
        ),
        (
            {"maxSeqLen": "2560"},
            ["maxSeqLen is 2560, but 513 is in effect: the model was built for 512 positions"],
        ),
        (
            {"maxInputTokenLen": "8000"},
            ["maxInputTokenLen is 8000, but 512 is in effect: the model was built for 512 positions"],
        ),
        (
            {"maxSeqLen": "256", "maxInputTokenLen": "8000"},
            ["maxInputTokenLen is 8000, but 255 is in effect: maxSeqLen leaves no more"],
        ),
        (
            {"maxSeqLen": "513", "maxInputTokenLen": "512"},
            [],
        ),
        (
            {"maxIterTimes": "2000"},
            ["maxIterTimes is 2000, but 512 is in effect: the model was built for 512 positions"],
        ),
        (
            {"maxSeqLen": "300", "maxIterTimes": "300"},
            [],
        ),
    ],
)
def test_a_setting_that_is_lowered_is_named(
    caplog: pytest.LogCaptureFixture, tiny: Path, parameters: dict[str, str], expected: list[str]
) -> None:
    _, warnings = told(caplog, tiny, **parameters)
    assert warnings == [f"model tiny: {text}" for text in expected]


def test_a_limit_of_all_models_is_named_too(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, max_position_embeddings=2**22)
    parameters = {"maxSeqLen": "2000000", "maxInputTokenLen": "1500000", "kvCacheMemory": "1MiB"}
    _, warnings = told(caplog, folder, **parameters)
    assert warnings[0] == "model tiny: maxInputTokenLen is 1500000, but 1048576 is in effect: no prompt may be longer"
    assert len(warnings) == 2


async def test_a_cache_that_holds_no_whole_sequence_is_told_and_what_it_refuses_names_the_setting(
    caplog: pytest.LogCaptureFixture, tiny: Path
) -> None:
    # A token is keys and values of 2 heads of 16 numbers of 4 bytes in each of 4 layers: 1 KiB.
    summary, warnings = told(caplog, tiny, maxSeqLen="100", kvCacheMemory="32KiB")
    assert "KV cache of 32 tokens in 2 blocks" in summary
    assert warnings == [
        "model tiny: the KV cache holds 32 tokens, but a sequence may have 100 (maxSeqLen): a request that may become "
        "longer than the cache is refused; raise kvCacheMemory or lower maxSeqLen"
    ]
    engine = load(tiny, maxSeqLen="100", kvCacheMemory="32KiB")
    try:
        with pytest.raises(PromptTooLongError, match=r"need 4 blocks of the KV cache, which has 2.*kvCacheMemory"):
            await engine.submit(GenerationRequest("r", "abc", max_new_tokens=60))
    finally:
        engine.stop()


def test_weights_of_fewer_bits_are_told(caplog: pytest.LogCaptureFixture, tiny: Path) -> None:
    kernels_device()
    summary, _ = told(caplog, tiny, cpuKernels="auto", dtype="float32", quantization="int4", maxSeqLen="64")
    assert "LlamaForCausalLM in float32, weights in int4, on cpu, attention " in summary


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_engine_knows_how_its_weights_are_kept(tiny: Path, quantization: str) -> None:
    kernels_device()
    engine = load(tiny, cpuKernels="auto", quantization=quantization, maxSeqLen="64")
    try:
        assert engine.info.quantization == quantization
    finally:
        engine.stop()


def test_settings_know_which_of_them_were_given() -> None:
    settings = read_settings({"maxSeqLen": "2560"})
    assert settings.given == {"maxSeqLen"}
    assert dataclasses.replace(settings, device="cpu").given == {"maxSeqLen"}
    assert settings == read_settings({})
