"""All layers by one operator: for which models, in which steps, and never with another answer."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch

from support.architectures import PACKED, PER_SEQUENCE, VOCAB_SIZE, build_model
from support.cpu_kernels import kernels_device
from tengserve_backend.execution.attention.cpu_paged import CpuPagedAttention
from tengserve_backend.execution.choose import build_forward, choose_forward
from tengserve_backend.execution.forward import compute
from tengserve_backend.execution.fusion.decoder_stack import DecoderLayers, DecoderStack
from tengserve_backend.execution.fusion.direct_forward import DirectForward
from tengserve_backend.execution.packed import PackedForward
from tengserve_backend.scheduling.step import ScheduledSequence, Step

# Of llama's shape: pre-norm, rotated by halves, gated MLPs.
STACKED = {
    "llama",
    "llama-tied",
    "llama-dynamic-rope",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mistral",
    "phi3",
    "smollm3",
    "mellum-dense",
}
DTYPES = (torch.float32, torch.bfloat16)


def fused(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, int]]:
    model = build_model(name).to(dtype)
    return model, dict(kernels_device().fuse(model, ()))


def forward_of(model: Any, dtype: torch.dtype = torch.float32, *, portable: bool = False) -> PackedForward:
    device = kernels_device()
    model.set_attn_implementation("eager")  # As it was loaded, when this is another forward of it.
    choice = choose_forward(model, device, vocab_size=VOCAB_SIZE, dtype=dtype, portable=portable)
    forward = build_forward(choice, model, total_blocks=64, device=device, dtype=dtype)
    assert isinstance(forward, PackedForward)
    return forward


def part(seq_id: int, start: int, count: int) -> ScheduledSequence:
    ids = tuple((7 * (start + token) + seq_id) % VOCAB_SIZE for token in range(count))
    return ScheduledSequence(seq_id, start, ids, tuple(range(4 * seq_id, 4 * seq_id + 4)), samples=True)


STEPS = [
    Step(0, (part(0, 0, 40), part(1, 0, 3))),
    Step(1, (part(0, 40, 1), part(1, 3, 20), part(2, 0, 1))),
    Step(2, (part(0, 41, 1), part(1, 23, 1), part(2, 1, 1))),
]


@torch.inference_mode()
def answers(forward: PackedForward, steps: list[Step] = STEPS) -> list[torch.Tensor]:
    return [compute(forward, step, lambda host: host).last for step in steps]


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step that the stack was given."""
    seen: list[int] = []
    run = DecoderStack.run

    def counted(self: DecoderStack, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(hidden.shape[1])
        return run(self, hidden, *args)

    monkeypatch.setattr(DecoderStack, "run", counted)
    return seen


@pytest.mark.parametrize("name", [*PACKED, *PER_SEQUENCE])
def test_which_models_have_one(name: str) -> None:
    _, done = fused(name)
    assert done.get("decoder_stack") == (1 if name in STACKED else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(STACKED - PER_SEQUENCE.keys()))
def test_a_step_answers_as_layer_by_layer(
    name: str, dtype: torch.dtype, uses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = fused(name, dtype)
    forward = forward_of(model, dtype)
    assert forward.tier == "cpu-paged"
    uses.clear()
    got = answers(forward)
    assert uses == [43, 22, 3]
    monkeypatch.setattr(DecoderStack, "fits", lambda self, context: False)
    expected = answers(forward_of(model, dtype))
    assert uses == [43, 22, 3]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_portable_attention_goes_layer_by_layer(uses: list[int]) -> None:
    model, _ = fused("qwen2-window")
    forward = forward_of(model, portable=True)
    assert forward.tier == "portable"
    uses.clear()
    expected = answers(forward)
    assert uses == []
    for a, b in zip(answers(forward_of(model)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_without_a_step_the_layers_are_the_models_own(uses: list[int]) -> None:
    # Some of its layers have a window, so each must get its own mask.
    expected = build_model("qwen2-window")
    model, _ = fused("qwen2-window")
    uses.clear()
    ids = torch.arange(50).unsqueeze(0)
    torch.testing.assert_close(model(input_ids=ids).logits, expected(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert uses == []
    layers = model.model.layers
    assert isinstance(layers, DecoderLayers)
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2, 3]
    assert [layer.self_attn.layer_idx for layer in layers[1:3]] == [1, 2]
    assert layers[-1].self_attn.layer_idx == 3
    assert model.state_dict().keys() <= expected.state_dict().keys()


def test_two_models_at_once(uses: list[int]) -> None:
    """Each engine has a thread, and the operator lets go of Python's lock."""
    forwards = [forward_of(fused(name)[0]) for name in ("llama", "qwen3", "mistral")]
    expected = [answers(forward) for forward in forwards]
    got: list[list[list[torch.Tensor]]] = [[] for _ in forwards]

    def run(index: int) -> None:
        got[index] = [answers(forwards[index]) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(forwards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rounds, own in zip(got, expected, strict=True):
        assert len(rounds) == 5
        assert all(torch.equal(a, b) for each in rounds for a, b in zip(each, own, strict=True))


def test_the_tier_may_change_while_it_runs(uses: list[int]) -> None:
    model, _ = fused("llama")
    forward = forward_of(model, portable=True)
    first = answers(forward, STEPS[:1])
    uses.clear()
    forward.change_attention(CpuPagedAttention(), range(12))
    got = first + answers(forward, STEPS[1:])
    assert uses == [22, 3]
    for a, b in zip(got, answers(forward_of(model)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_weights_go_when_the_model_goes() -> None:
    model, _ = fused("llama")
    answers(forward_of(model))
    packed = [
        weakref.ref(module.packed)
        for module in model.modules()
        if isinstance(getattr(module, "packed", None), torch.Tensor)
    ]
    assert packed
    del model
    gc.collect()
    assert [ref() for ref in packed] == [None] * len(packed)


def test_layers_that_do_more_are_left(caplog: pytest.LogCaptureFixture) -> None:
    """Granite scales what it adds to the residual; it is built like llama otherwise."""
    caplog.set_level(logging.INFO)
    fused("granite")
    assert (
        "decoder_stack is left to transformers in 1 of GraniteDecoderLayer: the answers are not the same to the bit"
        in caplog.text
    )


def test_a_scale_that_follows_the_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    attend = modeling_llama.LlamaAttention.forward

    def scaled(self: Any, hidden_states: torch.Tensor, **options: Any) -> Any:
        out, weights = attend(self, hidden_states, **options)
        return out * (1 + options["position_ids"] // 8192).unsqueeze(-1), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", scaled)
    _, done = fused("llama")
    assert "decoder_stack" not in done


def test_a_model_that_does_something_between_its_layers_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = build_model("llama")
    own = type(model.model.layers)

    class Model(type(model.model)):
        def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **_: Any) -> Any:
            from transformers.modeling_outputs import BaseModelOutputWithPast

            hidden = self.embed_tokens(input_ids)
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1]).unsqueeze(0)
            angles = self.rotary_emb(hidden, position_ids=position_ids)
            for layer in self.layers:
                hidden = layer(hidden, position_ids=position_ids, position_embeddings=angles) * 2
            return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    model.model.__class__ = Model
    done = kernels_device().fuse(model, ())
    assert "decoder_stack" not in done
    assert "the answers are not the same to the bit" in caplog.text
    assert type(model.model.layers) is own


def test_a_model_that_cannot_be_tried_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaModel.forward

    def without_positions(self: Any, *args: Any, position_ids: torch.Tensor | None = None, **options: Any) -> Any:
        if position_ids is not None:
            raise ValueError("it counts them itself")
        return forward(self, *args, **options)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", without_positions)
    caplog.set_level(logging.INFO)
    model, done = fused("llama")
    assert "decoder_stack" not in done
    assert "it fails with ValueError on random input" in caplog.text
    assert type(model.model.layers) is torch.nn.ModuleList


def test_no_layer_may_run_twice_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fused("llama")
    forward = forward_of(model)
    layers = model.model.layers
    twice = layers.stack

    class Both:
        def fits(self, context: Any) -> bool:
            return bool(twice.fits(context))

        def __call__(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
            return twice(twice(hidden, **options), **options)

    monkeypatch.setattr(layers, "stack", Both())
    monkeypatch.setattr(DirectForward, "fits", lambda self, context: False)
    with pytest.raises(RuntimeError, match="attention layer 0 was called twice in one step"):
        answers(forward)
