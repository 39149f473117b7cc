"""The model's own chat template: from the messages of a conversation to the text that the model was trained on.

transformers renders it in jinja's immutable sandbox: a template can neither reach attributes of Python objects nor
change what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tengserve_backend.errors import InvalidRequestError, foreign_reason

MAX_RENDERED_CHARS = 4194304
"""Characters of a rendered conversation: those of the longest text that any dialect takes."""


class ChatTemplate:
    """The template in a tokenizer's files. Rendering is safe from several threads.

    Args:
        tokenizer: of transformers; it finds the template in tokenizer_config.json or chat_template.jinja.
        folder: the model's folder, which no message may name.
    """

    def __init__(self, tokenizer: Any, folder: str) -> None:
        self._tokenizer = tokenizer
        self._folder = folder

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation. It has the special tokens in it, so it is encoded without adding any.

        Args:
            messages: each with role, content and whatever else the template knows; JSON values only.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with the beginning of the assistant's next message.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages; the field is "messages".
        """
        if not messages:
            raise InvalidRequestError("messages must have at least one message, got none.", field="messages")
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "This model has no chat template, so it takes a prompt and no messages.", field="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is foreign code, and what it raises is up to it
            raise InvalidRequestError(
                f"This model's chat template refuses the messages: {foreign_reason(error, self._folder)}",
                field="messages",
            ) from error
        if len(text) > MAX_RENDERED_CHARS:
            raise InvalidRequestError(
                f"The messages must make at most {MAX_RENDERED_CHARS} characters of prompt, they make {len(text)}.",
                field="messages",
            )
        return str(text)
