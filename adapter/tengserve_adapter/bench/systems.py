"""From what the command line says about servers to servers that can be asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tengserve_adapter.bench import http
from tengserve_adapter.bench.dialects import GRPC, HTTP_DIALECTS, http_ask
from tengserve_adapter.bench.plan import System
from tengserve_adapter.bench.requests import AnswerError
from tengserve_backend.errors import ConfigurationError, shown

DIALECTS: Final = (*HTTP_DIALECTS, GRPC)
_SPEC: Final = re.compile(r"(?:([a-z_]+)\+)?(https?://\S+)")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Target:
    """A server as it was named.

    Attributes:
        name: for the tables.
        dialect: one of DIALECTS.
        url: where it is.
        fields: of every request; see `with_fields`.
    """

    name: str
    dialect: str
    url: str
    fields: Mapping[str, Any]


def targets(
    url: str, name: str, dialect: str, against: Sequence[str], against_dialect: str, fields: Sequence[str]
) -> list[Target]:
    """The servers of a command line, the first one first.

    Args:
        url: [DIALECT+]URL of the first.
        name: of the first.
        dialect: of the first where its URL says none.
        against: NAME=[DIALECT+]URL of the others.
        against_dialect: of the others where they say none.
        fields: NAME=JSON of either.

    Raises:
        ConfigurationError: one of them is wrong.
    """
    specs = {name: (url, dialect, "--url")}
    for text in against:
        other, _, spec = text.partition("=")
        if not _NAME.fullmatch(other) or other in specs:
            raise ConfigurationError(
                f"--against must be NAME=[DIALECT+]URL, each NAME once, of letters, digits, '.', '_' and '-',"
                f" got {shown(text)!r}"
            )
        specs[other] = (spec, against_dialect, "--against")
    extra: dict[str, Mapping[str, Any]] = {}
    for text in fields:
        other, _, value = text.partition("=")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if other not in specs or not isinstance(parsed, dict):
            raise ConfigurationError(
                f"--fields must be NAME=JSON with a server's name ({', '.join(specs)}) and a JSON object,"
                f" got {shown(text)!r}"
            )
        extra[other] = parsed
    found = []
    for one, (spec, default, flag) in specs.items():
        match = _SPEC.fullmatch(spec)
        if match is None or (match[1] or default) not in DIALECTS:
            raise ConfigurationError(
                f"{flag} must have a URL, [DIALECT+]http://HOST:PORT with one of {', '.join(DIALECTS)},"
                f" got {shown(spec)!r}"
            )
        http.Place.of(match[2])
        found.append(Target(one, match[1] or default, match[2], extra.get(one, {})))
    return found


async def connect(target: Target, model: str | None) -> System:
    """A system to measure.

    Args:
        target: the server.
        model: that is asked; None for the only one that it has.

    Raises:
        ConfigurationError: it has no model that can be asked, or none of this name is known.
    """
    place = http.Place.of(target.url)
    model = target.fields.get("model", model)
    try:
        if target.dialect == GRPC:
            # Brings tritonclient's gRPC, which only this dialect needs.
            from tengserve_adapter.bench.grpc_stream import GrpcAsk, only_model

            model = model or await only_model(place.address)
            grpc = GrpcAsk(place.address, model, target.fields)
            return System(target.name, target.dialect, target.url, model, grpc, close=grpc.close)
        dialect = HTTP_DIALECTS[target.dialect]
        model = model or await _only_model(place)
    except AnswerError as error:
        raise ConfigurationError(f"{target.name} cannot be measured: {error}") from None
    ask = http_ask(dialect, place, model, target.fields)
    return System(target.name, target.dialect, target.url, model, ask, dialect.templated)


async def version(target: Target) -> str:
    """What a server says that it is; "" when it says nothing."""
    if target.dialect == GRPC:
        return ""
    place = http.Place.of(target.url)
    for path in ("/v2", "/version"):
        try:
            found = await http.get_json(place, path)
        except AnswerError:
            continue
        if isinstance(found, dict) and found.get("version"):
            return " ".join(str(found[key]) for key in ("name", "version") if key in found)
    return ""


async def _only_model(place: http.Place) -> str:
    """The name of the only model, from KServe's or OpenAI's list.

    Raises:
        AnswerError: there is none, or there are several.
    """
    found = await http.get_json(place, "/v1/models")
    names = []
    if isinstance(found, dict):
        names = [str(name) for name in found.get("models") or ()] if "data" not in found else []
        names += [str(one.get("id")) for one in found.get("data") or () if isinstance(one, dict)]
    if len(names) != 1:
        raise AnswerError(f"it has {len(names)} models, name one with --model or the field model")
    return names[0]
