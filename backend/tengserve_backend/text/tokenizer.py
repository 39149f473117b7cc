"""The model's own tokenizer, reduced to what a server needs and safe to call from several threads."""

from __future__ import annotations

import json
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

    def fewest_tokens(self, text: str) -> int:
        """A number that the text surely has no fewer tokens than; cheap, where encoding is not. 0 when unknown."""
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
        self._longest_token = longest_token_bytes(json.loads(backend.to_str()))
        self.render_chat = chat.render

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See Tokenizer."""
        # Not `encode`: that holds the GIL for as long as it takes, seconds for a long text, while a batch does not.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """See Tokenizer."""
        return 0 if self._longest_token is None else len(text) // self._longest_token

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

    def fewest_tokens(self, text: str) -> int:
        """See Tokenizer."""
        return 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Tokenizer."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def longest_token_bytes(description: Mapping[str, Any]) -> int | None:
    """Bytes of the longest token, where no text can have fewer tokens than its bytes over this.

    That holds for byte-level BPE, which drops nothing: no normalizer, no pre-tokenizer that removes text, no added
    token that swallows the spaces around it. None for every other kind.

    Args:
        description: a tokenizer.json.
    """
    if description["normalizer"] is not None or description["model"]["type"] != "BPE":
        return None
    steps = description["pre_tokenizer"] or {}
    kinds = steps.get("pretokenizers", [steps])
    if not any(step.get("type") == "ByteLevel" for step in kinds):
        return None
    if any(step.get("type") not in ("ByteLevel", "Digits", "Split") for step in kinds):
        return None
    if any(step.get("behavior") == "Removed" for step in kinds):
        return None
    added = description["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    texts = [*description["model"]["vocab"], *(token["content"] for token in added)]
    return max(len(text.encode()) for text in texts)


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
        elif "instantiate the backend tokenizer" in str(error):
            # What transformers says goes on over lines, and none of them says which file is missing.
            hint = "the tokenizer files in the model's folder do not make one; tokenizer.json is wanted"
        raise ConfigurationError(
            f"the model's tokenizer cannot be loaded: {hint or foreign_reason(error, folder)}"
        ) from error
    chat = ChatTemplate(tokenizer, folder)
    if tokenizer.is_fast:
        return FastTokenizer(tokenizer.backend_tokenizer, chat)
    return SlowTokenizer(tokenizer, chat)
