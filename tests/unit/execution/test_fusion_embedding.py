"""An embedding that is also the head's weight: there once, in the head's packed order, and the same to the bit."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from support.architectures import build_model
from support.cpu_kernels import kernels_device
from tengserve_backend.execution.fusion.embedding import PackedEmbedding
from tengserve_backend.execution.fusion.quantized import Quantization
from tengserve_backend.native.operators import packed_rows

IDS = torch.tensor([[0, 198, 31, 32, 31, 5]])


@torch.inference_mode()
def logits(model):
    return model(input_ids=torch.arange(2, 22).unsqueeze(0), use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tied_embedding_is_there_once(dtype):
    device = kernels_device()
    model = build_model("llama-tied").to(dtype)
    expected, looked_up = logits(model).float(), model.get_input_embeddings()(IDS)
    weight = weakref.ref(model.get_input_embeddings().weight)
    assert device.fuse(model, ())["packed_embedding"] == 1
    gc.collect()
    assert weight() is None
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(IDS), looked_up)
    # What others may ask of it.
    assert (embedding.weight.shape, embedding.weight.dtype) == ((199, 64), dtype)
    assert (model.device.type, model.dtype) == ("cpu", dtype)
    share = (logits(model).float() - expected).abs().max() / expected.abs().max()
    assert share <= {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_one_of_its_own_or_of_another_kind_stays(name):
    model = build_model(name)
    embedding = model.get_input_embeddings()
    assert "packed_embedding" not in kernels_device().fuse(model, ())
    assert model.get_input_embeddings() is embedding


def test_one_whose_weight_other_code_reads_stays():
    model = build_model("llama-tied")
    embedding = model.get_input_embeddings()
    model.model.norm.register_forward_hook(lambda module, args, answer: answer + embedding.weight[1].sum())
    expected = logits(model)
    kernels_device().fuse(model, ())
    assert not any(isinstance(module, PackedEmbedding) for module in model.modules())
    assert torch.allclose(logits(model), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "quantization", "said"),
    [
        ("llama-tied", Quantization.NONE, "its own 0 MiB are let go"),
        ("llama-tied", Quantization.INT8, "takes 0 MiB more"),
        ("gemma3", Quantization.NONE, "takes 0 MiB more"),
        ("llama", Quantization.NONE, ""),
    ],
)
def test_the_log_tells_once_what_becomes_of_it(name, quantization, said, caplog):
    with caplog.at_level(logging.INFO, logger="tengserve_backend.execution.fusion"):
        kernels_device(quantization).fuse(build_model(name), ())
    lines = [record.getMessage() for record in caplog.records if "embedding" in record.getMessage()]
    assert [said in line for line in lines] == [True] * bool(said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (33, 7), (64, 48), (199, 65)])
def test_rows_of_a_packed_weight(dtype, size):
    kernels_device()
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = torch.ops.tengserve_cpu.pack_linear(weight)
    ids = torch.arange(size[0]).flip(0)
    assert torch.equal(packed_rows(packed, ids, size[1]), weight[ids])
    assert packed_rows(packed, ids.view(1, -1, 1), size[1]).shape == (1, size[0], 1, size[1])
