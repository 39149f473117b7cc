"""The example models do what their README says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.python_models import answer, ask, loaded
from tengserve_backend.errors import ErrorCode, ModelExecutionError
from tengserve_backend.inference import Datatype, InferTensor

ROOT = Path(__file__).resolve().parents[3] / "examples" / "model_repository"


def texts(name: str, *values: bytes) -> InferTensor:
    return InferTensor(name, Datatype.BYTES, np.array(values, np.object_).reshape(-1, 1))


async def test_text_similarity_compares_pairs() -> None:
    with loaded(ROOT) as models:
        model = models["text_similarity"]
        request = ask(texts("TEXT_A", b"abcd", b"abcd", b""), texts("TEXT_B", b"abcd", b"abcx", b""))
        response = await answer(model, request)
        assert response.outputs[0].data.reshape(-1).tolist() == pytest.approx([1, 1 / 3, 1])
        with pytest.raises(ModelExecutionError, match="must be UTF-8") as caught:
            await answer(model, ask(texts("TEXT_A", b"\xff"), texts("TEXT_B", b"a")))
        assert caught.value.code is ErrorCode.INVALID_ARG
