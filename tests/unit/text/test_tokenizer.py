"""The wrapped tokenizer: what it never does to others, and its bound on lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support.tiny_model import build_tiny_model
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.text.tokenizer import FastTokenizer, load_tokenizer, longest_token_bytes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    loaded = load_tokenizer(build_tiny_model(tmp_path_factory.mktemp("model")))
    assert isinstance(loaded, FastTokenizer)
    return loaded


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: FastTokenizer, text: str) -> None:
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_files_that_make_no_tokenizer_are_refused_with_what_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"do not make one; tokenizer\.json is wanted$"):
        load_tokenizer(tmp_path)


def test_the_bound_is_worth_something(tokenizer: FastTokenizer) -> None:
    assert tokenizer.fewest_tokens("a" * 4_000_000) > 100_000


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "aa": 1, "aaa": 2}, [("a", "a"), ("aa", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bound(tokenizer: Tokenizer) -> int | None:
    return longest_token_bytes(json.loads(tokenizer.to_str()))


def test_only_tokenizers_that_drop_nothing_have_a_bound() -> None:
    assert bound(byte_level()) == 3
    normalizing = byte_level()
    normalizing.normalizer = normalizers.Strip()
    assert bound(normalizing) is None
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), removing.pre_tokenizer])
    assert bound(removing) is None
    swallowing = byte_level()
    swallowing.add_special_tokens([AddedToken("<|end|>", lstrip=True)])
    assert bound(swallowing) is None
    assert bound(Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))) is None  # no password
