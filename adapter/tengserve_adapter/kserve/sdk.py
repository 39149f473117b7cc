"""The KServe names that we build on. Import them from here, never from kserve.

kserve parses sys.argv when it is imported (kserve.model_server, module level) and ends the process on a flag that it
finds ambiguous; so it is imported once, here, while sys.argv holds the program's name alone.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def _neutral_argv() -> Iterator[None]:
    saved = sys.argv
    sys.argv = saved[:1]
    try:
        yield
    finally:
        sys.argv = saved


with _neutral_argv(), warnings.catch_warnings():
    # FastAPI deprecates the response class that kserve 0.21 uses; our routes do not use it.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kserve import Model, ModelRepository, ModelServer
    from kserve.metrics import EXPLAIN_HIST_TIME, POST_HIST_TIME, PRE_HIST_TIME, PREDICT_HIST_TIME
    from kserve.model_server import app
    from kserve.protocol.model_repository_extension import ModelRepositoryExtension
    from kserve.protocol.rest.server import RESTServer

KSERVE_METRICS = (PRE_HIST_TIME, PREDICT_HIST_TIME, POST_HIST_TIME, EXPLAIN_HIST_TIME)
"""What KServe's own v1 and v2 infer measure."""

__all__ = ["KSERVE_METRICS", "Model", "ModelRepository", "ModelRepositoryExtension", "ModelServer", "RESTServer", "app"]
