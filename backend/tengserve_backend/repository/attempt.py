"""One try to load a model, and the sentence that tells why it failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tengserve_backend.engine.base import Engine
from tengserve_backend.errors import ShuttingDownError, TengserveError
from tengserve_backend.inference.model import TensorModel
from tengserve_backend.repository.source import ModelSource, Progress

STOPPED: Final = "The server is stopping."
FAILED: Final = "The model failed to load; the server's log says why."

_log = logging.getLogger(__name__)


def attempt(
    make: Callable[[ModelSource, Progress], Engine | TensorModel], source: ModelSource, report: Progress
) -> tuple[Engine | TensorModel | None, str]:
    """A model, or why there is none, in one sentence that is safe to show. Blocks; raises nothing.

    Args:
        make: loads it.
        source: what is loaded.
        report: told how far it is; raises ShuttingDownError to end the load.
    """
    try:
        return make(source, report), ""
    except ShuttingDownError:
        return None, STOPPED
    except TengserveError as error:
        _log.error("model %s, version %s: %s", source.name, source.version, error.message, exc_info=error.__cause__)
        return None, error.message
    except Exception:  # noqa: BLE001 - loading runs other people's code, which may raise anything
        _log.exception("model %s, version %s failed to load", source.name, source.version)
        return None, FAILED
