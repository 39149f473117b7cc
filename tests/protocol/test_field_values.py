"""Every field at each bound, just past it, of the wrong type and null, on each of the three endpoints.

The intervals are written down here from the API documents and the issue's superset, not read from the table of the
adapter, and a test compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from support.asgi import app_with, client_of
from support.fake_engine import FakeEngine
from tengserve_backend.generation import GenerationRequest
from tengserve_backend.generation.fields import FIELDS, Bounds, Dialect, Field, Kind, Place

INF = math.inf
FLOAT_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Interval:
    """Numbers that a document allows; text as mathematics writes it, `(1e-6, 1.0)`."""

    low: float | int
    high: float | int
    low_open: bool = False
    high_open: bool = False
    whole: bool = True

    def holds(self, value: float) -> bool:
        return (
            self.low <= value <= self.high
            and not (value == self.low and self.low_open)
            and not (value == self.high and self.high_open)
        )

    def inside(self) -> list[str]:
        return [self._literal(self.low, up=True), self._literal(self.high, up=False)]

    def outside(self) -> list[str]:
        return [self._past(self.low, self.low_open, -1), self._past(self.high, self.high_open, 1)]

    def _literal(self, end: float | int, *, up: bool) -> str:
        is_open = self.low_open if up else self.high_open
        if self.whole:
            return str(end + (1 if up else -1) if is_open else end)
        return repr(math.nextafter(end, INF if up else -INF)) if is_open else repr(float(end))

    def _past(self, end: float | int, is_open: bool, direction: int) -> str:
        if self.whole:
            return str(end if is_open else int(end) + direction)
        return repr(float(end)) if is_open else repr(math.nextafter(end, direction * INF))


def whole(low: int, high: int) -> Interval:
    return Interval(low, high)


def real(low: float, high: float, ends: str = "[]") -> Interval:
    return Interval(low, high, low_open=ends[0] == "(", high_open=ends[1] == ")", whole=False)


BOTH: dict[str, Interval] = {
    "max_new_tokens": whole(1, 2147483647),
    "seed": whole(1, 18446744073709551615),
    "priority": whole(1, 5),
    "timeout": whole(1, 3600),
    "min_new_tokens": whole(0, 2147483647),
    "repetition_penalty": real(0, FLOAT_MAX, "(]"),
    "typical_p": real(0, 1, "(]"),
    "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2),
    "min_p": real(0, 1),
}
INTERVALS: dict[str, dict[str, Interval]] = {
    "native": {
        **BOTH,
        "temperature": real(1e-6, FLOAT_MAX, "(]"),
        "top_k": whole(1, 2147483647),
        "top_p": real(1e-6, 1.0, "()"),
    },
    "generate": {
        **BOTH,
        "temperature": real(0, FLOAT_MAX, "(]"),
        "top_k": whole(0, 2147483647),
        "top_p": real(0, 1.0, "(]"),
        "batch_size": whole(1, 2147483647),
    },
}
BOOLEANS = ["do_sample", "details", "watermark", "ignore_eos", "skip_special_tokens"]
DEFAULTS = {
    "max_new_tokens": 20,
    "timeout": 600,
    "priority": 5,
    "temperature": 1.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "do_sample": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "seed": None,
    "stop": (),
}

READ: dict[str, Callable[[GenerationRequest], object]] = {
    "max_new_tokens": lambda r: r.max_new_tokens,
    "min_new_tokens": lambda r: r.min_new_tokens,
    "timeout": lambda r: r.timeout_s,
    "priority": lambda r: r.priority,
    "stop": lambda r: r.stop,
    "ignore_eos": lambda r: r.ignore_eos,
    "skip_special_tokens": lambda r: r.skip_special_tokens,
    "temperature": lambda r: r.sampling.temperature,
    "top_k": lambda r: r.sampling.top_k,
    "top_p": lambda r: r.sampling.top_p,
    "min_p": lambda r: r.sampling.min_p,
    "seed": lambda r: r.sampling.seed,
    "do_sample": lambda r: r.sampling.do_sample,
    "repetition_penalty": lambda r: r.sampling.repetition_penalty,
    "presence_penalty": lambda r: r.sampling.presence_penalty,
    "frequency_penalty": lambda r: r.sampling.frequency_penalty,
}
"""Where a field's effect is seen; details is seen in the answer, and the others have none, as documented."""


