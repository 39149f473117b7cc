"""gRPC of the real process: its life, and an LLM asked over it."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from support.grpc_client import Calls, Message, calls_to, infer_request
from support.server_process import ServerProcess, run_cli
from support.triton_process import run_client
from tengserve_adapter.grpc.schema import HEALTH
from tengserve_adapter.grpc.settings import TlsFiles
from tengserve_adapter.settings import ServerSettings
from tengserve_backend.errors import ConfigurationError

PROGRAM = (str(Path(__file__).parents[1] / "support" / "scripted_server.py"),)
WAIT_S = 30.0


@contextmanager
def ready(repository: Path, *flags: str) -> Iterator[ServerProcess]:
    with ServerProcess("--model-repository", str(repository), *flags, program=PROGRAM) as server:
        server.tell("load")
        server.wait_until_ready()
        yield server


@pytest.fixture
async def calls(tiny_server: ServerProcess) -> AsyncIterator[Calls]:
    async with calls_to(tiny_server.grpc_address) as calls:
        yield calls


def prompt(model: str, request_id: str, text: str = "Once", **parameters: dict[str, object]) -> Message:
    request = infer_request(model, request_id, parameters=parameters)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return request


def text_of(response: Message) -> str:
    (raw,) = response.raw_output_contents
    return str(raw[4:].decode())


async def test_ready_only_when_loaded(scripted_repository: Path) -> None:
    with ServerProcess("--model-repository", str(scripted_repository), program=PROGRAM) as server:
        server.wait_for(re.compile("waiting for the script"), "stderr")
        async with calls_to(server.grpc_address) as calls:
            assert (await calls.call("ServerLive")).live is True
            assert (await calls.call("ServerReady")).ready is False
            assert (await calls.call("ModelReady", name="scripted")).ready is False
            assert (await calls.call("Check", HEALTH)).status == 2
            server.tell("load")
            server.wait_until_ready()
            assert (await calls.call("ServerReady")).ready is True
            assert (await calls.call("ModelReady", name="scripted")).ready is True
            assert (await calls.call("Check", HEALTH)).status == 1


async def test_the_server_has_the_name_it_was_given(scripted_repository: Path) -> None:
    with ready(scripted_repository, "--server-name", "triton") as server:
        async with calls_to(server.grpc_address) as calls:
            assert (await calls.call("ServerMetadata")).name == "triton"
        over_http = await asyncio.to_thread(httpx.get, f"{server.url}/v2", timeout=WAIT_S)
        assert over_http.json()["name"] == "triton"


async def test_a_stop_lets_streams_finish_and_takes_nothing_new(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server:
        async with calls_to(server.grpc_address) as calls:
            stream, idle = calls.stream(), calls.stream()
            await idle.write(prompt("nobody", "x"))
            assert (await idle.read()).error_message
            streaming = {"stream": {"bool_param": True}, "max_tokens": {"int64_param": 100}}
            await stream.write(prompt("scripted", "a", **streaming))
            assert text_of((await stream.read()).infer_response) == "t1 "

            server.signal(signal.SIGTERM)
            server.wait_for(re.compile("1 answer may take up to"), "stderr")
            assert (await calls.call("ServerLive")).live is True
            assert (await calls.call("ServerReady")).ready is False
            await stream.write(prompt("scripted", "b"))
            refused = await stream.read()
            assert refused.infer_response.id == "b"
            assert "is stopping" in refused.error_message

            server.tell("finish")
            last = (await stream.read()).infer_response
            assert (last.id, last.parameters["triton_final_response"].bool_param) == ("a", True)
            assert text_of(last) == "t2 "
            for each in (stream, idle):
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await each.read()
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait() == 0


async def test_a_client_that_leaves_ends_its_generation(scripted_repository: Path) -> None:
    with ready(scripted_repository) as server:
        async with calls_to(server.grpc_address) as calls:
            call = calls.unary("ModelInfer")(prompt("scripted", "a"))
            stream = calls.stream()
            await stream.write(prompt("scripted", "b", stream={"bool_param": True}))
            await stream.read()
            call.cancel()
            stream.cancel()
            # A drain waits for running generations, and there is none left.
            await asyncio.to_thread(_wait_until_idle, server.url)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def _wait_until_idle(url: str) -> None:
    running = re.compile(r"^tengserve_running_requests\{[^}]*\} (\S+)$", re.MULTILINE)
    with httpx.Client(timeout=WAIT_S) as client:
        while any(float(value) for value in running.findall(client.get(f"{url}/metrics").text)):
            pass


async def test_an_llm_answers_the_same_over_every_way(tiny_server: ServerProcess, calls: Calls) -> None:
    greedy = {"max_tokens": {"int64_param": 8}, "temperature": {"double_param": 0.0}}
    whole = await calls.send("ModelInfer", prompt("tiny", "a", exclude_input_in_output={"bool_param": True}, **greedy))
    stream = calls.stream()
    await stream.write(prompt("tiny", "b", stream={"bool_param": True}, **greedy))
    await stream.done_writing()
    pieces = [response.infer_response async for response in stream]
    assert "".join(map(text_of, pieces)) == text_of(whole)
    flags = [piece.parameters["triton_final_response"].bool_param for piece in pieces]
    assert flags == [False] * (len(flags) - 1) + [True]
    body = {"text_input": "Once", "parameters": {"max_new_tokens": 8}}
    url = f"{tiny_server.url}/v2/models/tiny/generate"
    answer = await asyncio.to_thread(httpx.post, url, json=body, timeout=WAIT_S)
    assert answer.json()["text_output"] == text_of(whole)


@pytest.mark.parametrize("way", ["stream cancelled", "call cancelled", "connection lost"])
async def test_an_llm_stops_for_a_client_that_has_left(tiny_server: ServerProcess, way: str) -> None:
    before = await asyncio.to_thread(_when_idle, tiny_server.url)
    long = {"max_tokens": {"int64_param": 900}, "ignore_eos": {"bool_param": True}}
    streaming = {"stream": {"bool_param": True}, **long}
    async with calls_to(tiny_server.grpc_address) as calls:
        if way == "call cancelled":
            call = calls.unary("ModelInfer")(prompt("tiny", "a", **long))
            await asyncio.to_thread(_wait_for_more, tiny_server.url, "generated_tokens_total", before)
            call.cancel()
        else:
            stream = calls.stream()
            for request_id in ("a", "b"):
                await stream.write(prompt("tiny", request_id, **streaming))
            seen: set[str] = set()
            while len(seen) < 2:
                seen.add((await stream.read()).infer_response.id)
            if way == "stream cancelled":
                stream.cancel()
    after = await asyncio.to_thread(_when_idle, tiny_server.url)
    aborted = 1 if way == "call cancelled" else 2
    assert after["aborted_requests_total"] - before["aborted_requests_total"] == aborted
    assert after["generated_tokens_total"] - before["generated_tokens_total"] < aborted * 900
    assert after["kv_cache_free_blocks"] + after["kv_cache_idle_blocks"] == after["kv_cache_blocks"]


def _metrics(url: str) -> dict[str, float]:
    """The values of the model "tiny" by name."""
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    found = re.findall(r'^tengserve_(\w+)\{model="tiny",version="1"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def _when_idle(url: str) -> dict[str, float]:
    while (now := _metrics(url))["running_requests"] or now["waiting_requests"]:
        pass
    return now


def _wait_for_more(url: str, name: str, before: dict[str, float]) -> None:
    while _metrics(url)[name] == before[name]:
        pass


async def test_what_is_known_of_an_llm(calls: Calls) -> None:
    metadata = await calls.call("ModelMetadata", name="tiny")
    assert (metadata.name, metadata.platform, list(metadata.versions)) == ("tiny", "tengserve", ["1"])
    assert "text_input" in [each.name for each in metadata.inputs]
    config = (await calls.call("ModelConfig", name="tiny")).config
    assert (config.name, config.backend) == ("tiny", "tengserve")
    (row,) = (await calls.call("ModelStatistics", name="tiny")).model_stats
    assert (row.name, row.version) == ("tiny", "1")
    assert [(row.name, row.state) for row in (await calls.call("RepositoryIndex")).models] == [("tiny", "READY")]


@pytest.mark.parametrize("kind", ["llm", "llm-aio"])
async def test_tritonclient_with_an_llm(tiny_server: ServerProcess, kind: str) -> None:
    assert await run_client(kind, tiny_server.grpc_address) == ""


def test_grpc_can_be_switched_off(scripted_repository: Path) -> None:
    with ready(scripted_repository, "--no-grpc") as server:
        assert not any("gRPC" in line for line in server.stdout)
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200


def test_a_taken_port_is_told_at_once(scripted_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--model-repository", str(scripted_repository), "--http-port", "0", "--grpc-port", port)
        result = run_cli("serve", *flags)
    assert result.returncode == 1
    assert result.stderr == (
        f"tengserve: error: cannot listen on 127.0.0.1 port {port}: Address already in use"
        " (gRPC, see --grpc-port and --no-grpc)\n"
    )


async def test_tls(scripted_repository: Path, tls_files: TlsFiles) -> None:
    flags = ("--grpc-tls-cert", str(tls_files.certificate), "--grpc-tls-key", str(tls_files.key))
    credentials = grpc.ssl_channel_credentials(tls_files.certificate.read_bytes())
    with ready(scripted_repository, *flags) as server:
        async with grpc.aio.secure_channel(server.grpc_address, credentials) as channel:
            assert (await Calls(channel).call("ServerReady")).ready is True
        async with calls_to(server.grpc_address) as calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await calls.call("ServerReady")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_wrong_tls_files_are_told(scripted_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    tls = ("--grpc-tls-cert", str(tmp_path / "cert.pem"), "--grpc-tls-key", str(tmp_path / "cert.pem"))
    flags = ("--model-repository", str(scripted_repository), "--http-port", "0", "--grpc-port", "0")
    result = run_cli("serve", *flags, *tls)
    assert result.returncode == 2
    assert result.stderr.startswith("tengserve: error: the TLS certificate and key of gRPC cannot be used: ")
    assert result.stderr.count("\n") == 1


def test_certificate_and_key_belong_together() -> None:
    with pytest.raises(ConfigurationError, match="--grpc-tls-cert and --grpc-tls-key must be given together"):
        ServerSettings(model_repository=Path("models"), grpc_tls_cert=Path("cert.pem"))
