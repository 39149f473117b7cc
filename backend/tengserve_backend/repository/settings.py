"""Settings of one LLM, read from the `parameters` of its config.pbtxt.

The fields of `ModelSettings` are the one table of these settings: the reader, its error texts and
docs/configuration.md all come from it. Keys are MindIE's names where MindIE has the setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.repository.cpu_list import MAX_CPU, parse_cpus
from tengserve_backend.repository.memory_budget import AUTO_MEMORY, MemoryBudget, parse_memory
from tengserve_backend.repository.mindie_settings import MINDIE_SETTINGS

MAX_TOKENS = 4194304
"""The largest token count that a setting takes: MindIE's own bound of maxInputTokenLen."""

MAX_BATCH_SIZE = 819200
"""MindIE's own bound of maxBatchSize."""

MAX_THREADS = 1024
"""The most threads that a model computes with on a CPU."""

MAX_QUEUE = 2**31 - 1
"""The largest queue limit."""

_INTEGER = re.compile(r"\d{1,15}", re.ASCII)
_DEVICE = re.compile(r"auto|cpu|(npu|cuda)(:\d{1,3})?", re.ASCII)

DEVICE_RULE = "auto, npu, npu:N, cuda, cuda:N or cpu"
"""What names a device."""


NPU_FUSIONS = ("rms_norm", "rotary", "swiglu")
"""Parts of a model that an NPU has fused operators for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Attributes:
        key: the name in `parameters`.
        rule: which values are taken; the end of the sentence "KEY must be ...".
        parse: the typed value of a string; raises ValueError when the string breaks the rule. The error's text, if
            it has one, says more than the rule does.
        default: the value that is used without the key, as it would be written.
        help: what it does.
    """

    key: str
    rule: str
    parse: Callable[[str], Any]
    default: str
    help: str


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return parse


def _auto_or_integer(low: int, high: int) -> Callable[[str], int | None]:
    integer = _integer(low, high)
    return lambda text: None if text == "auto" else integer(text)


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return parse


