"""A stock KServe model server with an identity model, for `scripts/bench overhead` to compare with.

Nothing of it is ours but the model. Its lines about requests are off, and so is its latency logging: ours writes none.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import warnings

warnings.simplefilter("ignore", DeprecationWarning)  # kserve's own, about FastAPI

import kserve  # noqa: E402 - after the filter

_START_TIMEOUT_S = 120.0


class Identity(kserve.Model):
    """Gives back the array that it gets, under the name OUTPUT."""

    def predict(self, payload: kserve.InferRequest, headers: dict[str, str] | None = None) -> kserve.InferResponse:
        """One input, one output, in the form in which the request asks for it."""
        array = payload.inputs[0].as_numpy()
        output = kserve.InferOutput("OUTPUT", list(array.shape), payload.inputs[0].datatype)
        # Each the shorter way for its protocol.
        if payload.from_grpc:
            output.set_data_from_numpy(array)
        else:
            output.data = array
        return kserve.InferResponse(
            payload.id,
            self.name,
            [output],
            model_version=payload.model_version,
            use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _tell_when_ready(http_port: int, grpc_port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    for port in (http_port, grpc_port):
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    return  # Whoever started this process has a deadline of its own.
                time.sleep(0.05)
    print(f"stock kserve listens on http://127.0.0.1:{http_port}")
    print(f"stock kserve listens for gRPC on 127.0.0.1:{grpc_port}")
    print("stock kserve is ready", flush=True)


def main() -> None:
    http_port, grpc_port = _free_port(), _free_port()
    model = Identity("identity")
    model.load()
    server = kserve.ModelServer(http_port=http_port, grpc_port=grpc_port, workers=1, enable_latency_logging=False)
    for name in ("kserve", "kserve.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # uvicorn writes no access log when nobody would get it.
    logging.getLogger("uvicorn.access").handlers.clear()
    threading.Thread(target=_tell_when_ready, args=(http_port, grpc_port), daemon=True).start()
    server.start([model])


if __name__ == "__main__":
    main()
