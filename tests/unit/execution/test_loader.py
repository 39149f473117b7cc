"""Folders that are loaded, and folders that are refused in one sentence that names no path."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_model import EOS_TOKEN, PAD_TOKEN, build_tiny_model
from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ConfigurationError, InvalidTokenIdError
from tengserve_backend.execution.loader import eos_token_ids, load_config, load_generation_config, load_model
from tengserve_backend.generation import FinishReason, GenerationRequest
from tengserve_backend.repository.load import load_model as load_engine_of
from tengserve_backend.repository.settings import ModelSettings
from tengserve_backend.repository.source import ModelSource
from tengserve_backend.text.tokenizer import load_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copy = tmp_path / "secret place" / "model"
    shutil.copytree(tiny, copy)
    return copy


@pytest.fixture
def serve() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def load(folder: Path, **settings: Any) -> Engine:
        # Tests that compare answers compare them in float32, by plain torch operators: no bit depends on the CPU.
        typed = dataclasses.replace(ModelSettings(), **{"max_seq_len": 64, "cpu_kernels": "off", **settings})
        source = ModelSource("tiny", "1", folder, typed)
        engines.append(load_engine_of(source, lambda stage, fraction: None))
        return engines[-1]

    yield load
    for engine in engines:
        engine.stop()


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refusal(serve: Callable[..., Engine], folder: Path, **settings: Any) -> str:
    """The sentence that a client may see."""
    with pytest.raises(ConfigurationError) as caught:
        serve(folder, **settings)
    message = caught.value.message
    assert "secret" not in message
    assert "\n" not in message
    assert len(message) < 600
    return message


async def ids(engine: Engine, prompt: str | tuple[int, ...] = "hello", **fields: Any) -> list[int]:
    generation = await engine.submit(GenerationRequest("r", prompt, **{"max_new_tokens": 8, **fields}))
    return [event.token_id async for event in generation]


def save(model: Any, folder: Path, **options: Any) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder, **options)


def weights(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, load_config(folder), dtype=dtype, device=CPU)


async def test_shards_are_the_same_model(serve, tiny, folder):
    expected = await ids(serve(tiny))
    save(weights(tiny), folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert await ids(serve(folder)) == expected
    sorted(folder.glob("*.safetensors"))[1].unlink()
    assert "model-00002-of-" in refusal(serve, folder)
    assert "is missing" in refusal(serve, folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision(serve, tiny, dtype):
    engine = serve(tiny, dtype=dtype)
    assert engine.info.dtype == dtype
    assert len(await ids(engine)) == 8
    assert torch.get_default_dtype() is torch.float32


async def test_without_kernels_half_precision_weights_are_served_in_float32_on_the_cpu(serve, folder):
    save(weights(folder, torch.bfloat16), folder)
    engine = serve(folder)
    assert engine.info.dtype == "float32"
    assert len(await ids(engine)) == 8


async def test_tied_weights(serve, tmp_path):
    folder = build_tiny_model(tmp_path, config_overrides={"tie_word_embeddings": True})
    model = weights(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(await ids(serve(folder))) == 8


async def test_prefix_caching_can_be_turned_off(serve, tiny):
    for enabled, hit in ((True, 16), (False, 0)):
        engine = serve(tiny, prefix_caching=enabled)
        for _ in range(2):
            await ids(engine, tuple(range(10, 30)))
        assert engine.status().prefix_hit_tokens == hit


# Ends and ids


async def test_every_eos_id_of_the_generation_config_ends_and_none_is_shown(serve, folder):
    tokenizer = load_tokenizer(folder)
    greedy = await ids(serve(folder))
    specials = [tokenizer.encode(token, add_special_tokens=False)[0] for token in (EOS_TOKEN, PAD_TOKEN)]
    # An ordinary token that the answer is known to have, behind two that it does not have.
    edit(folder / "generation_config.json", eos_token_id=[*specials, greedy[2]])
    engine = serve(folder)
    generation = await engine.submit(GenerationRequest("r", "hello", max_new_tokens=8))
    events = [event async for event in generation]
    assert [event.token_id for event in events] == greedy[: greedy.index(greedy[2]) + 1]
    assert events[-1].finish is not None
    assert events[-1].finish.reason is FinishReason.EOS


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [([5, 7], 3, (5, 7)), (5, 3, (5,)), (None, 3, (3,)), (None, [3, 4], (3, 4)), (None, None, ())],
)
def test_the_model_config_names_the_end_where_the_generation_config_does_not(folder, generation, model, expected):
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=model)
    config = load_config(folder)
    assert eos_token_ids(load_generation_config(folder, config), config) == expected


async def test_token_ids_are_limited_by_the_embedding_not_by_the_tokenizer(serve, folder):
    model = weights(folder)
    model.resize_token_embeddings(384)
    save(model, folder)
    engine = serve(folder)
    assert engine.info.vocab_size == 384
    assert len(await ids(engine, (383, 5))) == 8
    with pytest.raises(InvalidTokenIdError):
        await ids(engine, (384,))


# Refusals


def test_a_truncated_file_is_refused(serve, folder):
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    assert "model.safetensors is no safetensors file, or is incomplete" in refusal(serve, folder)


def test_pickled_weights_are_refused(serve, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pickled weights" in refusal(serve, folder)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"intermediate_size": 96}, "mlp.down_proj.weight has shape [64, 128], where config.json makes it [64, 96]"),
        ({"vocab_size": 400}, "lm_head.weight has shape [320, 64], where config.json makes it [400, 64]"),
        ({"num_hidden_layers": 6}, "model.layers.4.input_layernorm.weight is missing (and 17 more like it)"),
        ({"num_hidden_layers": 3}, "model.layers.3.input_layernorm.weight has no place in the model"),
        ({"attention_bias": True}, "self_attn.k_proj.bias is missing"),
        ({"model_type": "gpt2"}, "is missing"),
    ],
)
def test_weights_of_another_model_are_refused(serve, folder, fields, sentence):
    edit(folder / "config.json", **fields)
    message = refusal(serve, folder)
    assert message.startswith("the model's weights do not belong to its config.json: ")
    assert sentence in message


def test_biases_that_the_configuration_denies_are_refused(serve, tmp_path):
    folder = build_tiny_model(tmp_path, config_overrides={"attention_bias": True})
    edit(folder / "config.json", attention_bias=False)
    assert "self_attn.k_proj.bias has no place in the model" in refusal(serve, folder)


async def test_tensors_of_other_parts_are_let_go(serve, folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "visual.blocks.0.weight": torch.zeros(2), "mtp.layers.0.weight": torch.zeros(2)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert len(await ids(serve(folder))) == 8


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder model; only decoder-only models are served"),
        ({"model_type": "vit"}, "vit is not a language model that generates text from text"),
        ({"model_type": "nonsense"}, "the model's config.json cannot be used: "),
        ({"hidden_size": "many"}, "the model's config.json cannot be used: "),
    ],
)
def test_what_is_no_decoder_is_refused(serve, folder, fields, sentence):
    edit(folder / "config.json", **fields)
    assert refusal(serve, folder).startswith(sentence)


def test_broken_json_is_refused(serve, folder):
    (folder / "generation_config.json").write_text("{")
    assert refusal(serve, folder).startswith("the model's generation_config.json cannot be used: ")
    (folder / "config.json").write_text("{")
    assert refusal(serve, folder).startswith("the model's config.json cannot be used: ")


def test_a_folder_without_a_tokenizer_is_refused(serve, folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    assert refusal(serve, folder).startswith("the model's tokenizer cannot be loaded: ")
    (folder / "tokenizer.json").unlink()
    assert "the folder tiny/1 has no tokenizer files" in refusal(serve, folder)


# Code in the folder

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


async def test_code_in_the_folder_runs_only_with_the_setting(serve, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "odd.py").write_text(CODE)
    auto_map = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    edit(folder / "config.json", model_type="odd", architectures=["OddForCausalLM"], auto_map=auto_map)
    assert "runs only when the parameter trustRemoteCode is true" in refusal(serve, folder)
    engine = serve(folder, trust_remote_code=True)
    assert engine.info.architecture == "OddForCausalLM"
    assert len(await ids(engine)) == 8


async def test_an_architecture_that_transformers_has_needs_no_code(serve, folder):
    edit(folder / "config.json", auto_map={"AutoConfig": "absent.X", "AutoModelForCausalLM": "absent.Y"})
    assert serve(folder).info.architecture == "LlamaForCausalLM"
