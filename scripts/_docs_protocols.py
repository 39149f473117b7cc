"""docs/protocols/: the request fields of each dialect and the error replies, made from the adapter's tables."""

from __future__ import annotations

from tengserve_adapter.http.body import INLINE_BYTES, MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES
from tengserve_adapter.http.connection import HEAD_TIMEOUT_S, KEEP_ALIVE_S, MAX_HEAD_BYTES, MAX_PIPELINED, PROBES
from tengserve_adapter.http.errors import MAX_ERROR_BYTES, REPLIES
from tengserve_adapter.http.intake import MIN_BYTES_PER_S, RATE_WINDOW_S
from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.http.transport import CLOSE_TIMEOUT_S, DISCARD_TIMEOUT_S
from tengserve_backend.errors import RequestError, ServerError
from tengserve_backend.generation.checks import given
from tengserve_backend.generation.fields import Dialect, Field, Kind, Place, Rule, fields_of

_MADE = "<!-- Made by scripts/docs from {source}; change that file instead. -->"
_FIELDS_FROM = _MADE.format(source="tengserve_backend/generation/fields.py and scripts/_docs_protocols.py")
_CONNECTIONS_FROM = _MADE.format(source="tengserve_adapter/http/connection.py and scripts/_docs_protocols.py")
_ERRORS_FROM = _MADE.format(source="tengserve_adapter/http/errors.py and scripts/_docs_protocols.py")

_RULES = f"""
## Rules of values

- `null` counts as absent everywhere but in the prompt.
- An integer is a JSON integer: not `20.0`, `"20"` or `true`. A float field takes an integer too. NaN and infinities are
  refused.
- An unknown field is ignored, and counted in the metric `tengserve_ignored_fields_total`. A server that is started with
  `--log-level debug` logs the names.
- The body is read as UTF-8 JSON whatever its Content-Type; of equal keys the last wins. Arrays and objects may nest
  {MAX_DEPTH} deep; a body of more than {INLINE_BYTES // 1024} KiB holds at most {MAX_VALUES} values and
  {MAX_CONTAINERS} arrays and objects.
- A value that breaks its rule is answered with 422 and a sentence that names the field, the rule and the value
  ([errors](errors.md)).
"""

_MINDIE = """# MindIE native: /infer and /infer_token

@MADE@

`POST /infer` and `POST /infer_token` continue a prompt with the default model: the only one, or `--default-model`. Both
take `inputs` or `input_id`, as MindIE's server does; the URL decides the shape of `token.id`.

```
curl http://127.0.0.1:8080/infer -d '{"inputs": "My name is Olivier and I", "parameters": {"max_new_tokens": 20}}'
```

## Request

A field of `parameters` that stands at top level is an unknown field, and is ignored: put it under `parameters`.

@TABLE@@RULES@
## Answer

Text (`"stream": false`): `{"generated_text": ..., "details": {"finish_reason", "generated_tokens", "seed"}}`;
`details` is absent unless it was asked for.

Stream: one event a token, each `data: {json}` and a blank line, without `[DONE]`. The status and the headers go out
with the first event, so what goes wrong before it is a plain error with its real status.

- Every event but the last: `{"prefill_time", "decode_time", "token": {"id", "text"}}`. The first has `prefill_time`,
  the others `decode_time`, in milliseconds; the other one is null.
- The last: also `generated_text`, the whole text, and `details`, null unless asked for; its `token.text` is null.
- `token.id` is a number on `/infer` and a list of one on `/infer_token`.
- With the model's fullTextEnabled, `token.text` repeats the whole text so far.

`finish_reason` is `eos_token`, `stop_sequence` or `length`. `generated_tokens` counts a final end-of-sequence token,
which is not in the text. Closing the connection
ends the request ([connections](connections.md)).
"""

_GENERATE = """# v2 generate

@MADE@

`POST /v2/models/{model}/generate` answers with text, `POST /v2/models/{model}/generate_stream` with events; both
also exist under `/versions/{version}/`.

```
curl http://127.0.0.1:8080/v2/models/smollm2/generate \\
  -d '{"text_input": "My name is Olivier and I", "parameters": {"max_new_tokens": 20}}'
```

## Request

Fields may stand under `parameters`, as in MindIE's sample, or at top level, as in its table. The same field in
both places must have the same value.

@TABLE@@RULES@
## Answer

Text: `{"id", "model_name", "model_version": null, "text_output", "details"}`, where `details` is absent unless asked
for, and else `{"finish_reason", "generated_tokens", "first_token_cost": null, "decode_cost": null, "seed"}`.

Stream: one event a token, each `data: {json}` and a blank line, without `[DONE]`. An event has the same keys;
`text_output` is the text that is new, in the last event too (with the model's fullTextEnabled: the whole text so far).
With details, `generated_tokens` counts up, `finish_reason` and `seed` come with the last event, and `prefill_time` and
`decode_time` tell the time of the token in milliseconds.

`finish_reason` is `eos_token`, `stop_sequence` or `length`. Closing the connection
ends the request ([connections](connections.md)).
"""

