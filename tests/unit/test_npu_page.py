from __future__ import annotations

from pathlib import Path

from tengserve_backend.devices.npu.errors import TABLE
from tengserve_backend.devices.npu.family import NpuFamily
from tengserve_backend.devices.npu.fusion import FUSIONS

PAGE = (Path(__file__).parents[2] / "docs" / "npu.md").read_text(encoding="utf-8")
NAMES = {
    NpuFamily.ATLAS_A2: "Atlas A2",
    NpuFamily.ATLAS_A3: "Atlas A3",
    NpuFamily.ASCEND_310P: "Atlas 300I (310P)",
    NpuFamily.ASCEND_910: "first generation",
    NpuFamily.ASCEND_950: "Ascend 950",
}


def test_every_error_that_is_told_apart_is_on_the_page() -> None:
    for row in TABLE:
        assert f"| {', '.join(map(str, row.codes))} | {row.meaning} |" in PAGE


def test_the_table_of_chips_says_what_the_code_does() -> None:
    for family, name in NAMES.items():
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
        parts = [cell.strip() for cell in line.strip("|").split("|")]
        fused = [fusion for fusion, each in FUSIONS.items() if family in each.families]
        assert parts[3] == (", ".join(fused) or "none"), name
        assert ("bf16" in parts[4]) is family.has_bfloat16, name


def test_nothing_is_claimed_of_hardware() -> None:
    assert "| *reported on hardware* |" not in PAGE
