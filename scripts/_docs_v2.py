"""docs/protocols/v2.md: the v2 protocol over HTTP, with tables made from the code's."""

from __future__ import annotations

from tengserve_adapter.http.settings import HttpSettings
from tengserve_adapter.http.tensor_body import MAX_CONTAINERS, MAX_VALUES
from tengserve_adapter.http.triton_errors import CODES, STATUSES
from tengserve_adapter.protocols.predict import MAX_INSTANCES
from tengserve_adapter.protocols.triton_generate import NOT_ONE_RESPONSE
from tengserve_adapter.tensors.json_data import MAX_NESTING
from tengserve_backend.errors import RequestError, TengserveError
from tengserve_backend.generation import triton
from tengserve_backend.inference import Datatype
from tengserve_backend.inference.llm import OUTPUTS
from tengserve_backend.inference.unary import MAX_JOINED_BYTES

_MIB = 1024 * 1024

_PAGE = f"""# The v2 protocol over HTTP

<!-- Made by scripts/docs from scripts/_docs_v2.py and the tables that it reads; change those instead. -->

What Triton's and KServe's v2 clients use, for LLMs and for models of tensors. Every path with `/v2/models/{{model}}`
also exists with `/versions/{{version}}` behind the model; without it the newest version that is ready answers. A body
is read as what it is, whatever its Content-Type. An error is `{{"error": "a sentence"}}`.

| endpoint | for | page |
| --- | --- | --- |
| `POST /v2/models/{{model}}/infer` | every model | below |
| `POST /v2/models/{{model}}/generate`, `/generate_stream` | models of tensors | below |
| the same | LLMs | [generate](generate.md); the fields of Triton's LLM backends below |
| `POST /v1/models/{{model}}:predict` | LLMs | below |
| `GET /v2/health/*`, `/v2`, `/v2/models/{{model}}`, `/ready` | every model | [health](health.md) |
| `/v2/repository/*`, configuration, statistics, log and trace settings | all models | [control](model-control.md) |

## Infer

```
curl http://127.0.0.1:8080/v2/models/smollm2/infer \\
  -d '{{"inputs": [{{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["My name is"]}}]}}'
```

The same with Triton's client (`pip install "tritonclient[http]"`):

```python
import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient("127.0.0.1:8080")
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(np.array([b"My name is"], np.object_))
result = client.infer("smollm2", [prompt], parameters={{"max_tokens": 20, "temperature": 0.0}})
print(result.as_numpy("text_output")[0].decode())
```

**Request.** `id`, `parameters`, `inputs` with `name`, `shape`, `datatype`, `parameters` and `data`, and `outputs` with
`name` and `parameters`. `data` is a list in any nesting (at most {MAX_NESTING} deep), read row-major. Datatypes:
@DATATYPES@. FP16 and BF16 only as binary data. Integers outside of their datatype, and finite numbers outside of FP32,
are refused, not wrapped. NaN and Infinity may be written by these names.

**Parameters.** `priority` (0 is the default, 1 the highest), `timeout` in microseconds, `sequence_id`,
`sequence_start`, `sequence_end` and `binary_data_output` are the protocol's. Names that begin with `triton_`, and
`headers`, are refused. All others go to the model. With `--http-header-forward-pattern REGEX` the headers whose names
match, in lower case as they arrive, are parameters of a python model too, as strings; one wins over a parameter of its
name, one with a name of the protocol's is refused, and one of more than 128 characters is left out.

**Binary data.** With the header `Inference-Header-Content-Length: N` the body is N bytes of JSON, and then the elements
of every input that has the parameter `binary_data_size`, in order. An output comes as binary data when its parameter
`binary_data`, or else the request's `binary_data_output`, is true; the answer then has the same header and the
Content-Type `application/octet-stream`. With N = 0 the whole body is the elements of the only input of a model (BYTES:
one element), and the outputs are binary.

**Outputs.** All, or those that are named. `classification: k` answers with the k largest values, each as
`value:index:label`; without the label where the output has none for that index.

**Compression.** `Content-Encoding: gzip` or `deflate` (a zlib container) in, and out by `Accept-Encoding`. Another one
is answered with 501.

**Limits.** A body of {HttpSettings().max_tensor_bytes // _MIB} MiB, before and after it is decompressed
(`--max-tensor-bytes`); {MAX_VALUES // _MIB} Mi values and {MAX_CONTAINERS // 1024} Ki arrays and objects in the JSON,
for each takes far more memory than it has characters. Binary data has no such limit.

### Decoupled models

A decoupled model, as every LLM is, answers with exactly one response: texts of one element are joined to one text,
other tensors along their first dimension, up to {MAX_JOINED_BYTES // _MIB} MiB. `--strict-decoupled` refuses with
501, as Triton does.

### An LLM as a model of tensors

One of `text_input` (BYTES, one element) and `input_ids` (INT32, INT64 or UINT32, `[n]` or `[1, n]`); the fields of the
table below and the sampling fields of [generate](generate.md) as request parameters or as tensors of one element. A
parameter that is none of them is refused. Outputs: @OUTPUTS@. Without `outputs` only `text_output` comes, with
`output_ids` when the prompt was `input_ids`, and those that a `return_...` field asks for.

As in the vLLM backend the prompt comes before the text unless `exclude_input_in_output` or `stream` is true.

### MindIE's token infer

On the same path: one UINT32 input with `data`, whatever its name (but `input_ids`), its sampling parameters in
`inputs[0].parameters`, and exactly one output, which must be named. The answer is
`{{"id", "outputs": [{{"name", "shape": [1, k], "datatype": "UINT32", "data"}}]}}`. Errors are MindIE's, with
`error_type` ([errors](errors.md)).

## Load of an LLM in its answers

An answer of an LLM's text endpoints (`generate`, `generate_stream`, `/infer`, `/infer_token`, `:predict`) to a request
with the header `endpoint-load-metrics-format: json` or `text` has the header `endpoint-load-metrics`, as in ORCA and
Triton: `JSON {{"named_metrics":{{"kv_cache_utilization":0.25,"max_token_capacity":8192}}}}`, or
`TEXT named_metrics.kv_cache_utilization=0.25, named_metrics.max_token_capacity=8192`. It says how it is when the answer
begins: which part of the KV cache requests hold, and how many tokens it has room for. Another format has no header.

## Generate for models of tensors

Triton's mapping. A key that is the name of an input is that tensor, a scalar or a flat list, with the datatype and
shape of the metadata: fixed dimensions divide the number of elements, the last open one takes the rest, others are 1.
`id` is the request's id. `parameters` is an object whose members count as keys of the body. Every other key is a
parameter: a string, number or boolean. Of a response every parameter and output is a key; one element loses its list,
several lose their shape.

`generate` needs exactly one response and otherwise answers 500, `{NOT_ONE_RESPONSE}`.
`generate_stream` has one event a response, `data: {{json}}` and a blank line, Content-Type
`text/event-stream; charset=utf-8`. Status and headers go out with the first response. An error before the model answers
is plain JSON with its status; the model's own first error has its status and is an event; a later one is an event.

## Fields of Triton's LLM backends

In the body of generate for an LLM, at top level or under `parameters`, and in infer. A body with one of them, or with
its prompt as an array of one string, is read as a Triton client's: an array of one stands for its element, numbers and
booleans may be texts, temperature 0 is greedy, top_k -1 is the whole vocabulary, and seed 0 is a seed. All other rules
are those of [generate](generate.md), and so is the answer; what is asked for comes as a key beside `text_output`.

| field | kind | meaning | of |
| --- | --- | --- | --- |
@FIELDS@
In generate the prompt is repeated only when `exclude_input_in_output` is false, which a stream cannot.

## v1 predict

`{{"instances": [...], "parameters": {{...}}}}` with 1 to {MAX_INSTANCES} instances, each a text or an object of
generate; what an instance says wins over `parameters`. All are generated at once; the answer is `{{"predictions":
[text, ...]}}`, or the first error.

## Errors

| status | when |
| --- | --- |
@ERRORS@
A model's own error has the status of its code: @CODES@.

## Where this differs from Triton

- The server's name in its metadata is tengserve, unless `--server-name` says `triton`, for clients that look for it.
- Infer answers for decoupled models; see above.
- A client that leaves ends its request at once, in infer and generate too; Triton sees it at its next write.
- `generate` answers more or fewer than one response with 500; Triton's status is 200 with the same text.
- `id` in generate is the request's id only, and no parameter besides.
- Sampling defaults of an LLM are those of generate: greedy, 20 tokens; the vLLM backend samples 16.
- An LLM refuses parameters that it does not know, with their name; `bad_words`, beams and several answers a prompt are
  refused too.
- The JSON of a tensor has a limit of values; see above.
- Shared memory is refused with 400. A negative dimension is too; Triton answers 500.
- A request with both Content-Length and Transfer-Encoding is refused with 400.
"""


