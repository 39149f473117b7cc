"""What the person who waits sees: a bar that moves on a terminal, a line a run elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TextIO

from tengserve_adapter.bench.gate import Verdict
from tengserve_adapter.bench.plan import Run

_ERASE: Final = "\r\x1b[K"
_BAR: Final = 24
_PAUSE_S: Final = 0.2
"""Between two drawings: drawing takes time from what is measured."""


class ProgressBar:
    """See measure.Progress.

    Args:
        stream: where it is drawn.
        now: a monotonic clock in seconds.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._moves = stream.isatty()
        self._now = now
        self._what = ""
        self._requests = 0
        self._done = 0
        self._began = 0.0
        self._drawn = 0.0

    def gate(self, system: str, verdict: Verdict, least: float) -> None:
        """See Progress."""
        passed = verdict.agreement >= least
        what = "answers as" if passed else "is not measured: it differs from"
        self._line(
            f"{system} {what} the reference, {verdict.reference}:"
            f" agreement {verdict.agreement:.3f} (at least {least:g} is wanted)"
        )
        if verdict.difference:
            self._line(f"  the first difference: {verdict.difference}")
        if not passed:
            # Down: what it says must let the server in.
            accepted = math.floor(verdict.agreement * 100) / 100
            self._line(
                f"  --agreement {accepted:g} measures it all the same; with dtype float32, of the server and of the"
                " reference, a right one gives all"
            )

    def begin(self, what: str, requests: int) -> None:
        """See Progress."""
        self._what, self._requests, self._done = what, requests, 0
        self._began = self._now()
        self._draw()

    def answered(self) -> None:
        """See Progress."""
        self._done += 1
        if self._now() - self._drawn >= _PAUSE_S:
            self._draw()

    def end(self, run: Run | None) -> None:
        """See Progress."""
        if run is None:
            self._erase()
            return
        one = run.figures
        void = "" if one.valid else f"; void: {one.failed} failed, {one.short} of another length"
        self._line(
            f"{self._what}: {one.output_per_s:.1f} tokens/s out, TTFT p50 {one.ttft.p50 * 1e3:.1f} ms,"
            f" TPOT p50 {one.tpot.p50 * 1e3:.1f} ms{void}"
        )
        for error in dict.fromkeys(record.error for record in run.records if record.error):
            self._line(f"  {error}")

    def _draw(self) -> None:
        if not self._moves:
            return
        self._drawn = self._now()
        share = self._done / max(1, self._requests)
        bar = "#" * round(share * _BAR)
        left = ""
        if 0 < share < 1:
            left = f", {(self._drawn - self._began) * (1 - share) / share:.0f} s left"
        self._stream.write(f"{_ERASE}{self._what} [{bar:<{_BAR}}] {self._done}/{self._requests}{left}")
        self._stream.flush()

    def _erase(self) -> None:
        if self._moves:
            self._stream.write(_ERASE)

    def _line(self, text: str) -> None:
        self._erase()
        self._stream.write(text + "\n")
        self._stream.flush()
