"""One response of a model that sends several."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from tengserve_backend.errors import GenerationFailedError
from tengserve_backend.inference import Datatype, InferRequest, InferResponse, InferTensor, TensorModel
from tengserve_backend.inference.unary import infer_once

REQUEST = InferRequest("m", "", "7", ())


def tensor(name: str, items: list[Any], datatype: Datatype = Datatype.INT32) -> InferTensor:
    return InferTensor(name, datatype, np.array(items, datatype.dtype))


def response(*outputs: InferTensor, final: bool = False, **parameters: Any) -> InferResponse:
    return InferResponse("m", "1", "7", outputs, parameters, final)


@dataclass
class Sends:
    responses: list[InferResponse]
    name: str = "m"

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        for item in self.responses:
            yield item


async def once(*responses: InferResponse) -> InferResponse:
    return await infer_once(cast(TensorModel, Sends(list(responses))), REQUEST)


async def test_a_single_response_is_passed_on() -> None:
    only = response(tensor("x", [1]), final=True)
    assert await once(only) is only
    assert await once(only, response(final=True)) is only


async def test_several_are_joined_in_order() -> None:
    joined = await once(
        response(tensor("x", [1, 2]), tensor("t", [b"a"], Datatype.BYTES), cost=1),
        response(tensor("x", [3]), tensor("t", [b"\xc3"], Datatype.BYTES), cost=2),
        response(final=True),
    )
    assert {item.name: item.data.tolist() for item in joined.outputs} == {"x": [1, 2, 3], "t": [b"a\xc3"]}
    assert (joined.final, joined.parameters) == (True, {"cost": 2})


async def test_texts_of_several_elements_stay_elements() -> None:
    joined = await once(
        response(tensor("t", [b"a", b"b"], Datatype.BYTES)), response(tensor("t", [b"c"], Datatype.BYTES), final=True)
    )
    assert joined.outputs[0].data.tolist() == [b"a", b"b", b"c"]


async def test_what_cannot_be_one_response() -> None:
    with pytest.raises(GenerationFailedError, match="sent no response"):
        await once()
    with pytest.raises(GenerationFailedError, match="output x changes its shape"):
        await once(response(tensor("x", [[1]])), response(tensor("x", [[1, 2]]), final=True))
