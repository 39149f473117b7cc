"""Model control over HTTP: bodies, answers and refusals, over a repository that remembers what it was told."""

from __future__ import annotations

import base64
import json

import httpx
import pytest

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine
from support.tensor_models import PlainControl
from tengserve_adapter.http.settings import HttpSettings


async def ask(
    method: str, path: str, body: object = b"", *, control: PlainControl | None = None, **headers: str
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client_of(app_with(FakeEngine(), control=control, settings=HttpSettings(max_body_bytes=4096))) as client:
        return await client.request(method, path, content=content, headers=headers)


@pytest.mark.parametrize("body", [b"", {}, {"ready": False}])
async def test_the_index_is_an_array_that_leaves_out_what_is_not_known(body):
    response = await ask("POST", "/v2/repository/index", body)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == [
        {"name": "simple", "version": "1", "state": "READY"},
        {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no weights"},
        {"name": "new"},
    ]


async def test_the_index_of_ready_models():
    response = await ask("POST", "/v2/repository/index", {"ready": True})
    assert response.json() == [{"name": "simple", "version": "1", "state": "READY"}]


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded", "nonsense"])
async def test_a_load_with_a_configuration_and_files(content_type):
    control = PlainControl()
    parameters = {"config": '{"backend": "python"}', "file:1/model.py": base64.b64encode(b"\0code").decode()}
    body = {"parameters": parameters}
    headers = {"content-type": content_type}
    response = await ask("POST", "/v2/repository/models/a%20b/load", body, control=control, **headers)
    assert (response.status_code, response.content) == (200, b"")
    assert control.told == [("load", "a b", {"backend": "python"}, {"1/model.py": b"\0code"})]


async def test_a_load_and_an_unload_without_a_body():
    control = PlainControl()
    for verb in ("load", "unload"):
        response = await ask("POST", f"/v2/repository/models/m/{verb}", control=control)
        assert (response.status_code, response.content) == (200, b"")
    body = {"parameters": {"unload_dependents": True, "other": 1}}
    await ask("POST", "/v2/repository/models/m/unload", body, control=control)
    assert control.told == [("load", "m", None, {}), ("unload", "m", False), ("unload", "m", True)]


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("index", {"ready": "yes"}, 400, "'ready' must be true or false, got yes"),
        ("index", b"{", 400, "Failed to parse request context to json"),
        ("index", [], 400, "The body must be a JSON object, got an array."),
        ("models/m/load", {"parameters": []}, 400, "'parameters' must be an object, got []"),
        ("models/m/load", {"parameters": {"config": {}}}, 400, "parameter 'config' must be a string, got {}"),
        ("models/m/load", {"parameters": {"file:1/x": "%%"}}, 400, "parameter 'file:1/x' must be base64"),
        ("models/m/load", {"parameters": {"x": "1"}}, 400, "unrecognized config parameter 'x'"),
        (
            "models/m/load",
            b'{"parameters": {"config": "\\ud800"}}',
            400,
            "Failed to parse request context to json: a lone",
        ),
        ("models/missing/load", b"", 404, "failed to load 'missing', failed to poll from model repository"),
        ("models/m/unload", {"parameters": {"unload_dependents": 1}}, 400, "'unload_dependents' must be true or false"),
        ("models/m/load", b" " * 5000, 413, "Request body too large. At most 4096 bytes are allowed."),
        ("other/index", b"", 501, "'repository_name' specification is not supported"),
        ("other/models/m/load", b"", 501, "'repository_name' specification is not supported"),
    ],
)
async def test_refusals_have_one_shape(path, body, status, error):
    response = await ask("POST", f"/v2/repository/{path}", body)
    assert list(response.json()) == ["error"]
    assert response.json()["error"].startswith(error)
    assert response.status_code == (400 if status == 413 else status)


@pytest.mark.parametrize("path", ["config", "versions/1/config"])
async def test_configuration(path):
    response = await ask("GET", f"/v2/models/simple/{path}")
    assert response.json()["max_batch_size"] == 8
    response = await ask("GET", f"/v2/models/nobody/{path}")
    assert (response.status_code, list(response.json())) == (404, ["error"])


@pytest.mark.parametrize("path", ["stats", "simple/stats", "simple/versions/1/stats"])
async def test_statistics(path):
    response = await ask("GET", f"/v2/models/{path}")
    (row,) = response.json()["model_stats"]
    assert (row["name"], row["inference_count"], row["inference_stats"]["queue"]) == (
        "simple",
        6,
        {"count": 3, "ns": 5},
    )


async def test_statistics_of_a_model_that_is_not_there():
    response = await ask("GET", "/v2/models/nobody/stats")
    assert response.status_code == 400
    assert response.json() == {"error": "requested model 'nobody' is not available"}


async def test_log_settings():
    control = PlainControl()
    assert (await ask("GET", "/v2/logging", control=control)).json()["log_info"] is True
    changed = await ask("POST", "/v2/logging", {"log_info": False, "log_verbose_level": 1}, control=control)
    assert (changed.json()["log_info"], changed.json()["log_verbose_level"]) == (False, 1)
    response = await ask("POST", "/v2/logging", {"log_info": [True]})
    assert response.status_code == 400
    assert response.json()["error"].startswith("log setting 'log_info' must be")


@pytest.mark.parametrize("path", ["/v2/trace/setting", "/v2/models/simple/trace/setting"])
async def test_trace_settings(path):
    control = PlainControl()
    assert (await ask("GET", path, control=control)).json() == {"trace_level": ["OFF"], "trace_rate": "1000"}
    changed = await ask("POST", path, {"trace_rate": "5", "trace_level": ["A", "B"]}, control=control)
    assert changed.json() == {"trace_level": ["A", "B"], "trace_rate": "5"}
    cleared = await ask("POST", path, {"trace_rate": None}, control=control)
    assert cleared.json()["trace_rate"] == "default"
    response = await ask("POST", path, {"trace_rate": 5})
    assert (response.status_code, list(response.json())) == (400, ["error"])


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_shared_memory_is_refused_in_words(kind):
    base = f"/v2/{kind}sharedmemory"
    assert (await ask("GET", f"{base}/status")).json() == []
    response = await ask("GET", f"{base}/region/r/status")
    assert (response.status_code, response.json()) == (404, {"error": "Unable to find shared memory region: 'r'"})
    response = await ask("POST", f"{base}/region/r/register", {"key": "k", "offset": 0, "byte_size": 1})
    assert response.status_code == 501
    assert "no shared memory" in response.json()["error"]
    for path in (f"{base}/unregister", f"{base}/region/r/unregister"):
        response = await ask("POST", path)
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/repository/index"),
        ("GET", "/v2/repository/models/m/load"),
        ("POST", "/v2/models/m/config"),
        ("POST", "/v2/models/stats"),
        ("DELETE", "/v2/logging"),
    ],
)
async def test_another_method_is_not_allowed(method, path):
    response = await ask(method, path)
    assert response.status_code == 405
    assert isinstance(response.json()["error"], str)