_ERRORS = f"""# Errors

{_ERRORS_FROM}

An error is `{{"error": "a sentence", "error_type": "a word"}}`, at most {MAX_ERROR_BYTES} bytes, never with a traceback
or a path. Whatever goes wrong before the first event of a stream is answered like this, with its real status; after the
first event it is one more event, `data: {{"error": ..., "error_type": ...}}`, and then the stream ends.

| status | error_type | when |
| --- | --- | --- |
"""


_PROBES = ", ".join(f"`{path}`" for path in PROBES)

_CONNECTIONS = f"""# Connections

{_CONNECTIONS_FROM}

The server speaks HTTP/1.1, with keep-alive, to whoever reaches its port. HTTP/1.0 clients are answered without chunks,
and the connection closes. An offer to upgrade (HTTP/2, WebSocket) is ignored.

| what | bound | beyond it |
| --- | --- | --- |
| request line and headers | {MAX_HEAD_BYTES // 1024} KiB | 431, and the connection closes |
| time for them | {HEAD_TIMEOUT_S:g} s from the first byte | the connection closes |
| idle time between requests | {KEEP_ALIVE_S} s | the connection closes |
| a request's body | `--max-body-bytes`; with tensors, `--max-tensor-bytes` | 413 |
| time for it | {HttpSettings().body_timeout_s:g} s | 408 |
| its pace | {MIN_BYTES_PER_S} bytes a second, measured over {RATE_WINDOW_S:g} s | 408 |
| bodies that arrive or are parsed, together | `--max-held-body-bytes` | 429, with Retry-After |
| requests sent ahead on a connection | {MAX_PIPELINED} | no more are read until some are answered |
| connections | `--max-connections` | 503 with Retry-After; {_PROBES} are answered still |
| rest of a body that was answered early | {DISCARD_TIMEOUT_S:g} s | the connection closes |
| reading what is left of an answer when the connection closes | {CLOSE_TIMEOUT_S:g} s | the connection is reset |

All routes have these bounds, KServe's own included.

A client that closes its connection has left, and its request ends. A client that only closes its sending side, as
`nc -N` does, has left too: nothing on the wire tells the two apart until an answer is written, and an answer that
nobody waits for must not occupy the model. Keep the connection open in both directions until the answer is complete.

When the server stops, a body that has not arrived whole is answered with 503 and Retry-After at once.
"""

_LENGTHS = {
    Kind.STRING: "characters",
    Kind.PROMPT: "characters (a setting of the server)",
    Kind.TOKEN_IDS: "elements",
}


def _value(rule: Rule, kind: Kind) -> str:
    if rule.bounds is None:
        return kind.value
    if kind in _LENGTHS:
        return f"{kind.value}, {rule.bounds.low} to {rule.bounds.high} {_LENGTHS[kind]}"
    return f"{kind.value} {rule.bounds}"


def _default(rule: Rule) -> str:
    if rule.required:
        return "required"
    if rule.default is None:
        return rule.default_note
    return f"`{given(rule.default)}`"


def _row(field: Field, rule: Rule) -> str:
    text = f"{field.description} {field.effect}".strip()
    cells = (f"`{field.name}`", rule.place.value, _value(rule, field.kind), _default(rule), text, rule.source)
    return f"| {' | '.join(cells)} |"


def _table(dialect: Dialect) -> str:
    rows = [_row(field, rule) for field, rule in fields_of(dialect) if rule.place is not Place.INPUTS_ITEM]
    later = [_row(field, rule) for field, rule in fields_of(dialect) if rule.place is Place.INPUTS_ITEM]
    head = ["| field | place | value | default | meaning | source |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *rows, *later]) + "\n"


def _errors() -> str:
    rows = []
    for error, reply in sorted(REPLIES.items(), key=lambda item: item[1].status):
        if error in (RequestError, ServerError):
            continue
        doc = (error.__doc__ or "").strip().splitlines()[0].rstrip(".")
        notes = [f": `{reply.message}`" if reply.message else "", "; with Retry-After" if reply.retry_after_s else ""]
        rows.append(f"| {reply.status} | {reply.error_type} | {doc[0].upper()}{doc[1:]}{''.join(notes)} |")
    rows.append("| 404, 405 | NotFoundError, Method Not Allowed | No such URL, or not with this method |")
    rows.append("| 500 | Internal Server Error | A fault of the server; its log has the reason |")
    return _ERRORS + "\n".join(rows) + "\n"


def _page(template: str, dialect: Dialect) -> str:
    for mark, text in (("@MADE@", _FIELDS_FROM), ("@TABLE@", _table(dialect)), ("@RULES@", _RULES)):
        template = template.replace(mark, text)
    return template


def render() -> dict[str, str]:
    """The pages, by path."""
    return {
        "docs/protocols/mindie.md": _page(_MINDIE, Dialect.NATIVE),
        "docs/protocols/generate.md": _page(_GENERATE, Dialect.GENERATE),
        "docs/protocols/errors.md": _errors(),
        "docs/protocols/connections.md": _CONNECTIONS,
    }
