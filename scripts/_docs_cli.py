"""docs/cli.md, made from the settings of the server."""

from __future__ import annotations

from dataclasses import fields

from tengserve_adapter import settings
from tengserve_adapter.settings import ServerSettings

_HEAD = """# The command line

<!-- Made by scripts/docs from tengserve_adapter/settings.py; change that file instead. -->

```
tengserve serve --model-repository DIR [options]
tengserve bench --url [DIALECT+]URL --tokenizer DIR [options]
tengserve npu-selfcheck [--device npu:N] [--model-repository DIR [--model NAME] | --no-model]
tengserve --version
```

`scripts/serve` installs the command as `.venv/bin/tengserve`.

`bench` puts a load on running servers and tells how they did ([performance](performance.md)); `tengserve bench --help`
lists its flags. `npu-selfcheck` tries an Ascend NPU and prints a report ([NPUs](npu.md)); its status is 0 when all of
it is right. The rest of this page is about `serve`.

`--model-repository` is required. `scripts/serve` takes the same flags and fills that one in, unless told otherwise:
this folder's `model_repository`. There is no authentication, and TLS for gRPC only ([scope](scope.md)): whoever reaches
the address can use the models.

The server listens at once, loads its models in the background, and prints commands to paste when it is ready.
Progress and logs go to stderr; the address and the commands go to stdout.

| flag | value | default | meaning |
| --- | --- | --- | --- |
"""

_TAIL = """
## Exit status

| status | meaning |
| --- | --- |
| 0 | ended by SIGTERM or SIGINT, after the drain |
| 1 | the address cannot be listened on, a model failed to load, or an engine died |
| 2 | a mistake on the command line or in the model repository; one line on stderr says which and where |
| 3 | a device failed, while it served or while a model was loaded onto it; a restart may help ([NPUs](npu.md)) |
| 130, 143 | ended at once by a second SIGINT or SIGTERM |

## Shutdown

On SIGTERM or SIGINT `/v2/health/ready` answers 503 at once, and so does every new request, with `Retry-After`. After
`--pre-drain-delay-s` running answers get `--drain-timeout-s` to end; what is left then ends with an error. The log says
how many answers are waited for, and how long. A second SIGINT (Ctrl-C) or SIGTERM ends the process at once. Engines and
connections take at most some 15 seconds more: keep the sum below the pod's `terminationGracePeriodSeconds`.
"""


def render() -> dict[str, str]:
    """The pages by their path from the root of the repository."""
    return {"docs/cli.md": _HEAD + "".join(_row(field.name) for field in fields(ServerSettings)) + _TAIL}


def _row(name: str) -> str:
    option = settings.option(name)
    flag = settings.flag(name)
    if settings.value_type(name) is bool:
        shown, value = f"`{flag}`, `--no-{flag.removeprefix('--')}`", ""
    else:
        shown, value = f"`{flag} {option.metavar}`", option.rule
    default = settings.default_text(name)
    return f"| {shown} | {value} | {f'`{default}`' if default else ''} | {option.help} |\n"
