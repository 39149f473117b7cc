"""A real server process on the simulated NPU, watched and broken from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from npu_sim.simulator.state import SharedState, State
from support.model_folders import add_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model

PROMPTS = ["Once upon a time", "def add(left, right):", "A", "The scheduler hands out tokens: one to each. " * 4]
EXACT = {"dtype": "float32", "attention": "portable", "npuFusions": "none"}
WAIT_S = 120.0

pytestmark = pytest.mark.timeout(600)  # a server starts in seconds, or in a minute where every core is taken


@dataclass(frozen=True)
class Served:
    server: ServerProcess
    npu: State

    def answer(self, model: str, prompt: str, count: int = 12) -> str:
        body = {"text_input": prompt, "parameters": {"max_new_tokens": count, "ignore_eos": True}}
        response = httpx.post(f"{self.server.url}/v2/models/{model}/generate", json=body, timeout=WAIT_S)
        assert response.status_code == 200, response.text
        return str(response.json()["text_output"])

    @contextmanager
    def stream(self, model: str, prompt: str, count: int) -> Iterator[Iterator[dict[str, object]]]:
        body = {"text_input": prompt, "parameters": {"max_new_tokens": count, "ignore_eos": True}}
        url = f"{self.server.url}/v2/models/{model}/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            assert response.status_code == 200
            yield (json.loads(line.removeprefix("data:")) for line in response.iter_lines() if line.startswith("data:"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: "exact" computes what a CPU does, "fused" has a head dimension that the fused attention takes."""
    folder = tmp_path_factory.mktemp("repository")
    build_tiny_model(add_model(folder, "exact", parameters=EXACT))
    build_tiny_model(add_model(folder, "fused", parameters={"dtype": "float16"}), config_overrides={"head_dim": 64})
    return folder


@contextmanager
def serving(repository: Path, folder: Path, **variables: str) -> Iterator[Served]:
    """A server on a simulated machine of its own, ready."""
    shared = SharedState(folder / "state")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (shared.environment | variables).items():
            patch.setenv(name, value)
        flags = ("--model-repository", str(repository), "--device", "npu", "--default-model", "exact")
        with ServerProcess(*flags) as server:
            server.wait_until_ready()
            yield Served(server, shared.state)


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that tests leave as they found it."""
    with serving(repository, tmp_path_factory.mktemp("machine")) as started:
        yield started


@pytest.fixture(scope="module")
def expected(repository: Path) -> dict[str, str]:
    """What plain transformers answers on the host."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = repository / "exact" / "1"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=0,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=-1,
        )
        texts[prompt] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return texts


def test_answers_are_those_of_the_host(served: Served, expected: dict[str, str]) -> None:
    assert {prompt: served.answer("exact", prompt) for prompt in PROMPTS} == expected


def test_a_stream_is_the_same_text(served: Served, expected: dict[str, str]) -> None:
    with served.stream("exact", PROMPTS[0], 12) as events:
        assert "".join(str(event["text_output"]) for event in events) == expected[PROMPTS[0]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_mindie_clients_get_the_same_text(served: Served, expected: dict[str, str], stream: bool) -> None:
    parameters = {"max_new_tokens": 12, "ignore_eos": True}
    body = {"inputs": PROMPTS[1], "stream": stream, "parameters": parameters}
    response = httpx.post(f"{served.server.url}/infer", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    events = [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line]
    assert len(events) == (12 if stream else 1)
    assert events[-1]["generated_text"] == expected[PROMPTS[1]]


@pytest.mark.parametrize("model", ["exact", "fused"])
def test_eight_at_once_answer_as_each_alone(served: Served, model: str) -> None:
    alone = {prompt: served.answer(model, prompt) for prompt in PROMPTS}
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: (prompt, served.answer(model, prompt)), PROMPTS * 2))
    assert answers == [(prompt, alone[prompt]) for prompt in PROMPTS * 2]


def test_each_model_has_its_attention(served: Served) -> None:
    log = served.server.printed
    assert re.search("model exact .* attention portable", log)
    assert re.search("model fused .* attention npu-fused", log)


@pytest.mark.parametrize("model", ["exact", "fused"])
def test_a_token_costs_one_copy_up_and_one_read_down(served: Served, model: str) -> None:
    served.answer(model, PROMPTS[0])
    served.npu.reset_counters()
    served.answer(model, PROMPTS[0], count=16)
    assert (served.npu.host_to_device, served.npu.device_to_host) == (16, 16)
    assert (served.npu.fallbacks, served.npu.last_fallback) == (0, b"")
    assert (served.npu.stub_calls, served.npu.last_stub) == (0, b"")


@pytest.mark.parametrize(("soc", "attention"), [("Ascend910_9392", "npu-fused"), ("Ascend310P3", "portable")])
def test_other_chips_serve_both_models(
    repository: Path, tmp_path: Path, expected: dict[str, str], soc: str, attention: str
) -> None:
    with serving(repository, tmp_path, NPU_SIM_SOC=soc) as served:
        assert served.answer("exact", PROMPTS[0]) == expected[PROMPTS[0]]
        assert served.answer("fused", PROMPTS[0])
        assert re.search(f"model fused .* attention {attention}", served.server.printed)
        assert served.npu.fallbacks == 0


def test_a_lost_device_ends_the_stream_and_the_process(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path) as served:
        with served.stream("exact", PROMPTS[0], 500) as events:
            next(events)
            served.npu.break_device(507015)
            *_, last = events
        assert "error" in last, last
        assert served.server.wait() != 0
        assert "507015" in served.server.printed


def test_a_device_that_is_lost_before_a_model_is_on_it_ends_the_process(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedState(tmp_path / "state")
    for name, value in shared.environment.items():
        monkeypatch.setenv(name, value)
    flags = ("--model-repository", str(repository), "--device", "npu", "--model-control-mode", "explicit")
    with ServerProcess(*flags, "--load-model", "exact") as server:
        server.wait_until_ready()
        httpx.post(f"{server.url}/v2/repository/models/exact/unload", timeout=WAIT_S).raise_for_status()
        shared.state.break_device(507015)
        load = httpx.post(f"{server.url}/v2/repository/models/exact/load", timeout=WAIT_S)
        assert "The device npu:0 failed." in load.text
        assert server.wait() == 3
    assert "NPU error 507015" in server.printed


def test_without_cann_the_cpu_serves_and_the_npu_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_SIM")
    flags = ("--model-repository", str(repository), "--device")
    with ServerProcess(*flags, "cpu") as server:
        server.wait_until_ready()
    with ServerProcess(*flags, "npu") as server:
        assert server.wait() != 0
    assert re.match("tengserve: error: --device is 'npu', but .* CANN .*set_env.sh", server.stderr[-1])
    # One sentence, once.
    assert server.printed.count("set_env.sh") == 1
    assert "Traceback" not in server.printed
