"""The model's own tokenizer, reduced to what a server needs and safe to call from several threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tengserve_backend.errors import ConfigurationError, foreign_reason
from tengserve_backend.text.chat_template import ChatTemplate


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: the text; names of special tokens in it become these tokens.
            add_special_tokens: also the tokens that the tokenizer itself adds, such as BOS. A rendered chat has them.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD; ids unknown to the tokenizer leave no trace."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """See ChatTemplate.render."""
        ...


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    It is called directly: transformers' wrapper sets truncation and padding on the shared object at every call,
    which is not safe beside another thread. Encoding and decoding themselves only read.

    Args:
        backend: of `tokenizers`.
        chat: the model's chat template.
    """

    def __init__(self, backend: Any, chat: ChatTemplate) -> None:
        # A tokenizer.json may carry truncation or padding; a server refuses long prompts, it never cuts them.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.render_chat = chat.render

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Tokenizer."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class SlowTokenizer:
    """A tokenizer that exists in Python only.

    Args:
        tokenizer: of transformers.
        chat: the model's chat template.
    """

    def __init__(self, tokenizer: Any, chat: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self.render_chat = chat.render

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Tokenizer."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def load_tokenizer(weights_dir: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in a folder of Hugging Face files; nothing is fetched.

    Args:
        weights_dir: the folder.
        trust_remote_code: whether Python code in the folder may run.

    Raises:
        ConfigurationError: there is none that can be used.
    """
    from transformers import AutoTokenizer

    folder = str(weights_dir)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            weights_dir, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever the files make transformers raise, the folder is at fault
        hint = ""
        if not trust_remote_code and "trust_remote_code" in str(error):
            hint = "it needs the Python code in the model's folder, which runs only when trustRemoteCode is true"
        raise ConfigurationError(
            f"the model's tokenizer cannot be loaded: {hint or foreign_reason(error, folder)}"
        ) from error
    chat = ChatTemplate(tokenizer, folder)
    if tokenizer.is_fast:
        return FastTokenizer(tokenizer.backend_tokenizer, chat)
    return SlowTokenizer(tokenizer, chat)
