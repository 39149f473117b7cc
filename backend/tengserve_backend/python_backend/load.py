"""From a checked source to a running python model."""

from __future__ import annotations

import copy
import json
import threading
import types
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from tengserve_backend.errors import ConfigurationError, TengserveError
from tengserve_backend.python_backend.api.metrics import ModelMetrics
from tengserve_backend.python_backend.api.model_config import ModelConfig
from tengserve_backend.python_backend.api.module import make_module
from tengserve_backend.python_backend.bls import Bls, Peers
from tengserve_backend.python_backend.config import PythonConfig, read_python_config
from tengserve_backend.python_backend.counters import Counters
from tengserve_backend.python_backend.instance import Instance, InstanceSetup, load_class, said
from tengserve_backend.python_backend.model import DEFAULT_REQUEST_TIMEOUT_S, PythonModel, end_instances
from tengserve_backend.python_backend.plain_queue import PlainQueue
from tengserve_backend.python_backend.request_queue import RequestQueue, Waiting
from tengserve_backend.python_backend.sequence_queue import SequenceQueue
from tengserve_backend.repository.config_json import from_json, normalized
from tengserve_backend.repository.python_models import check_python_config
from tengserve_backend.repository.source import ModelSource, Progress

_AUTO_COMPLETE = "auto_complete_config"
_STARTING = "starting the model"
_REPORT_S = 0.2

_T = TypeVar("_T")


def load_python_model(
    source: ModelSource,
    progress: Progress,
    peers: Peers | None = None,
    *,
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
) -> PythonModel:
    """Import a model's file and start its instances. Blocks until all are ready.

    The file's code runs in this process, with all rights of the server.

    Args:
        source: of backend "python".
        progress: told how many instances are ready; an error that it raises ends the load.
        peers: the models that it may ask; None lets it ask nobody.
        request_timeout_s: how long a request waits for its next response.

    Raises:
        ConfigurationError: the file, its class or its configuration is wrong; the message says what.
    """
    bls, metrics = Bls(source.name, peers), ModelMetrics()
    module = make_module(source.name, source.version_dir, bls, metrics)
    full_config = copy.deepcopy(dict(source.config))
    instances: list[Instance] = []
    queue: Waiting | None = None
    try:
        full_config = _auto_completed(source, full_config, module, progress)
        config = read_python_config(full_config, source.version_dir.parent)
        queue, counters = _queue(source.name, config), Counters(per_response=config.decoupled)
        setup = InstanceSetup(
            model=source.name,
            version=source.version,
            model_dir=source.version_dir.parent,
            version_dir=source.version_dir,
            filename=config.model_filename,
            decoupled=config.decoupled,
            outputs=tuple(spec.name for spec in config.outputs),
            module=module,
            queue=queue,
            counters=counters,
        )
        total = sum(group.count for group in config.instances)
        for group in config.instances:
            for index in range(group.count):
                instance = Instance(
                    setup,
                    number=len(instances),
                    name=f"{group.name}_{index}",
                    kind=group.kind,
                    device_id=group.device_id,
                    config=full_config,
                )
                instances.append(instance)
                _wait(instance.ready, progress, _STARTING, (len(instances) - 1) / total)
        progress(_STARTING, 1.0)
    except BaseException:
        if queue is not None:
            queue.close()
        # One that hangs in its own code ends when that comes back; the load does not wait for it.
        end_instances([instance for instance in instances if instance.ready.done()], bls, metrics)
        raise
    bls.open = True
    return PythonModel(
        name=source.name,
        version=source.version,
        full_config=full_config,
        config=config,
        queue=queue,
        counters=counters,
        instances=instances,
        bls=bls,
        metrics=metrics,
        request_timeout_s=request_timeout_s,
    )


def _queue(model: str, config: PythonConfig) -> Waiting:
    if config.sequences is not None:
        return SequenceQueue(model, config, config.sequences)
    return PlainQueue() if config.batching is None else RequestQueue(config)


def _wait(done: Future[_T], progress: Progress, stage: str, fraction: float) -> _T:
    """Wait for the model's own code, which takes as long as it takes; `progress` is how a stop gets in between."""
    while not done.done():
        progress(stage, fraction)
        wait([done], timeout=_REPORT_S)
    return done.result()


def _auto_completed(
    source: ModelSource, config: dict[str, Any], module: types.ModuleType, progress: Progress
) -> dict[str, Any]:
    """The configuration as the model's `auto_complete_config` leaves it."""
    filename = config["default_model_filename"] or "model.py"
    try:
        text = (source.version_dir / filename).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{filename} cannot be read ({error.strerror})") from error
    if _AUTO_COMPLETE.encode() not in text:
        return config
    setup = InstanceSetup(
        model=source.name,
        version=source.version,
        model_dir=source.version_dir.parent,
        version_dir=source.version_dir,
        filename=filename,
        decoupled=False,
        outputs=(),
        module=module,
        queue=PlainQueue(),
        counters=Counters(per_response=False),
    )
    completed: Future[dict[str, Any]] = Future()
    # A thread of its own, as what the import leaves on a thread belongs to this model alone.
    threading.Thread(
        target=_complete, args=(setup, config, completed), name=f"complete {source.name}", daemon=True
    ).start()
    given = _wait(completed, progress, "completing the configuration", 0.0)
    message = from_json(given, "what auto_complete_config made")
    check_python_config(message, f"{source.name}/config.pbtxt, completed by the model,")
    return normalized(message, source.name)


def _complete(setup: InstanceSetup, config: dict[str, Any], completed: Future[dict[str, Any]]) -> None:
    try:
        namespace, made = load_class(setup)
        try:
            complete = getattr(made, _AUTO_COMPLETE, None)
            result = ModelConfig(json.dumps(config))
            if callable(complete):
                result = complete(result)
            if not isinstance(result, ModelConfig):
                raise ConfigurationError(
                    f"auto_complete_config function in model '{setup.model}' must return a valid pb.ModelConfig object."
                )
            completed.set_result(result.as_dict())
        finally:
            namespace.close()
    except TengserveError as error:
        completed.set_exception(error)
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; it is why loading fails
        failure = ConfigurationError(f"auto_complete_config failed: {said(setup, error)}")
        failure.__cause__ = error
        completed.set_exception(failure)
