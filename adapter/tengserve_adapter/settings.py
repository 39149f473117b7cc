"""The server's settings: the flags of `tengserve serve`, their checks, their help and docs/cli.md come from here."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tengserve_adapter.grpc.settings import GrpcSettings, TlsFiles
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.tensors.forwarded_headers import ForwardedHeaders, is_pattern
from tengserve_backend.errors import ConfigurationError, shown
from tengserve_backend.python_backend.model import DEFAULT_REQUEST_TIMEOUT_S
from tengserve_backend.repository.modes import ControlMode
from tengserve_backend.repository.settings import DEVICE_RULE, is_device


@dataclass(frozen=True, slots=True)
class Option:
    """What a setting means to the person at the command line.

    Attributes:
        help: one or two sentences.
        metavar: how a value is called in the help; "" for a switch.
        minimum, maximum: bounds of a number, both included.
        choices: the words that are allowed, when only some are.
        accepts: whether a word is allowed, when `words` says which are.
        words: the rule that goes with it.
        repeats: the flag may be given several times; the value is a tuple.
    """

    help: str
    metavar: str = ""
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    repeats: bool = False
    accepts: Callable[[str], bool] | None = None
    words: str = ""

    @property
    def rule(self) -> str:
        """The rule of a value, in words."""
        if self.words:
            return self.words
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.minimum is None:
            return "at least one character long"
        return f"at least {self.minimum}" if self.maximum is None else f"from {self.minimum} to {self.maximum}"


def _setting(
    help_text: str,
    *,
    default: Any = dataclasses.MISSING,
    metavar: str = "",
    minimum: int | None = None,
    maximum: int | None = None,
    choices: tuple[str, ...] = (),
    repeats: bool = False,
    accepts: Callable[[str], bool] | None = None,
    words: str = "",
) -> Any:
    option = Option(help_text, metavar, minimum, maximum, choices, repeats, accepts, words)
    return dataclasses.field(default=default, metadata={"option": option})


_MAX_BYTES = 1 << 30
_MAX_HELD_BYTES = 1 << 40
_MAX_SECONDS = 24 * 60 * 60
_HTTP_DEFAULTS = HttpSettings()
_GRPC_DEFAULTS = GrpcSettings()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything that `tengserve serve` can be told.

    Raises:
        ConfigurationError: a value breaks its rule; the message names the flag, the rule and the value.
    """

    # ruff takes _setting() for a mutable default; it makes a dataclass field.
    model_repository: Path = _setting(  # noqa: RUF009
        "Folder with one folder a model, each with config.pbtxt and version folders.", metavar="DIR"
    )
    device: str = _setting(
        "Device of every model whose own `device` is auto. auto: an NPU, or else a CUDA device, when there is one.",
        default="auto",
        metavar="DEVICE",
        accepts=is_device,
        words=DEVICE_RULE,
    )
    host: str = _setting(
        "Address to listen on, and no other. 0.0.0.0 or :: means every address of the machine.",
        default="127.0.0.1",
        metavar="HOST",
    )
    http_port: int = _setting(
        "Port to listen on; 0 takes any free one and prints it.",
        default=8080,
        metavar="PORT",
        minimum=0,
        maximum=65535,
    )
    grpc: bool = _setting("Serve the v2 protocol over gRPC too.", default=True)
    grpc_port: int = _setting(
        "Port to listen on for gRPC; 0 takes any free one and prints it.",
        default=_GRPC_DEFAULTS.port,
        metavar="PORT",
        minimum=0,
        maximum=65535,
    )
    grpc_tls_cert: Path | None = _setting(  # noqa: RUF009 - as above
        "PEM file with the certificate of the gRPC server, and the chain up to its issuer. Unset: gRPC is not"
        " encrypted.",
        default=None,
        metavar="FILE",
    )
    grpc_tls_key: Path | None = _setting(  # noqa: RUF009 - as above
        "PEM file with the key of that certificate, not encrypted.", default=None, metavar="FILE"
    )
    model_control_mode: str = _setting(
        "Who decides what is loaded. none: every model of the repository, at the start. explicit: those of"
        " --load-model, and later what clients ask for. poll: every model, and the repository is looked at again"
        " every --repository-poll-secs.",
        default=ControlMode.NONE.value,
        metavar="MODE",
        choices=tuple(mode.value for mode in ControlMode),
    )
    load_model: tuple[str, ...] = _setting(
        "Model to load at the start with --model-control-mode explicit; may be given several times, and * means all.",
        default=(),
        metavar="NAME",
        repeats=True,
    )
    repository_poll_secs: float = _setting(
        "With --model-control-mode poll, how often the repository is looked at, in seconds.",
        default=15.0,
        metavar="SECONDS",
        minimum=1,
        maximum=_MAX_SECONDS,
    )
    default_model: str | None = _setting(
        "Model that /infer and /infer_token use, which have no model in their path. Unset: the only model of the"
        " repository, if there is only one.",
        default=None,
        metavar="NAME",
    )
    server_name: str = _setting(
        "Name of the server in the metadata of the v2 protocol. Clients that look for Triton there expect triton.",
        default=_HTTP_DEFAULTS.server_name,
        metavar="NAME",
        accepts=str.isprintable,
        words="printable text of at least one character",
    )
    max_body_bytes: int = _setting(
        "Largest request body.",
        default=_HTTP_DEFAULTS.max_body_bytes,
        metavar="BYTES",
        minimum=1024,
        maximum=_MAX_BYTES,
    )
    max_held_body_bytes: int = _setting(
        "Bytes of request bodies that are held at once, while they arrive and are parsed; what goes beyond is answered"
        " with 429. Those of v2 infer count once more until they are answered, and are then refused with 503.",
        default=_HTTP_DEFAULTS.max_held_body_bytes,
        metavar="BYTES",
        minimum=1024,
        maximum=_MAX_HELD_BYTES,
    )
    max_connections: int = _setting(
        "Client connections that are open at once, over HTTP and gRPC each. Beyond them HTTP requests are answered with"
        " 503, while health probes still get through, and gRPC connections are closed.",
        default=4096,
        metavar="COUNT",
        minimum=1,
        maximum=1_000_000,
    )
    max_tensor_bytes: int = _setting(
        "Largest body of a v2 infer request, also over gRPC, and of generate for a model that is no LLM.",
        default=_HTTP_DEFAULTS.max_tensor_bytes,
        metavar="BYTES",
        minimum=1024,
        maximum=_MAX_BYTES,
    )
    strict_decoupled: bool = _setting(
        "Refuse v2 infer for decoupled models, LLMs among them, as Triton does. Switched off, their responses are"
        " joined to one.",
        default=_HTTP_DEFAULTS.strict_decoupled,
    )
    http_header_forward_pattern: str | None = _setting(
        "Headers of v2 infer whose names match this regular expression become parameters of a request to a python"
        " model. Case is ignored, unless the expression begins with (?-i). Unset: none.",
        default=None,
        metavar="REGEX",
        accepts=is_pattern,
        words="a regular expression",
    )
    grpc_header_forward_pattern: str | None = _setting(
        "The same for the metadata of ModelInfer and ModelStreamInfer over gRPC.",
        default=None,
        metavar="REGEX",
        accepts=is_pattern,
        words="a regular expression",
    )
    max_infer_text_chars: int = _setting(
        "Longest prompt text of /infer, in characters.",
        default=_HTTP_DEFAULTS.max_infer_text_chars,
        metavar="CHARS",
        minimum=1,
        maximum=_MAX_BYTES,
    )
    max_generate_text_chars: int = _setting(
        "Longest prompt text of /v2/models/{model}/generate, in characters.",
        default=_HTTP_DEFAULTS.max_generate_text_chars,
        metavar="CHARS",
        minimum=1,
        maximum=_MAX_BYTES,
    )
    max_step_s: float = _setting(
        "Longest step of an engine, in seconds; past it /v2/health/live answers 503, so that Kubernetes restarts the"
        " pod.",
        default=_HTTP_DEFAULTS.max_step_s,
        metavar="SECONDS",
        minimum=1,
        maximum=_MAX_SECONDS,
    )
    request_timeout_s: float = _setting(
        "How long a request to a python model waits for its next response, in seconds; past it the request is answered"
        " with 503 and the model is told that it was cancelled. A request's own timeout may be shorter.",
        default=DEFAULT_REQUEST_TIMEOUT_S,
        metavar="SECONDS",
        minimum=1,
        maximum=_MAX_SECONDS,
    )
    drain_timeout_s: float = _setting(
        "After SIGTERM, how long running answers may take to end, in seconds. Keep it some 15 s below"
        " terminationGracePeriodSeconds of the pod.",
        default=30.0,
        metavar="SECONDS",
        minimum=0,
        maximum=_MAX_SECONDS,
    )
    pre_drain_delay_s: float = _setting(
        "After SIGTERM, how long to stay up and answer new requests with 503 before the drain, in seconds: time for"
        " load balancers to look elsewhere.",
        default=0.0,
        metavar="SECONDS",
        minimum=0,
        maximum=_MAX_SECONDS,
    )
    exit_on_error: bool = _setting(
        "End with status 1 as soon as a model fails to load. Switched off, the server goes on, is ready once another"
        " model is, and the model's own /ready tells the reason. A wrong config.pbtxt of a model that is loaded at the"
        " start keeps the server from starting all the same.",
        default=True,
    )
    step_profile: Path | None = _setting(  # noqa: RUF009 - as above
        "Measure where the time of an LLM's steps goes: seconds by phase in the metrics, and in this folder, which is"
        " made when it is missing, a trace of a model's last steps once it is unloaded or the server ends, to open in"
        " Perfetto or chrome://tracing.",
        default=None,
        metavar="DIR",
    )
    log_level: str = _setting(
        "Least severe messages to log.",
        default="info",
        metavar="LEVEL",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(flag(field.name), option(field.name), getattr(self, field.name))
        if self.load_model and self.model_control_mode != ControlMode.EXPLICIT.value:
            raise ConfigurationError("--load-model needs --model-control-mode explicit")
        largest = max(self.max_body_bytes, self.max_tensor_bytes)
        if self.max_held_body_bytes < largest:
            raise ConfigurationError(
                f"--max-held-body-bytes must be at least --max-body-bytes and --max-tensor-bytes, {largest},"
                f" got {self.max_held_body_bytes}"
            )
        if (self.grpc_tls_cert is None) != (self.grpc_tls_key is None):
            raise ConfigurationError("--grpc-tls-cert and --grpc-tls-key must be given together")

    def grpc_settings(self, host: str, version: str) -> GrpcSettings:
        """The part that the gRPC server needs.

        Args:
            host: the address that HTTP listens on; a host name may have several.
            version: of this server.
        """
        tls = None
        if self.grpc_tls_cert is not None and self.grpc_tls_key is not None:
            tls = TlsFiles(self.grpc_tls_cert, self.grpc_tls_key)
        return GrpcSettings(
            host=host,
            port=self.grpc_port,
            max_message_bytes=self.max_tensor_bytes,
            max_held_bytes=self.max_held_body_bytes,
            tls=tls,
            max_connections=self.max_connections,
            strict_decoupled=self.strict_decoupled,
            forwarded_headers=_forwarded(self.grpc_header_forward_pattern),
            server_name=self.server_name,
            server_version=version,
        )

    def http(self) -> HttpSettings:
        """The part that the HTTP routes need."""
        return HttpSettings(
            default_model=self.default_model,
            server_name=self.server_name,
            max_body_bytes=self.max_body_bytes,
            max_held_body_bytes=self.max_held_body_bytes,
            max_tensor_bytes=self.max_tensor_bytes,
            strict_decoupled=self.strict_decoupled,
            forwarded_headers=_forwarded(self.http_header_forward_pattern),
            max_infer_text_chars=self.max_infer_text_chars,
            max_generate_text_chars=self.max_generate_text_chars,
            max_step_s=self.max_step_s,
            ready_without_models=self.model_control_mode == ControlMode.EXPLICIT.value,
        )


def _forwarded(pattern: str | None) -> ForwardedHeaders | None:
    return None if pattern is None else ForwardedHeaders(pattern)


def flag(name: str) -> str:
    """The command line flag of a setting."""
    return "--" + name.replace("_", "-")


def option(name: str) -> Option:
    """What is known of a setting."""
    found: Option = ServerSettings.__dataclass_fields__[name].metadata["option"]
    return found


def default_text(name: str) -> str:
    """A setting's default as it would be written; "" when it has none."""
    default = ServerSettings.__dataclass_fields__[name].default
    if default is dataclasses.MISSING or default is None:
        return ""
    if default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def value_type(name: str) -> type:
    """The type of a setting's value, None left out."""
    hint = typing.get_type_hints(ServerSettings)[name]
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    found: type = kinds[0]
    return found


def parse(name: str, text: str) -> Any:
    """A setting's value from its text on the command line.

    Raises:
        ConfigurationError: the text is not of the setting's type.
    """
    kind = value_type(name)
    if kind is int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ConfigurationError(f"{flag(name)} must be a whole number {option(name).rule}, got {shown(text)!r}")
        return int(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigurationError(
                f"{flag(name)} must be a number {option(name).rule}, got {shown(text)!r}"
            ) from None
    return Path(text) if kind is Path and text else text


def _check(name: str, rules: Option, value: object) -> None:
    wrong = False
    if isinstance(value, tuple):
        wrong = not all(value)
    elif isinstance(value, str):
        wrong = not value or (bool(rules.choices) and value not in rules.choices)
        wrong = wrong or (rules.accepts is not None and not rules.accepts(value))
    elif isinstance(value, int | float) and rules.minimum is not None:
        too_large = rules.maximum is not None and value > rules.maximum
        wrong = not math.isfinite(value) or value < rules.minimum or too_large
    if wrong:
        given = repr(shown(value)) if isinstance(value, str) else shown(value)
        raise ConfigurationError(f"{name} must be {rules.rule}, got {given}")
