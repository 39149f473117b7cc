"""Stop strings, matched on text and across tokens.

A stop string ends the answer where it starts. While the end of the text could still become a stop string, exactly
that end is held back, so no part of a stop string is ever shown; it is given out when it turns out to be something
else. The match that is complete first wins, whatever way the text was cut into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopped:
    """Text that may be shown, and whether a stop string ended it."""

    text: str
    matched: bool


class StopMatcher:
    """Watches the growing text of one answer.

    Args:
        stops: non-empty strings; none means that text passes through.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> Stopped:
        """Take new text; what may be shown of it and of the text held back before."""
        if not self._stops:
            return Stopped(text, matched=False)
        candidate = self._held + text
        start = self._first_match(candidate)
        if start is not None:
            self._held = ""
            return Stopped(candidate[:start], matched=True)
        keep = self._open_prefix(candidate)
        self._held = candidate[len(candidate) - keep :]
        return Stopped(candidate[: len(candidate) - keep], matched=False)

    def flush(self) -> str:
        """The text held back, when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Start of the stop string that is complete first; the longer one when two end together."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                match = (start + len(stop), start)
                best = match if best is None else min(best, match)
        return None if best is None else best[1]

    def _open_prefix(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
