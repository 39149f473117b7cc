"""config.pbtxt: Triton's schema, errors with their place, and no quarrel with kserve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.pbtxt import MAX_CONFIG_BYTES, parse_config, read_config

FILE = "m/config.pbtxt"


def test_a_config_is_read_with_the_places_of_its_parameters() -> None:
    parsed = parse_config(
        """# key: "weights" in a comment is none
name: "m"
backend: "tengserve"
version_policy { specific { versions: [1, 3] } }
parameters { key: "maxSeqLen" value { string_value: "100" } }
parameters: {
  key: "weights"
  value: { string_value: "." }
}
""",
        FILE,
    )
    assert (parsed.config.name, parsed.config.backend) == ("m", "tengserve")
    assert list(parsed.config.version_policy.specific.versions) == [1, 3]
    assert parsed.parameters == {"maxSeqLen": "100", "weights": "."}
    assert parsed.lines == {"maxSeqLen": 5, "weights": 7}


def test_parameters_may_be_written_as_a_list() -> None:
    parsed = parse_config('parameters: [ { key: "device" value { string_value: "cpu" } } ]', FILE)
    assert parsed.parameters == {"device": "cpu"}


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ('name: "m"\nbackendd: "x"', 2, 1, 'unknown field "backendd": did you mean backend?'),
        ("max_batchsize: 0", 1, 1, "did you mean max_batch_size"),
        ('input [\n  { nam: "a" }\n]', 2, 5, 'unknown field "nam" in ModelInput: did you mean name?'),
        ("input { data_type: TYPE_FP23 }", 1, 20, "did you mean TYPE_FP32"),
        ("backend: tengserve", 1, 10, "Expected string"),
        ('name: "a', 1, 7, "missing ending quote"),
        ('name: "a"\nname: "b"', 2, 7, "multiple"),
        ("version_policy { all {} latest {} }", 1, 25, "oneof"),
        ("max_batch_size: 99999999999", 1, 17, "out of range"),
        ("parameters {", 1, None, ""),
    ],
)
def test_a_mistake_has_line_column_and_the_nearest_name(text: str, line: int, column: int | None, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_config(text, FILE)
    error = caught.value
    assert error.file == FILE
    assert error.line == line
    assert column is None or error.column == column
    assert says.lower() in error.message.lower()
    assert error.message.startswith(f"{FILE}:{line}:")


def test_a_parameter_that_is_set_twice_is_an_error() -> None:
    entry = 'parameters { key: "device" value { string_value: "cpu" } }\n'
    with pytest.raises(ConfigurationError, match=r'm/config\.pbtxt:1: parameter "device" is set twice'):
        parse_config(entry * 2, FILE)


def test_a_file_that_is_no_text_says_where(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'name: "m"\n# \xff\n')
    with pytest.raises(ConfigurationError, match=r"m/config\.pbtxt:2: the file is not UTF-8 text"):
        read_config(path, FILE)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigurationError, match="larger than"):
        read_config(path, FILE)


def test_a_missing_file_is_told_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        read_config(tmp_path / "config.pbtxt", FILE)
    assert str(tmp_path) not in caught.value.message


_READ = "from tengserve_backend.repository.pbtxt import parse_config; parse_config('name: \"m\"', 'f')"
# kserve parses sys.argv when it is imported; -c leaves nothing in it that it could take for its own.
_KSERVE = "import kserve"


@pytest.mark.parametrize("first_then_second", [f"{_READ}\n{_KSERVE}\n{_READ}", f"{_KSERVE}\n{_READ}"])
def test_kserve_can_be_imported_before_and_after(first_then_second: str) -> None:
    done = "import sys; print('ok' if not any(m.startswith('tritonclient') for m in sys.modules) else 'imported')"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{first_then_second}\n{done}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.strip().endswith("ok"), result.stderr


@pytest.mark.parametrize("text", ["name: " + "x" * 5000 + ": 1", "\x1b" * 5000, 'name: "' + "y\x07" * 5000, "{" * 5000])
def test_what_protobuf_says_is_cut_and_printable(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_config(text, "m/config.pbtxt")
    assert len(caught.value.message) < 2000
    assert caught.value.message.isprintable()
