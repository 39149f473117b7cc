"""Settings of the HTTP edge."""

from __future__ import annotations

from dataclasses import dataclass

from tengserve_adapter.tensors.forwarded_headers import ForwardedHeaders


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the operator decides about HTTP.

    Attributes:
        default_model: the model that `/infer` and `/infer_token` serve, since their URLs name none; None takes the
            only model there is.
        max_body_bytes: a larger body is refused with 413.
        max_held_body_bytes: bytes of bodies that are held at once, while they arrive and are parsed; a body that would
            go beyond is refused with 429. Bodies of tensors count once more until they are answered, and are refused
            with 503.
        max_tensor_bytes: a larger body of v2 infer, or of generate for a model of tensors, is refused with 400.
        strict_decoupled: refuse v2 infer for a decoupled model, as Triton does, instead of joining its responses.
        forwarded_headers: headers of v2 infer that are parameters for a python model.
        max_infer_text_chars: characters of `inputs` (the documented 4 MB).
        max_generate_text_chars: characters of `text_input` (the documented 16000).
        body_timeout_s: a body that takes longer to arrive is refused with 408.
        max_step_s: an engine whose step takes longer is taken for stuck: the server is not live any more.
        server_name: the name in `GET /v2`.
        ready_without_models: a server that has no model is ready all the same, as models are loaded by request.
    """

    default_model: str | None = None
    max_body_bytes: int = 40 * 1024 * 1024
    max_held_body_bytes: int = 256 * 1024 * 1024
    max_tensor_bytes: int = 64 * 1024 * 1024
    strict_decoupled: bool = False
    forwarded_headers: ForwardedHeaders | None = None
    max_infer_text_chars: int = 4194304
    max_generate_text_chars: int = 16000
    body_timeout_s: float = 300.0
    max_step_s: float = 120.0
    server_name: str = "tengserve"
    ready_without_models: bool = False