def _fields() -> str:
    rows = []
    for field in triton.FIELDS:
        meaning = field.description
        if field.stands_for:
            meaning += f" Another name of `{field.stands_for}`."
        if field.only is not None:
            meaning += f" Only {str(field.only).lower()}."
        if field.bounds is not None:
            meaning += f" Must be {field.bounds}."
        rows.append(f"| `{field.name}` | {field.kind.value} | {meaning} | {field.source} |\n")
    return "".join(rows)


def _errors() -> str:
    special = {RequestError: "Anything else that is wrong with the request", TengserveError: "A failure of the server"}
    rows = []
    for error, status in sorted(STATUSES.items(), key=lambda item: item[1]):
        doc = special.get(error) or (error.__doc__ or "").strip().splitlines()[0].rstrip(".")
        rows.append(f"| {status} | {doc[0].upper()}{doc[1:]} |\n")
    return "".join(rows)


def render() -> dict[str, str]:
    """The page, by its path."""
    outputs = ", ".join(f"`{spec.name}` {spec.datatype.value}" for spec in OUTPUTS)
    codes = ", ".join(f"{code.name} {status}" for code, status in CODES.items())
    text = _PAGE
    for mark, value in (
        ("@DATATYPES@", ", ".join(datatype.value for datatype in Datatype)),
        ("@OUTPUTS@", outputs),
        ("@FIELDS@\n", _fields() + "\n"),
        ("@ERRORS@\n", _errors() + "\n"),
        ("@CODES@", codes),
    ):
        text = text.replace(mark, value)
    return {"docs/protocols/v2.md": text}
