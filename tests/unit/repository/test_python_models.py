"""Folders of python models: what is found, what is refused, and the configuration as Triton prints it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.config_json import config_json, from_json, normalized, parse_config_json
from tengserve_backend.repository.pbtxt import parse_config
from tengserve_backend.repository.scan import scan_repository
from tengserve_backend.repository.source import Backend, ModelSource

PYTHON = 'backend: "python"\n'


def control(kind: str, values: str, *names: str) -> str:
    """Sequence batching with control inputs of one kind."""
    inputs = [
        f'{{ name: "{name}" control [{{ kind: CONTROL_SEQUENCE_{kind} {values} }}] }}' for name in names or ("B",)
    ]
    return f"sequence_batching {{ control_input [{', '.join(inputs)}] }}"


def scanned(root: Path, config: str | None, files: tuple[str, ...] = ("1/model.py",)) -> ModelSource:
    for file in files:
        (root / "m" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "m" / file).write_text("")
    if config is not None:
        (root / "m" / "config.pbtxt").write_text(config)
    (source,) = scan_repository(root)
    return source


def test_a_python_model_is_found_with_its_whole_configuration(tmp_path: Path) -> None:
    source = scanned(tmp_path, PYTHON + "max_batch_size: 4 instance_group [{ count: 2 }]")
    assert (source.backend, source.name, source.version) == (Backend.PYTHON, "m", "1")
    assert source.config["max_batch_size"] == 4
    assert source.config["instance_group"][0] | {"gpus": None} == {
        "name": "m_0",
        "kind": "KIND_CPU",
        "count": 2,
        "gpus": None,
        "secondary_devices": [],
        "profile": [],
        "passive": False,
        "host_policy": "",
    }


@pytest.mark.parametrize("config", [None, "", "max_batch_size: 2"])
def test_a_model_file_says_the_backend(tmp_path: Path, config: str | None) -> None:
    assert scanned(tmp_path, config).backend is Backend.PYTHON


def test_the_model_file_may_have_another_name(tmp_path: Path) -> None:
    source = scanned(tmp_path, PYTHON + 'default_model_filename: "mine.py"', ("1/mine.py",))
    assert source.config["default_model_filename"] == "mine.py"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('default_model_filename: "../x.py"', "default_model_filename must be the name of a file"),
        ('default_model_filename: "x.pt"', "ends in .py"),
        ('default_model_filename: "mine.py"', "version 1 has no mine.py"),
        ("max_batch_size: -1", "max_batch_size must be 0 or more, not -1"),
        ("ensemble_scheduling {}", "ensemble_scheduling is not supported for a python model"),
        ("input [{ data_type: TYPE_FP32 }]", 'input "" needs a name of its own'),
        ('input [{ name: "A" }, { name: "A" }]', 'input "A" needs a name of its own'),
        ('output [{ name: "A" dims: [0] }]', "a dimension must be positive, or -1 for any, not 0"),
        ('input [{ name: "A" dims: [1] reshape {} }]', "reshape may be empty only where max_batch_size is more than 0"),
        ('input [{ name: "A" dims: [4] reshape { shape: [2, 0] } }]', "must be positive, or -1 for any, not 0"),
        (
            'output [{ name: "A" dims: [4] reshape { shape: [3] } }]',
            r"reshape \[3\] must have as many elements as dims \[4\]",
        ),
        ('input [{ name: "A" dims: [2, -1, 6] reshape { shape: [4, -1, 3] } }]', "before, between and after"),
        ('input [{ name: "A" dims: [-1] reshape { shape: [-1, -1] } }]', "must have as many elements"),
        ('sequence_batching { state [{ input_name: "S" }] }', "state is not supported"),
        ("sequence_batching { iterative_sequence: true }", "iterative_sequence is not supported"),
        ('sequence_batching { control_input [{ name: "A" }] }', '"A" must have exactly 1 control, not 0'),
        (
            control("READY", "int32_false_true: [0]"),
            "CONTROL_SEQUENCE_READY needs two values in one of int32_false_true",
        ),
        (control("END", "int32_false_true: [0, 1] fp32_false_true: [0, 1]"), "needs two values in one of"),
        (control("CORRID", "data_type: TYPE_FP32"), "needs a data_type of TYPE_UINT64, .* not TYPE_FP32"),
        (control("CORRID", "data_type: TYPE_INT32 int32_false_true: [0, 1]"), "and no values"),
        (control("START", "int32_false_true: [0, 1]", "B", "C"), "CONTROL_SEQUENCE_START must have one tensor"),
        (control("START", "int32_false_true: [0, 1]", "B", "B"), 'control_input "B" needs a name of its own'),
        (
            'input [{ name: "B" data_type: TYPE_FP32 dims: [1] }] ' + control("START", "int32_false_true: [0, 1]"),
            'control_input "B" needs a name of its own',
        ),
        (
            f'input [{{ name: "B" data_type: TYPE_FP32 dims: {[2**62] * 9999} }}]',
            "dims must have at most 32 dimensions",
        ),
        (
            f'max_batch_size: 1 output [{{ name: "B" data_type: TYPE_FP32 dims: 1 reshape {{ shape: {[1] * 32} }} }}]',
            "reshape must have at most 31 dimensions, not 32",
        ),
        ("sequence_batching { oldest { max_candidate_sequences: 10001 } }", r"must be in \[0, 10000\], not 10001"),
        ("sequence_batching { direct { minimum_slot_utilization: 1.5 } }", r"must be in \[0, 1\], not 1.5"),
    ],
)
def test_what_a_python_model_cannot_have_is_refused(tmp_path: Path, config: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        scanned(tmp_path, PYTHON + config)


def test_what_has_no_effect_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    scanned(tmp_path, PYTHON + 'model_warmup [{ name: "w" batch_size: 1 }]')
    assert "m/config.pbtxt: model_warmup has no effect" in caplog.text


def test_the_json_has_every_default_and_numbers() -> None:
    config = parse_config(
        PYTHON
        + """
        input [{ name: "A" data_type: TYPE_INT64 dims: [-1, 3] }]
        dynamic_batching { priority_queue_policy { key: 2 value { max_queue_size: 7 } } }
        parameters { key: "k" value { string_value: "v" } }
        """,
        "m/config.pbtxt",
    ).config
    made = config_json(config)
    assert made["input"][0] == {
        "name": "A",
        "data_type": "TYPE_INT64",
        "format": "FORMAT_NONE",
        "dims": [-1, 3],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert (made["max_batch_size"], made["platform"], made["output"]) == (0, "", [])
    assert made["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert made["dynamic_batching"]["priority_queue_policy"]["2"]["max_queue_size"] == 7
    assert made["parameters"] == {"k": {"string_value": "v"}}
    assert "sequence_batching" not in made
    assert "model_transaction_policy" not in made


def test_the_json_can_be_read_back() -> None:
    config = parse_config(PYTHON + "max_batch_size: 3 version_policy { specific { versions: [2] } }", "c").config
    made = normalized(config, "m")
    assert made["version_policy"] == {"specific": {"versions": [2]}}
    assert normalized(from_json(made, "it"), "m") == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the load's config is no JSON"),
        ("[]", "must be a JSON object, not \\[\\]"),
        ('{"max_batchsize": 1}', "breaks the schema of config.pbtxt: .*max_batchsize"),
        ('{"max_batch_size": "x"}', "breaks the schema"),
        (r'{"\ud800": 1}', "breaks the schema of config.pbtxt: a name has half a character"),
    ],
)
def test_wrong_json_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse_config_json(text, "the load's config")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5_000])
def test_nesting_without_end_is_no_configuration(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no JSON"):
        parse_config_json(text, "the configuration")
