"""A model's parts called without its forward: for which models, in which calls, and never with another answer."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from support.architectures import PACKED, PER_SEQUENCE, VOCAB_SIZE, build_model
from support.cpu_kernels import kernels_device
from tengserve_backend.execution.choose import build_forward, choose_forward
from tengserve_backend.execution.forward import ModelForward, compute
from tengserve_backend.execution.fusion.direct_forward import DirectForward, direct_forward
from tengserve_backend.scheduling.step import ScheduledSequence, Step

# Those whose layers are one operator.
DIRECT = {"llama", "llama-tied", "llama-dynamic-rope", "qwen2", "qwen2-window", "qwen3", "mistral", "phi3", "smollm3"}
DTYPES = (torch.float32, torch.bfloat16)


def forward_of(model: Any, dtype: torch.dtype = torch.float32) -> ModelForward:
    device = kernels_device()
    choice = choose_forward(model, device, vocab_size=VOCAB_SIZE, dtype=dtype)
    return build_forward(choice, model, total_blocks=64, device=device, dtype=dtype)


def part(seq_id: int, start: int, count: int, *, samples: bool = True, scores: bool = False) -> ScheduledSequence:
    ids = tuple((7 * (start + token) + seq_id) % VOCAB_SIZE for token in range(count))
    blocks = tuple(range(4 * seq_id, 4 * seq_id + 4))
    return ScheduledSequence(seq_id, start, ids, blocks, samples=samples, scores_prompt=scores)


STEPS = [
    Step(0, (part(0, 0, 40, samples=False), part(1, 0, 3, scores=True))),
    Step(1, (part(0, 40, 1), part(1, 3, 20), part(2, 0, 1))),
    Step(2, (part(0, 41, 1), part(1, 23, 1), part(2, 1, 1))),
]


@torch.inference_mode()
def answers(forward: ModelForward) -> list[torch.Tensor]:
    """All logits that the steps give."""
    found = []
    for step in STEPS:
        logits = compute(forward, step, lambda host: host)
        found += [logits.last, *(prompt.rows for prompt in logits.prompts.values())]
    return found


@pytest.mark.parametrize("name", [*PACKED, *PER_SEQUENCE])
def test_which_models_are_called_so(name: str) -> None:
    done = kernels_device().fuse(build_model(name), ())
    assert done.get("direct_forward") == (1 if name in DIRECT else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(DIRECT - PER_SEQUENCE.keys()))
def test_a_step_answers_as_the_model_does(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(name).to(dtype)
    kernels_device().fuse(model, ())
    forward = forward_of(model, dtype)
    own = Mock(wraps=model.model.forward)
    monkeypatch.setattr(model.model, "forward", own)
    got = answers(forward)
    assert own.call_count == 0
    monkeypatch.setattr(DirectForward, "fits", lambda self, context: False)
    expected = answers(forward)
    assert own.call_count == len(STEPS)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@torch.inference_mode()
def test_any_other_call_is_the_models_own() -> None:
    expected, model = build_model("llama"), build_model("llama")
    assert kernels_device().fuse(model, ())["direct_forward"] == 1
    ids = torch.arange(20).unsqueeze(0)
    own, got = (each(input_ids=ids, output_hidden_states=True) for each in (expected, model))
    torch.testing.assert_close(got.logits, own.logits, rtol=1e-4, atol=1e-4)
    assert len(got.hidden_states) == len(own.hidden_states)
    torch.testing.assert_close(model(ids).logits, own.logits, rtol=1e-4, atol=1e-4)


def test_weights_go_when_the_model_goes_without_a_collection() -> None:
    model = build_model("llama")
    kernels_device().fuse(model, ())
    head = weakref.ref(model.lm_head.packed)
    gc.collect()
    gc.disable()
    try:
        del model
        assert head() is None
    finally:
        gc.enable()


def test_a_model_that_does_more_than_its_parts_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaForCausalLM.forward

    def scaled(self: Any, *args: Any, **options: Any) -> Any:
        output = forward(self, *args, **options)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", scaled)
    caplog.set_level(logging.INFO)
    model = build_model("llama")
    done = kernels_device().fuse(model, ())
    assert "direct_forward" not in done
    assert done["decoder_stack"] == 1
    assert (
        "direct_forward is left to transformers in 1 of LlamaForCausalLM: the answers are not the same to the bit"
        in caplog.text
    )
    assert direct_forward(model) is None


def test_a_model_that_takes_no_rows_to_keep_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaForCausalLM.forward

    def of_all(self: Any, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        if "logits_to_keep" in options:
            raise TypeError("it gives all of them")
        return forward(self, input_ids=input_ids, position_ids=position_ids, **options)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", of_all)
    caplog.set_level(logging.INFO)
    done = kernels_device().fuse(build_model("llama"), ())
    assert done["decoder_stack"] == 1
    assert "direct_forward" not in done
    assert "it fails with TypeError on random input" in caplog.text


def test_a_model_whose_angles_want_to_know_the_kind_of_layer_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, ids = build_model("mellum-dense"), torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        done = kernels_device().fuse(model, ())
        assert done["decoder_stack"] == 1
        assert "direct_forward" not in done
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert "its parts fail with TypeError where nothing else is given" in caplog.text


def _with_a_hook(model: Any) -> None:
    model.model.register_forward_hook(lambda module, args, output: None)


def _with_a_hook_of_its_own(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: None)


def _with_a_hook_of_a_part(model: Any) -> None:
    model.model.rotary_emb.register_forward_pre_hook(lambda module, args: None)


def _with_another_forward(model: Any) -> None:
    own = model.forward

    def doubled(**options: Any) -> Any:
        output = own(**options)
        output.logits = output.logits * 2
        return output

    model.forward = doubled


def _with_a_wrapped_base(model: Any) -> None:
    own = model.model.forward
    model.model.forward = lambda *args, **options: own(*args, **options)


@pytest.mark.parametrize(
    "change",
    [_with_a_hook, _with_a_hook_of_its_own, _with_a_hook_of_a_part, _with_another_forward, _with_a_wrapped_base],
)
def test_what_somebody_put_around_a_forward_stays(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = build_model("llama")
    change(model)
    ids = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        assert "direct_forward" not in kernels_device().fuse(model, ())
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert "something else is called before, after or instead of a forward" in caplog.text
