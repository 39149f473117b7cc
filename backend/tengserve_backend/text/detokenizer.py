"""Token ids to text, one token at a time, never half a character.

Decoding an id alone is wrong: a character may span tokens, and some tokenizers put a space before a word only when
something precedes it. So a short window is decoded twice: the tokens that produced the last text (the context), and
those with the new tokens after them; what the second adds is the new text. The window moves on whenever the text
ends with a whole character, so each token is decoded a bounded number of times: linear in the length of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character is at most four bytes, so at most four byte tokens. More tokens than that without a whole character are
# bytes that will never be one.
_MAX_CHARACTER_TOKENS = 4
# At most three bytes at the end may still become a character; decoders show them as one to three U+FFFD.
_MAX_OPEN_BYTES = 3
# Broken bytes without end may not make the window grow without end.
_MAX_WINDOW = 32


class IncrementalDetokenizer:
    """The text of a growing list of token ids.

    Args:
        decode: text of a list of ids; undecodable bytes as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # leading tokens of the window whose text has been given out in full
        self._given = 0  # leading characters of the window's text that have been given out

    def push(self, token_id: int) -> str:
        """Take one token; the text that it completes, often all of its own, "" inside a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._give(text, clean=True)
        if len(self._window) - self._context <= _MAX_CHARACTER_TOKENS:
            return ""
        open_characters = min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_OPEN_BYTES)
        return self._give(text[: len(text) - open_characters], clean=False)

    def flush(self) -> str:
        """The rest, at the end of the answer: an incomplete character shows as U+FFFD."""
        return self._give(self._decode(self._window), clean=True)

    def _give(self, text: str, *, clean: bool) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        if clean:
            # The tokens before the newest group are no context any more.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = len(self._decode(self._window))
        elif len(self._window) > _MAX_WINDOW:
            self._window = self._window[-_MAX_WINDOW // 2 :]
            self._context = 0
            tail = self._decode(self._window)
            self._given = len(tail) - min(len(tail) - len(tail.rstrip(REPLACEMENT)), _MAX_OPEN_BYTES)
        return new
