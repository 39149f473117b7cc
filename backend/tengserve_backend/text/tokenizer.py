"""The model's own tokenizer, reduced to what a server needs and safe to call from several threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer itself adds; no chat template."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD; ids unknown to the tokenizer leave no trace."""
        ...


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    It is called directly: transformers' wrapper sets truncation and padding on the shared object at every call,
    which is not safe beside another thread. Encoding and decoding themselves only read.
    """

    def __init__(self, backend: Any) -> None:
        # A tokenizer.json may carry truncation or padding; a server refuses long prompts, it never cuts them.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Tokenizer."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class SlowTokenizer:
    """A tokenizer that exists in Python only."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Tokenizer."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def load_tokenizer(weights_dir: Path) -> Tokenizer:
    """The tokenizer in a folder of Hugging Face files; nothing is fetched and no code of the folder runs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights_dir, local_files_only=True, trust_remote_code=False)
    if tokenizer.is_fast:
        return FastTokenizer(tokenizer.backend_tokenizer)
    return SlowTokenizer(tokenizer)
