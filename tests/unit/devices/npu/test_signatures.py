"""Every call that our operators module can make, bound by each supported torch-npu's own signatures.

The signatures are text from the wheels, which scripts/_env_npu leaves beside the environment; no torch_npu is imported.
torch itself parses them, and our calls go through its dispatcher to reference functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from support.npu_operators import SIGNATURES, npu_operators
from tengserve_backend.devices.npu import operators
from tengserve_backend.devices.npu.operators import Operator

FOLDER = Path(__file__).parents[4] / ".venv-npu" / "signatures"
VERSIONS = ("2.10.0.post4", "2.12.0", "2.13.0", "2.14.0")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="scripts/_env_npu has not read the wheels")


def declared(version: str) -> Mapping[str, str]:
    """The signatures that a wheel declares for our operators."""
    text = (FOLDER / f"{version}.yaml").read_text()
    found = {}
    for match in re.finditer(r"^\s*(?:- )?func: ((\w+)\(.*)$", text, re.MULTILINE):
        if match[2] in SIGNATURES:
            found[match[2]] = match[1]
    return found


def registered(declaration: str) -> str:
    """The signature that torch gets of one that is declared: torch-npu renames the first argument on the way."""
    return declaration.replace("(Tensor self, ", "(Tensor input, ")


@pytest.fixture(params=VERSIONS)
def signatures(request: pytest.FixtureRequest) -> Mapping[str, str]:
    return {name: registered(text) for name, text in declared(request.param).items()}


def test_every_version_has_every_operator(signatures):
    assert set(signatures) == {wanted.value for wanted in Operator}
    with npu_operators(signatures=signatures):
        found = operators.capabilities()
    assert found.missing == {}


def test_the_contract_tests_use_the_declared_signatures(signatures):
    assert {name: str(torch._C.parse_schema(text)) for name, text in signatures.items()} == {
        name: str(torch._C.parse_schema(text)) for name, text in SIGNATURES.items()
    }


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_binds(signatures, dtype, window):
    with npu_operators(signatures=signatures):
        answer = operators.attention(
            torch.randn(4, 4, 128, dtype=dtype),
            *torch.randn(2, 3, 128, 256, dtype=dtype),
            mask=operators.causal_mask(torch.device("cpu")),
            query_ends=[1, 4],
            contexts=[130, 3],
            block_table=torch.tensor([[0, 2], [1, 0]], dtype=torch.int32),
            kv_heads=2,
            scaling=0.1,
            window=window,
        )
    assert answer.shape == (4, 4, 128)
    assert answer.dtype is dtype


@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_scatter_binds(signatures, slots):
    tokens, cache = torch.randn(2, 3, 2, 64), torch.zeros(2, 4, 128, 2, 64)
    with npu_operators(signatures=signatures):
        operators.scatter_cache(*tokens, *cache, slots=torch.tensor([5, 300, 0], dtype=slots))
    assert torch.equal(cache.view(2, -1, 2, 64)[:, [5, 300, 0]], tokens)


def test_the_others_bind(signatures):
    x = torch.randn(1, 5, 4, 64)
    cos, sin = torch.randn(2, 1, 5, 1, 64)
    with npu_operators(signatures=signatures):
        assert operators.rms_norm(x, torch.ones(64), epsilon=1e-5).shape == x.shape
        assert operators.rotary(x, cos, sin).shape == x.shape
        assert operators.swiglu(x).shape == (1, 5, 4, 32)