@dataclass(frozen=True)
class Endpoint:
    path: str
    dialect: str
    prompt: str
    nested: bool

    def body(self, field: str, literal: str, extra: str = "") -> str:
        pair = f'"{field}":{literal}{extra}'
        return f'{{{self.prompt},"parameters":{{{pair}}}}}' if self.nested else f"{{{self.prompt},{pair}}}"


ENDPOINTS = [
    Endpoint("/infer", "native", '"inputs":"Hi"', True),
    Endpoint("/infer_token", "native", '"input_id":[1,2]', True),
    Endpoint("/v2/models/smollm2/generate", "generate", '"text_input":"Hi"', True),
    Endpoint("/v2/models/smollm2/generate", "generate", '"text_input":"Hi"', False),
]
IDS = ["infer", "infer_token", "v2-nested", "v2-flat"]


class Sender:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.engine = FakeEngine()
        self._client = client_of(app_with(self.engine))

    async def accepted(self, field: str, literal: str, extra: str = "") -> GenerationRequest:
        response = await self._client.post(
            self.endpoint.path, content=self.endpoint.body(field, literal, extra).encode()
        )
        assert response.status_code == 200, f"{field}={literal}: {response.text}"
        return self.engine.requests[-1]

    async def refused(self, field: str, literal: str) -> str:
        before = len(self.engine.requests)
        response = await self._client.post(self.endpoint.path, content=self.endpoint.body(field, literal).encode())
        assert response.status_code == 422, f"{field}={literal}: {response.status_code} {response.text}"
        error = response.json()
        assert list(error) == ["error", "error_type"]
        assert error["error_type"] == "Input Validation Error"
        assert field in error["error"], f"{field}={literal}: {error}"
        assert len(self.engine.requests) == before
        return str(error["error"])


@pytest.fixture(params=ENDPOINTS, ids=IDS)
def sender(request: pytest.FixtureRequest) -> Sender:
    return Sender(request.param)


@pytest.mark.parametrize("name", sorted({*INTERVALS["native"], *INTERVALS["generate"]}))
async def test_numbers(sender: Sender, name: str) -> None:
    interval = INTERVALS[sender.endpoint.dialect].get(name)
    if interval is None:
        # A field of another dialect is unknown here: ignored, whatever its value.
        await sender.accepted(name, '"anything"')
        return
    for literal in interval.inside():
        request = await sender.accepted(name, literal)
        if name == "min_new_tokens":
            assert request.min_new_tokens == min(int(literal), 20)
        elif name in READ:
            assert READ[name](request) == json.loads(literal)
    for literal in interval.outside():
        error = await sender.refused(name, literal)
        assert "must be" in error
        assert f"got {json.loads(literal)!r}" in error
    huge = "1" + "0" * 400
    for literal in ('"1"', "true", "false", "[]", "{}", '""', "[1]", huge, "-" + huge):
        await sender.refused(name, literal)
    if interval.whole:
        for literal in ("1.0", "1e0", "2.5", "1e400"):
            await sender.refused(name, literal)
    else:
        # An integer is right for a float field; an infinite number is not.
        if interval.holds(1):
            await sender.accepted(name, "1")
        for literal in ("1e400", "-1e400"):
            await sender.refused(name, literal)
    request = await sender.accepted(name, "null")
    if name == "top_k":
        assert request.sampling.top_k == (None if sender.endpoint.dialect == "native" else 0)
    elif name in DEFAULTS:
        assert READ[name](request) == DEFAULTS[name]


@pytest.mark.parametrize("name", BOOLEANS)
async def test_booleans(sender: Sender, name: str) -> None:
    for literal in ("true", "false"):
        request = await sender.accepted(name, literal)
        if name in READ:
            assert READ[name](request) is json.loads(literal)
    for literal in ("1", "0", '"true"', "1.0", "[]", "[true]", "{}", '""'):
        assert await sender.refused(name, literal) == (f"{name} must be boolean type, got {_shown(literal)}.")
    request = await sender.accepted(name, "null")
    if name in READ:
        assert READ[name](request) is DEFAULTS[name]


def _shown(literal: str) -> str:
    return {"[]": "an array of 0", "[true]": "an array of 1", "{}": "an object"}.get(literal, literal)


