"""What clients can do to the real process: none of it takes the server down, is served twice, or fills the log."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.server_process import ServerProcess

PROGRAM = (str(Path(__file__).parents[1] / "support" / "scripted_server.py"),)
BODY = json.dumps({"inputs": "Once", "parameters": {"max_new_tokens": 5}}).encode()
POST = b"POST /infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture
def server(scripted_repository: Path) -> Iterator[ServerProcess]:
    flags = ("--model-repository", str(scripted_repository), "--max-connections", "4", "--max-body-bytes", "100000")
    with ServerProcess(*flags, program=PROGRAM) as process:
        process.tell("load")
        process.wait_until_ready()
        yield process


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data and (more := connection.recv(65536)):
        data += more
    return data


def assert_quiet(server: ServerProcess) -> None:
    """Nothing but progress and what a stop says is on stderr."""
    wrong = [line for line in server.stderr if re.search(r"Traceback|ERROR|WARNING|\|", line)]
    assert not wrong, server.printed


def test_an_offer_to_upgrade_is_ignored(server: ServerProcess) -> None:
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    with connect(server) as connection:
        connection.sendall(POST.replace(b"Host", offer + b"Host") + BODY)
        while not _running(server):
            pass
        server.tell("finish")
        assert read_until(connection, b"}").startswith(b"HTTP/1.1 200 OK")
    assert_quiet(server)


def test_leaving_many_requests_behind_says_nothing_in_the_log(server: ServerProcess) -> None:
    for _ in range(3):
        with connect(server) as connection:
            connection.sendall((POST + BODY) * 1000)
            server.tell("finish")
        # The last one resets the connection instead of closing it.
        with connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall((POST + BODY) * 5)
    deadline = time.monotonic() + 20
    while _running(server) and time.monotonic() < deadline:
        server.tell("finish")
    assert _running(server) == 0
    assert_quiet(server)


def _running(server: ServerProcess) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(r"^tengserve_running_requests\{.*\} (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_kserve_routes_take_no_body_without_end(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/models/scripted:predict HTTP/1.1\r\nHost: t\r\nContent-Length: 2000000000\r\n\r\n{"
        )
        assert read_until(connection, b"}").startswith(b"HTTP/1.1 413 ")
    assert_quiet(server)


def test_a_probe_gets_through_when_every_connection_is_taken(server: ServerProcess) -> None:
    taken = [connect(server) for _ in range(4)]
    for connection in taken:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: t\r\n\r\n")
        assert read_until(connection, b"}").startswith(b"HTTP/1.1 200 ")
    assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
    refused = httpx.post(f"{server.url}/infer", content=BODY)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    for connection in taken:
        connection.close()


def test_a_body_that_arrives_while_the_server_stops(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(POST + BODY[:5])
        with connect(server) as other:
            other.sendall(b"GET /v2 HTTP/1.1\r\nHost: t\r\n\r\n")
            read_until(other, b"}")
        server.signal(signal.SIGTERM)
        answer = read_until(connection, b"}")
    assert answer.startswith(b"HTTP/1.1 503 "), answer
    assert b"retry-after: " in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error_type"] == "Service Unavailable"
    assert server.wait() == 0
    assert_quiet(server)
