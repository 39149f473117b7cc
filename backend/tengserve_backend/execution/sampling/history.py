"""What a sequence has said so far, kept up to date with each token so that no step has to read it all again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """The distinct tokens of prompt and output, and how often the output has each.

    Args:
        prompt_ids: tokens of the prompt.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = array("q", self._places)
        self._counts = array("f", bytes(4 * len(self._places)))

    def push(self, token_id: int) -> None:
        """The output has one more token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += 1.0

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens, each once."""
        return np.array(self._ids, dtype=np.int64)

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """For each of `token_ids`, how often the output has it; 0 when only the prompt does."""
        return np.array(self._counts, dtype=np.float32)