async def test_stop(sender: Sender) -> None:
    longest = "x" * 256
    accepted = {
        '"."': (".",),
        '["a","b"]': ("a", "b"),
        "[]": (),
        "null": (),
        json.dumps(longest): (longest,),
        json.dumps([longest] * 16): (longest,) * 16,
        '" "': (" ",),
        '"好"': ("好",),
    }
    for literal, stop in accepted.items():
        assert (await sender.accepted("stop", literal)).stop == stop
    for literal in ('""', '[""]', json.dumps("x" * 257), json.dumps(["a", "x" * 257]), json.dumps(["a"] * 17)):
        await sender.refused("stop", literal)
    for literal in ("1", "true", "{}", '["a",null]', "[1]", '[["a"]]'):
        await sender.refused("stop", literal)
    assert "stop[1]" in await sender.refused("stop", '["a",1]')


async def test_sampling_is_on_when_a_sampling_field_is_given(sender: Sender) -> None:
    for name, literal in (("temperature", "0.5"), ("top_k", "5"), ("top_p", "0.5")):
        assert (await sender.accepted(name, literal)).sampling.do_sample is True
        assert (await sender.accepted(name, literal, ',"do_sample":false')).sampling.do_sample is False
        assert (await sender.accepted(name, literal, ',"do_sample":null')).sampling.do_sample is True
        assert (await sender.accepted(name, "null")).sampling.do_sample is False
    for name, literal in (("seed", "5"), ("repetition_penalty", "1.2"), ("typical_p", "0.5"), ("min_p", "0.1")):
        assert (await sender.accepted(name, literal)).sampling.do_sample is False


async def test_min_new_tokens_is_lowered_to_the_output_length(sender: Sender) -> None:
    assert (await sender.accepted("min_new_tokens", "7")).min_new_tokens == 7
    assert (await sender.accepted("min_new_tokens", "30")).min_new_tokens == 20
    # 512 is the fake model's maxIterTimes; the engine lowers max_new_tokens to it.
    request = await sender.accepted("min_new_tokens", "1000", ',"max_new_tokens":2000')
    assert (request.min_new_tokens, request.max_new_tokens) == (512, 2000)


@pytest.mark.parametrize("endpoint", ENDPOINTS[:3], ids=IDS[:3])
async def test_parameters_is_an_object(endpoint: Endpoint) -> None:
    async with client_of(app_with(FakeEngine())) as client:
        for literal in ("[]", '"{}"', "1", "true"):
            response = await client.post(endpoint.path, content=f'{{{endpoint.prompt},"parameters":{literal}}}')
            assert response.status_code == 422
            assert response.json()["error"].startswith("parameters must be object type, got ")
        for literal in ("{}", "null"):
            response = await client.post(endpoint.path, content=f'{{{endpoint.prompt},"parameters":{literal}}}')
            assert response.status_code == 200


async def test_stream_of_the_native_dialect() -> None:
    async with client_of(app_with(FakeEngine())) as client:
        for literal, media_type in (
            ("true", "text/event-stream"),
            ("false", "application/json"),
            ("null", "application/json"),
        ):
            for endpoint in ENDPOINTS[:2]:
                response = await client.post(endpoint.path, content=f'{{{endpoint.prompt},"stream":{literal}}}')
                assert response.status_code == 200
                assert response.headers["content-type"] == media_type
        for literal in ("1", '"true"', "[]", "{}"):
            response = await client.post("/infer", content=f'{{"inputs":"Hi","stream":{literal}}}')
            assert response.status_code == 422
            assert response.json()["error"].startswith("stream must be boolean type, got ")
        # On v2 the URL decides.
        response = await client.post("/v2/models/smollm2/generate", content='{"text_input":"Hi","stream":true}')
        assert response.headers["content-type"] == "application/json"


def test_the_table_has_these_rules_and_no_others() -> None:
    """A field that is added to the table must be added here, from its document."""
    others = {"inputs", "input_id", "text_input", "id", "stream", "parameters", "stop"}
    for dialect in Dialect:
        rules = {
            field.name: (field, rule)
            for field in FIELDS
            if (rule := field.rule(dialect)) is not None and rule.place is not Place.INPUTS_ITEM
        }
        intervals = INTERVALS[dialect.value]
        assert set(rules) - others == {*intervals, *BOOLEANS}
        for name, interval in intervals.items():
            field, rule = rules[name]
            assert rule.bounds == Bounds(interval.low, interval.high, interval.low_open, interval.high_open), name
            assert _is_whole(field) is interval.whole
        assert all(rules[name][0].kind is Kind.BOOLEAN for name in BOOLEANS)


def _is_whole(field: Field) -> bool:
    return field.kind in (Kind.INTEGER, Kind.UNSIGNED)
