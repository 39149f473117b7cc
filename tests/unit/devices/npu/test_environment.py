from __future__ import annotations

from pathlib import Path

import pytest

from tengserve_backend.devices.npu.environment import prepare, visibility
from tengserve_backend.devices.npu.versions import Versions, installed_versions


def test_segments_grow_unless_the_operator_decided() -> None:
    environ: dict[str, str] = {}
    assert prepare(environ) == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert environ == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_nothing_is_set_over_the_operators_choice(name: str) -> None:
    environ = {name: "max_split_size_mb:256"}
    assert prepare(environ) == {}
    assert environ == {name: "max_split_size_mb:256"}


def test_visibility_names_both_variables() -> None:
    text = visibility({"ASCEND_VISIBLE_DEVICES": "3"})
    assert "ASCEND_RT_VISIBLE_DEVICES is not set" in text
    assert 'ASCEND_VISIBLE_DEVICES is "3"' in text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "aarch64-linux/ascend_toolkit_install.info",
            "package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n",
        ),
        ("compiler/version.info", "Version=9.1.0\n"),
    ],
)
def test_the_version_of_cann_is_read_from_its_folder(tmp_path: Path, file: str, text: str) -> None:
    place = tmp_path / file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    assert installed_versions({"ASCEND_HOME_PATH": str(tmp_path)}).cann == "9.1.0"


def test_a_cann_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    versions = installed_versions({"ASCEND_HOME_PATH": str(tmp_path / "absent")})
    assert versions.cann == ""
    assert "CANN unknown" in str(versions)


@pytest.mark.parametrize(
    ("torch", "torch_npu", "agree"),
    [
        ("2.10.0+cpu", "2.10.0.post4", True),
        ("2.10.1", "2.10.0", True),
        ("2.13.0", "2.10.0", False),
        ("2.1.0", "2.10.0", False),
        ("2.13.0", "", True),
    ],
)
def test_torch_and_torch_npu_share_their_minor_version(torch: str, torch_npu: str, agree: bool) -> None:
    assert (Versions(torch, torch_npu, "").disagreement == "") is agree
