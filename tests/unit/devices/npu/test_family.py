from __future__ import annotations

import pytest

from tengserve_backend.devices.npu.family import NpuFamily


@pytest.mark.parametrize(
    ("name", "family", "bfloat16"),
    [
        ("Ascend910A", NpuFamily.ASCEND_910, False),
        ("Ascend910B", NpuFamily.ASCEND_910, False),
        ("Ascend910ProB", NpuFamily.ASCEND_910, False),
        ("Ascend910PremiumA", NpuFamily.ASCEND_910, False),
        ("Ascend910B1", NpuFamily.ATLAS_A2, True),
        ("Ascend910B2C", NpuFamily.ATLAS_A2, True),
        ("Ascend910B4-1", NpuFamily.ATLAS_A2, True),
        ("Ascend910_9392", NpuFamily.ATLAS_A3, True),
        ("Ascend910_9362", NpuFamily.ATLAS_A3, True),
        ("Ascend310P3", NpuFamily.ASCEND_310P, False),
        ("Ascend310B1", NpuFamily.OTHER, None),
        ("Ascend950PR_9579", NpuFamily.ASCEND_950, True),
        ("", NpuFamily.OTHER, None),
    ],
)
def test_the_name_tells_the_family_and_the_family_the_number_format(
    name: str, family: NpuFamily, bfloat16: bool | None
) -> None:
    assert NpuFamily.of(name) is family
    assert family.has_bfloat16 is bfloat16
