"""The pages under docs/protocols tell every field and every error, and their curl commands are right requests."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine
from tengserve_adapter.http.errors import REPLIES
from tengserve_adapter.http.triton_errors import STATUSES
from tengserve_backend.generation import triton
from tengserve_backend.generation.fields import Dialect, fields_of

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def pages(script: str = "_docs_protocols") -> dict[str, str]:
    spec = importlib.util.spec_from_file_location(script, SCRIPTS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rendered: dict[str, str] = module.render()
    return rendered


def test_every_field_has_its_row() -> None:
    for dialect, page in ((Dialect.NATIVE, "mindie"), (Dialect.GENERATE, "generate")):
        text = pages()[f"docs/protocols/{page}.md"]
        assert "@" not in text
        for field, rule in fields_of(dialect):
            assert re.search(rf"^\| `{field.name}` \|.*\| {re.escape(rule.source)} \|$", text, re.MULTILINE), field.name


def test_every_status_is_told() -> None:
    text = pages()["docs/protocols/errors.md"]
    for reply in REPLIES.values():
        assert f"| {reply.status} | {reply.error_type} |" in text


async def test_the_curl_commands_work() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        for page in ("mindie", "generate"):
            text = pages()[f"docs/protocols/{page}.md"].replace("\\\n ", "")
            url, body = re.findall(r"curl http://[^/]+(\S+) +-d '(.*)'", text)[0]
            response = await client.post(url, json=json.loads(body))
            assert response.status_code == 200


def test_the_v2_page_tells_every_field_and_status() -> None:
    text = pages("_docs_v2")["docs/protocols/v2.md"]
    assert "@" not in text
    for field in triton.FIELDS:
        assert re.search(rf"^\| `{field.name}` \|.*\| {field.source} \|$", text, re.MULTILINE), field.name
    for status in STATUSES.values():
        assert f"| {status} | " in text


async def test_the_curl_command_of_the_v2_page_works() -> None:
    text = pages("_docs_v2")["docs/protocols/v2.md"].replace("\\\n ", "")
    url, body = re.findall(r"curl http://[^/]+(\S+) +-d '(.*)'", text)[0]
    async with client_of(app_with(FakeEngine())) as client:
        response = await client.post(url, content=body)
        assert response.status_code == 200
