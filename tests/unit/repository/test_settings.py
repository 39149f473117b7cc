"""Settings of a model: every key, every bound, and what a mistake says."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tengserve_adapter.settings import ServerSettings, flag
from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.memory_budget import MemoryBudget
from tengserve_backend.repository.mindie_settings import MINDIE_SETTINGS
from tengserve_backend.repository.settings import (
    MAX_BATCH_SIZE,
    MAX_QUEUE,
    MAX_TOKENS,
    ModelSettings,
    read_settings,
    settings_table,
)


def test_no_parameters_give_the_defaults() -> None:
    assert read_settings({}) == ModelSettings()


@pytest.mark.parametrize(
    ("key", "text", "attribute", "value"),
    [
        ("weights", "/models/x", "weights", "/models/x"),
        ("device", "cpu", "device", "cpu"),
        ("device", "cuda", "device", "cuda"),
        ("device", "cuda:3", "device", "cuda:3"),
        ("device", "npu", "device", "npu"),
        ("device", "npu:7", "device", "npu:7"),
        ("dtype", "bfloat16", "dtype", "bfloat16"),
        ("quantization", "none", "quantization", "none"),
        ("quantization", "int8", "quantization", "int8"),
        ("quantization", "int4", "quantization", "int4"),
        ("attention", "portable", "attention", "portable"),
        ("npuFusions", "all", "npu_fusions", ("rms_norm", "rotary", "swiglu")),
        ("npuFusions", "none", "npu_fusions", ()),
        ("npuFusions", "swiglu,rms_norm", "npu_fusions", ("swiglu", "rms_norm")),
        ("maxSeqLen", "2", "max_seq_len", 2),
        ("maxSeqLen", str(MAX_TOKENS), "max_seq_len", MAX_TOKENS),
        ("maxInputTokenLen", "1", "max_input_token_len", 1),
        ("maxInputTokenLen", str(MAX_TOKENS), "max_input_token_len", MAX_TOKENS),
        ("maxIterTimes", "1", "max_iter_times", 1),
        ("maxIterTimes", "2560", "max_iter_times", 2560),
        ("fullTextEnabled", "true", "full_text_enabled", True),
        ("fullTextEnabled", "false", "full_text_enabled", False),
        ("maxBatchSize", "1", "max_batch_size", 1),
        ("maxBatchSize", str(MAX_BATCH_SIZE), "max_batch_size", MAX_BATCH_SIZE),
        ("maxBatchedTokens", "auto", "max_batched_tokens", None),
        ("maxBatchedTokens", "32", "max_batched_tokens", 32),
        ("cpuThreads", "auto", "cpu_threads", None),
        ("cpuThreads", "1024", "cpu_threads", 1024),
        ("cpuAffinity", "any", "cpu_affinity", None),
        ("cpuAffinity", "0", "cpu_affinity", frozenset({0})),
        ("cpuAffinity", "1-3,8,2", "cpu_affinity", frozenset({1, 2, 3, 8})),
        ("kvCacheMemory", "auto", "kv_cache_memory", MemoryBudget()),
        ("kvCacheMemory", "512MiB", "kv_cache_memory", MemoryBudget(bytes=512 * 2**20)),
        ("kvCacheMemory", "1.5GiB", "kv_cache_memory", MemoryBudget(bytes=3 * 2**29)),
        ("kvCacheMemory", "0.25", "kv_cache_memory", MemoryBudget(fraction=0.25)),
        ("kvCacheMemory", ".5", "kv_cache_memory", MemoryBudget(fraction=0.5)),
        ("maxWaitingRequests", "1", "max_waiting_requests", 1),
        ("maxWaitingTokens", "2048", "max_waiting_tokens", 2048),
        ("maxWaitingTokens", str(MAX_QUEUE), "max_waiting_tokens", MAX_QUEUE),
    ],
)
def test_a_value_within_its_rule_is_taken(key: str, text: str, attribute: str, value: object) -> None:
    assert getattr(read_settings({key: text}), attribute) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("weights", ""),
        ("weights", "  "),
        ("weights", "a\0b"),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device", "npu:x"),
        ("attention", "npu-fused"),
        ("npuFusions", ""),
        ("npuFusions", "rotary,"),
        ("npuFusions", "all,rotary"),
        ("device", "cpu:0"),
        ("device", "CPU"),
        ("quantization", "int2"),
        ("dtype", "int8"),
        ("maxSeqLen", "1"),
        ("maxSeqLen", str(MAX_TOKENS + 1)),
        ("maxSeqLen", "2560.0"),
        ("maxSeqLen", " 2560"),
        ("maxSeqLen", "-5"),
        ("maxSeqLen", "٣٣"),
        ("maxSeqLen", "9" * 5000),
        ("maxInputTokenLen", "0"),
        ("maxInputTokenLen", str(MAX_TOKENS + 1)),
        ("maxIterTimes", "0"),
        ("maxIterTimes", "2561"),
        ("fullTextEnabled", "True"),
        ("fullTextEnabled", "1"),
        ("maxBatchSize", "0"),
        ("maxBatchSize", str(MAX_BATCH_SIZE + 1)),
        ("maxBatchedTokens", "31"),
        ("maxBatchedTokens", "Auto"),
        ("cpuThreads", "0"),
        ("cpuThreads", "1025"),
        ("cpuAffinity", ""),
        ("cpuAffinity", "3-1"),
        ("cpuAffinity", "0,"),
        ("cpuAffinity", "0-99999"),
        ("cpuAffinity", "-1"),
        ("kvCacheMemory", "1"),
        ("kvCacheMemory", "1.0"),
        ("kvCacheMemory", "0.0"),
        ("kvCacheMemory", "512"),
        ("kvCacheMemory", "512MB"),
        ("kvCacheMemory", "0GiB"),
        ("kvCacheMemory", "-1GiB"),
        ("maxWaitingRequests", "0"),
        ("maxWaitingTokens", "2047"),
        ("maxWaitingTokens", str(MAX_QUEUE + 1)),
    ],
)
def test_a_value_outside_its_rule_names_key_rule_value_and_place(key: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_settings({key: text}, file="m/config.pbtxt", lines={key: 7})
    message = caught.value.message
    assert message.startswith(f"m/config.pbtxt:7: {key} must be ")
    assert shown(text)[:50] in message
    assert len(message) < 1000


def test_the_rule_of_a_cpu_list_says_which_cpus_there_can_be() -> None:
    with pytest.raises(ConfigurationError, match=r"CPU numbers up to 4095 .*, not \"4096\""):
        read_settings({"cpuAffinity": "4096"})
    assert read_settings({"cpuAffinity": "4095"}).cpu_affinity == {4095}


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("max_seq_len", "maxSeqLen"),
        ("maxBatchsize", "maxBatchSize"),
        ("Weights", "weights"),
        ("maxIterTime", "maxIterTimes"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigurationError, match=f'unknown parameter "{key}": did you mean .*{near}') as caught:
        read_settings({key: "1"}, file="m/config.pbtxt", lines={key: 3})
    assert (caught.value.file, caught.value.line) == ("m/config.pbtxt", 3)


@pytest.mark.parametrize("key", MINDIE_SETTINGS)
def test_a_setting_of_mindie_that_is_none_of_ours_says_what_is_in_its_place(key: str) -> None:
    instead = re.escape(MINDIE_SETTINGS[key])
    with pytest.raises(
        ConfigurationError, match=f'unknown parameter "{key}": in place of MindIE\'s there is {instead}$'
    ):
        read_settings({key: "1"})


@pytest.mark.parametrize("instead", sorted(set(MINDIE_SETTINGS.values())))
def test_what_is_in_the_place_of_a_setting_of_mindie_exists(instead: str) -> None:
    keys = {setting.key for setting in settings_table().values()}
    flags = {flag(row.name) for row in dataclasses.fields(ServerSettings)}
    assert set(re.findall(r"parameter (\w+)", instead)) <= keys
    assert set(re.findall(r"--[a-z-]+", instead)) <= flags
    assert instead.startswith(("the ", "nothing"))


def test_an_unknown_key_that_is_near_to_nothing_lists_all() -> None:
    with pytest.raises(ConfigurationError, match=r"known are weights, device, .*maxWaitingTokens"):
        read_settings({"zzz": "1"})


def test_defaults_follow_a_limit_that_was_set() -> None:
    small = read_settings({"maxSeqLen": "100"})
    assert small.max_iter_times == 100
    large = read_settings({"maxSeqLen": "1000000", "maxInputTokenLen": "500000"})
    assert large.max_waiting_tokens == 500000


def test_the_documented_defaults_are_the_real_ones() -> None:
    for name, setting in settings_table().items():
        text = setting.default.partition(",")[0]
        assert setting.parse(text) == getattr(ModelSettings(), name), setting.key


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelSettings().device = "cpu"
