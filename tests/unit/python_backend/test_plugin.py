"""The plugin runs the LLM engine behind the python_backend API alone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.python_models import answers, ask, loaded, text
from support.tiny_model import build_tiny_model
from tengserve_backend.errors import ErrorCode, ModelExecutionError
from tengserve_backend.inference import Datatype
from tengserve_backend.python_backend import PythonModel

PLUGIN = Path(__file__).resolve().parents[3] / "backend" / "tengserve_backend" / "plugin" / "model.py"
CONFIG = """
backend: "python"
parameters { key: "maxSeqLen" value { string_value: "64" } }
parameters { key: "kvCacheMemory" value { string_value: "16MiB" } }
parameters { key: "device" value { string_value: "cpu" } }
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonModel]:
    root = tmp_path_factory.mktemp("models")
    folder = root / "m" / "1"
    build_tiny_model(folder)
    shutil.copy(PLUGIN, folder / "model.py")
    (root / "m" / "config.pbtxt").write_text(CONFIG)
    with loaded(root) as models:
        yield models["m"]


async def test_the_plugin_says_what_goes_in_and_out(llm: PythonModel) -> None:
    assert llm.decoupled
    assert {"text_input", "stream", "sampling_parameters"} <= {spec.name for spec in llm.inputs}
    assert [spec.name for spec in llm.outputs][:2] == ["text_output", "output_ids"]
    assert await llm.is_ready()


async def test_a_stream_adds_up_to_the_whole_answer(llm: PythonModel) -> None:
    parameters = {"max_tokens": 8, "temperature": 0, "exclude_input_in_output": True}
    (whole,) = await answers(llm, ask(text("text_input", b"hello"), parameters=parameters))
    streamed = await answers(llm, ask(text("text_input", b"hello"), parameters={**parameters, "stream": True}))
    assert whole.final
    assert [response.final for response in streamed] == [False] * (len(streamed) - 1) + [True]
    assert len(streamed) > 1
    (output,) = whole.outputs
    assert (output.name, output.datatype) == ("text_output", Datatype.BYTES)
    assert b"".join(response.outputs[0].data[0] for response in streamed) == output.data[0]


async def test_answers_of_several_clients_overlap(llm: PythonModel) -> None:
    request = ask(text("text_input", b"hello"), parameters={"max_tokens": 4, "temperature": 0})
    first, *others = await asyncio.gather(*(answers(llm, request) for _ in range(4)))
    assert all(other[0].outputs[0].data[0] == first[0].outputs[0].data[0] for other in others)


async def test_a_wrong_request_has_triton_s_code(llm: PythonModel) -> None:
    with pytest.raises(ModelExecutionError, match="max_tokens") as caught:
        await answers(llm, ask(text("text_input", b"hello"), parameters={"max_tokens": -1}))
    assert caught.value.code is ErrorCode.INVALID_ARG


async def test_a_client_that_leaves_ends_its_answer(llm: PythonModel) -> None:
    parameters = {"max_tokens": 50, "stream": True, "ignore_eos": True}
    responses = llm.infer(ask(text("text_input", b"hello"), parameters=parameters))
    await anext(aiter(responses))
    before = llm.statistics().cancel[0]
    await responses.aclose()
    for _ in range(1000):
        if llm.statistics().cancel[0] > before:
            break
        await asyncio.sleep(0.01)
    assert llm.statistics().cancel[0] == before + 1
