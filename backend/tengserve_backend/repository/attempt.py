"""Loading a model, and the sentence that tells why it failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import DeviceLostError, ShuttingDownError, TengserveError, one_line
from tengserve_backend.inference.model import TensorModel
from tengserve_backend.repository.source import ModelSource, Progress

STOPPED: Final = "The server is stopping."
FAILED: Final = "The model failed to load; the server's log says why."

_log = logging.getLogger(__name__)


def nobody_watches(model: str, stage: str, fraction: float) -> None:
    """The progress callback of a manager that nobody watches."""


class Attempts:
    """Loads models, from any thread.

    Args:
        make: makes a model; blocks, and reports through the Progress that it gets.
        progress: called with the model's name, the stage and its fraction, from the thread that loads.

    Attributes:
        device_lost: one sentence once a device failed while a model loaded, else "".
    """

    def __init__(
        self,
        make: Callable[[ModelSource, Progress], Engine | TensorModel],
        progress: Callable[[str, str, float], None],
    ) -> None:
        self._make = make
        self._progress = progress
        self.device_lost = ""

    def load(self, source: ModelSource, check_running: Callable[[], None]) -> tuple[Engine | TensorModel | None, str]:
        """A model, or why there is none, in one sentence that is safe to show. Blocks; raises nothing.

        Args:
            source: what is loaded.
            check_running: called at each report; raises ShuttingDownError to end the load.
        """

        def report(stage: str, fraction: float) -> None:
            check_running()
            self._progress(source.name, stage, fraction)

        try:
            return self._make(source, report), ""
        except ShuttingDownError:
            return None, STOPPED
        except TengserveError as error:
            if isinstance(error, DeviceLostError):
                self.device_lost = error.message
            cause = error.__cause__
            _log.error("model %s, version %s: %s", source.name, source.version, error.message, exc_info=cause)
            return None, one_line(error.message)
        except Exception:  # noqa: BLE001 - loading runs other people's code, which may raise anything
            _log.exception("model %s, version %s failed to load", source.name, source.version)
            return None, FAILED