def _boolean(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


def _weights(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError
    return text


def is_device(text: str) -> bool:
    """Whether a text follows DEVICE_RULE; whether there is such a device is known when a model loads."""
    return _DEVICE.fullmatch(text) is not None


def _device(text: str) -> str:
    if not is_device(text):
        raise ValueError
    return text


def _any_or_cpus(text: str) -> frozenset[int] | None:
    return None if text == "any" else parse_cpus(text)


def _fusions(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return NPU_FUSIONS if text == "all" else ()
    names = tuple(text.split(","))
    if not set(names) <= set(NPU_FUSIONS):
        raise ValueError
    return names


def _setting(key: str, rule: str, parse: Callable[[str], Any], default: str, text: str) -> dict[str, Setting]:
    return {"setting": Setting(key, rule, parse, default, text)}


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Options of one LLM, typed and checked; `settings_table` has what each means.

    Attributes:
        given: keys that somebody set, to any value; all others have their defaults.
    """

    weights: str = field(
        default=".",
        metadata=_setting(
            "weights",
            "a folder or a .gguf file (absolute, or relative to the version folder), or package:NAME/FILE",
            _weights,
            ".",
            "Where the weights are: a folder of Hugging Face files (config.json, tokenizer, safetensors), a GGUF file, "
            "or a file that an installed Python package ships. `.` is the version folder itself.",
        ),
    )
    device: str = field(
        default="auto",
        metadata=_setting(
            "device",
            DEVICE_RULE,
            _device,
            "auto",
            "What the model runs on; N counts from 0. `auto` is what `--device` of the server says; without that, an "
            "NPU or else a CUDA device when there is one.",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=_setting(
            "dtype",
            "auto, float32, bfloat16 or float16",
            _one_of("auto", "float32", "bfloat16", "float16"),
            "auto",
            "The number format of weights and activations; `auto` takes what suits the device. On a CPU that is "
            "bfloat16 where it has instructions for it and cpuKernels is auto, else float32; answers of the two may "
            "differ. A format that the device cannot compute in is an error.",
        ),
    )
    quantization: str = field(
        default="none",
        metadata=_setting(
            "quantization",
            "none, int8 or int4",
            _one_of("none", "int8", "int4"),
            "none",
            "How linear layers keep their weights on a CPU: `int8` is half of bfloat16 and `int4` a third, both made "
            "from the model's own at load, and answers differ. Needs the kernels of cpuKernels; any other device "
            "refuses it.",
        ),
    )
    attention: str = field(
        default="auto",
        metadata=_setting(
            "attention",
            "auto or portable",
            _one_of("auto", "portable"),
            "auto",
            "How attention is computed: `auto` takes the fastest way of the device that serves the model and passes "
            "its check against the CPU, `portable` plain torch operators.",
        ),
    )
    cpu_kernels: str = field(
        default="auto",
        metadata=_setting(
            "cpuKernels",
            "auto or off",
            _one_of("auto", "off"),
            "auto",
            "Whether a CPU computes with kernels of our own: `auto` builds them at the first start, with the system's "
            "C++ compiler, and uses them where they give the model's own answer; `off` takes plain torch operators.",
        ),
    )
    cpu_threads: int | None = field(
        default=None,
        metadata=_setting(
            "cpuThreads",
            f"auto, or an integer in [1, {MAX_THREADS}]",
            _auto_or_integer(1, MAX_THREADS),
            "auto",
            "Threads that the model computes with on a CPU. `auto` is OMP_NUM_THREADS where it is set, else one for "
            "each core that the process may use, within the CPU limit of its container.",
        ),
    )
    cpu_affinity: frozenset[int] | None = field(
        default=None,
        metadata=_setting(
            "cpuAffinity",
            f"any, or CPU numbers up to {MAX_CPU} and ranges with commas between them, such as 0-3,8",
            _any_or_cpus,
            "any",
            "The CPUs that these threads run on. Others of the server run wherever the process may.",
        ),
    )
    npu_fusions: tuple[str, ...] = field(
        default=NPU_FUSIONS,
        metadata=_setting(
            "npuFusions",
            f"all, none, or names with commas between them: {', '.join(NPU_FUSIONS)}",
            _fusions,
            "all",
            "Which parts of the model run as fused operators on an NPU, where the chip has the operator and the part "
            "gives the same answer.",
        ),
    )
    trust_remote_code: bool = field(
        default=False,
        metadata=_setting(
            "trustRemoteCode",
            "true or false",
            _boolean,
            "false",
            "Whether Python code in the model's folder may run, for architectures that transformers does not have. It "
            "runs with all rights of the server.",
        ),
    )
    max_seq_len: int = field(
        default=2560,
        metadata=_setting(
            "maxSeqLen",
            f"an integer in [2, {MAX_TOKENS}]",
            _integer(2, MAX_TOKENS),
            "2560",
            "Tokens of prompt and output together; the positions that the model was built for limit them too.",
        ),
    )
    max_input_token_len: int = field(
        default=2048,
        metadata=_setting(
            "maxInputTokenLen",
            f"an integer in [1, {MAX_TOKENS}]",
            _integer(1, MAX_TOKENS),
            "2048",
            "Tokens of the longest prompt; maxSeqLen - 1 limits it too.",
        ),
    )
    max_iter_times: int = field(
        default=512,
        metadata=_setting(
            "maxIterTimes",
            "an integer in [1, maxSeqLen]",
            _integer(1, MAX_TOKENS),
            "512, or maxSeqLen if that is less",
            "Tokens of the longest output, whatever a request asks for.",
        ),
    )
    full_text_enabled: bool = field(
        default=False,
        metadata=_setting(
            "fullTextEnabled",
            "true or false",
            _boolean,
            "false",
            "Whether each event of a stream repeats the whole text so far.",
        ),
    )
    max_batch_size: int = field(
        default=32,
        metadata=_setting(
            "maxBatchSize",
            f"an integer in [1, {MAX_BATCH_SIZE}]",
            _integer(1, MAX_BATCH_SIZE),
            "32",
            "Sequences that one step computes at most.",
        ),
    )
    max_batched_tokens: int | None = field(
        default=None,
        metadata=_setting(
            "maxBatchedTokens",
            f"auto, or an integer in [maxBatchSize, {MAX_TOKENS}]",
            _auto_or_integer(1, MAX_TOKENS),
            "auto",
            "Tokens that one step computes at most, prompts and outputs together; a longer prompt is computed in "
            "chunks. Less makes running streams smoother, more makes prompts faster. auto is measured for the device, "
            "and less on a CPU in steps that also go on with running streams.",
        ),
    )
    kv_cache_memory: MemoryBudget = field(
        default=AUTO_MEMORY,
        metadata=_setting(
            "kvCacheMemory",
            'auto, a size with its unit such as "512MiB" or "2GiB", or a fraction below 1 such as "0.25"',
            parse_memory,
            "auto",
            "Memory for the KV cache: a size, or a fraction of the memory that is available once the weights are "
            "loaded. Units: KiB, MiB, GiB, TiB. auto is most of an accelerator's memory; on a CPU 16384 tokens, or two "
            "sequences of maxSeqLen.",
        ),
    )
    prefix_caching: bool = field(
        default=True,
        metadata=_setting(
            "prefixCaching",
            "true or false",
            _boolean,
            "true",
            "Whether requests that begin with the same tokens share their part of the KV cache.",
        ),
    )
    max_waiting_requests: int = field(
        default=256,
        metadata=_setting(
            "maxWaitingRequests",
            f"an integer in [1, {MAX_QUEUE}]",
            _integer(1, MAX_QUEUE),
            "256",
            "Requests that may wait to be started; the next one is refused at once.",
        ),
    )
    max_waiting_tokens: int = field(
        default=262144,
        metadata=_setting(
            "maxWaitingTokens",
            f"an integer in [the longest prompt, {MAX_QUEUE}]",
            _integer(1, MAX_QUEUE),
            "262144, or the longest prompt if that is more",
            "Prompt tokens that may wait to be started, of all requests together.",
        ),
    )
    given: frozenset[str] = field(default=frozenset(), compare=False)


def settings_table() -> dict[str, Setting]:
    """The rows by attribute name of ModelSettings, in the order in which they are documented."""
    return {row.name: row.metadata["setting"] for row in dataclasses.fields(ModelSettings) if row.metadata}


def read_settings(
    parameters: Mapping[str, str], *, file: str | None = None, lines: Mapping[str, int] | None = None
) -> ModelSettings:
    """The typed settings of a model.

    Args:
        parameters: keys and string values as config.pbtxt has them.
        file: the file to name in an error, relative to the repository.
        lines: the line on which each key stands, as far as it is known.

    Raises:
        ConfigurationError: an unknown key, or a value that breaks its rule.
    """

    def fail(key: str, message: str) -> ConfigurationError:
        return ConfigurationError(message, file=file, line=(lines or {}).get(key))

    rows = {setting.key: (name, setting) for name, setting in settings_table().items()}
    values: dict[str, Any] = {}
    for key, text in parameters.items():
        if key not in rows:
            if instead := MINDIE_SETTINGS.get(key):
                raise fail(key, f'unknown parameter "{key}": in place of MindIE\'s there is {instead}')
            raise fail(key, f'unknown parameter "{shown(key)}"{near_misses(key, rows)}')
        name, setting = rows[key]
        try:
            values[name] = setting.parse(text)
        except ValueError as error:
            because = f" ({error})" if str(error) else ""
            raise fail(key, f'{key} must be {setting.rule}, not "{shown(text)}"{because}') from None
    settings = ModelSettings(**values, given=frozenset(parameters))

    if settings.max_iter_times > settings.max_seq_len:
        if "max_iter_times" in values:
            raise fail(
                "maxIterTimes",
                f"maxIterTimes must be at most maxSeqLen ({settings.max_seq_len}), not {settings.max_iter_times}",
            )
        settings = dataclasses.replace(settings, max_iter_times=settings.max_seq_len)
    if settings.max_batched_tokens is not None and settings.max_batched_tokens < settings.max_batch_size:
        raise fail(
            "maxBatchedTokens",
            f"maxBatchedTokens must be at least maxBatchSize ({settings.max_batch_size}), "
            f"not {settings.max_batched_tokens}: each running sequence needs one token a step",
        )
    longest_prompt = min(settings.max_input_token_len, settings.max_seq_len - 1)
    if settings.max_waiting_tokens < longest_prompt:
        if "max_waiting_tokens" in values:
            raise fail(
                "maxWaitingTokens",
                f"maxWaitingTokens must be at least the longest prompt that maxInputTokenLen and maxSeqLen allow "
                f"({longest_prompt}), not {settings.max_waiting_tokens}",
            )
        settings = dataclasses.replace(settings, max_waiting_tokens=longest_prompt)
    return settings


def near_misses(name: str, known: Mapping[str, object] | list[str]) -> str:
    """The end of an "unknown ..." sentence: the names that were probably meant, or all when none is near."""
    by_lower = {candidate.lower().replace("_", ""): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower().replace("_", ""), list(by_lower), n=3, cutoff=0.6)
    if near:
        return ": did you mean " + " or ".join(by_lower[match] for match in near) + "?"
    return "; known are " + ", ".join(known)
