"""Chat templates of real tokenizer folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_model import BOS_TOKEN, write_tiny_tokenizer
from tengserve_backend.errors import InvalidRequestError
from tengserve_backend.text import chat_template
from tengserve_backend.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}"
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'critic' %}{{ raise_exception('role critic is not known') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def with_template(directory: Path, template: str) -> Tokenizer:
    return load_tokenizer(write_tiny_tokenizer(directory, chat_template=template))


def test_messages_become_the_text_that_the_template_says(tokenizer):
    assert tokenizer.render_chat(MESSAGES) == f"{BOS_TOKEN}<system>Be brief.\n<user>你好\n<assistant>"
    assert tokenizer.render_chat(MESSAGES[1:], add_generation_prompt=False) == f"{BOS_TOKEN}<user>你好\n"


def test_tools_reach_the_template(tokenizer):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert tokenizer.render_chat(MESSAGES[1:], tools=tools).startswith(f"{BOS_TOKEN}[tool weather]<user>")


def test_the_template_may_be_in_tokenizer_config_or_in_a_file_of_its_own(folder, tmp_path, tokenizer):
    import json
    import shutil

    assert (folder / "chat_template.jinja").exists()
    other = tmp_path / "config"
    shutil.copytree(folder, other)
    (other / "chat_template.jinja").unlink()
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    assert load_tokenizer(other).render_chat(MESSAGES) == tokenizer.render_chat(MESSAGES)


def test_a_rendered_chat_is_encoded_with_one_bos(tokenizer):
    (bos,) = tokenizer.encode(BOS_TOKEN, add_special_tokens=False)
    ids = tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False)
    assert ids.count(bos) == 1
    assert tokenizer.encode("hi") == [bos, *tokenizer.encode("hi", add_special_tokens=False)]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (TEMPLATE, [{"role": "critic", "content": ""}], "refuses the messages: role critic is not known"),
        (TEMPLATE, [], "at least one message"),
        ("{{ messages[0].content.nothing.more }}", MESSAGES, "refuses the messages: .* has no attribute"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "refuses the messages: access to attribute '__class__'.*unsafe"),
        ("{% for x in messages %}", MESSAGES, "refuses the messages: Unexpected end of template"),
        ("{{ raise_exception('x' * 100000) }}", MESSAGES, "x{200}"),
        ("{{ raise_exception('see /secret/place/file.txt') }}", MESSAGES, r"see \.\.\.$"),
        ("{% for x in range(1000000000) %}{% endfor %}", MESSAGES, "refuses the messages: Range too big"),
        ("", MESSAGES, "no chat template"),
    ],
)
def test_what_the_template_refuses_is_the_fault_of_the_messages(tmp_path, template, messages, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        with_template(tmp_path, template).render_chat(messages)
    assert caught.value.field == "messages"
    assert len(caught.value.message) < 400


def test_a_template_cannot_change_the_messages(tmp_path):
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(InvalidRequestError):
        with_template(tmp_path, "{{ messages[0].content.append('b') }}").render_chat(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


def test_the_rendered_text_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 50)
    with pytest.raises(InvalidRequestError, match="at most 50 characters of prompt, they make 2"):
        tokenizer.render_chat([{"role": "user", "content": "x" * 200}])
