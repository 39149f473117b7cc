"""Which kind of Ascend chip a device is. What it can do follows from the kind, and the kind from its name."""

from __future__ import annotations

import enum
import re


class NpuFamily(enum.Enum):
    """Chips that share their number formats and operators; the values are for people."""

    ASCEND_910 = "Ascend 910 of the first generation"
    ATLAS_A2 = "Atlas A2 (Ascend 910B)"
    ATLAS_A3 = "Atlas A3 (Ascend 910C)"
    ASCEND_310P = "Ascend 310P"
    ASCEND_950 = "Ascend 950"
    OTHER = "another Ascend chip"

    @classmethod
    def of(cls, soc_name: str) -> NpuFamily:
        """The family of a chip.

        Args:
            soc_name: as torch.npu.get_device_name gives it. "Ascend910B" without a digit is a variant of the first
                generation, Ascend910B1 to B4 are Atlas A2, and Ascend910_93xx are Atlas A3.
        """
        return next((family for pattern, family in _NAMES if pattern.match(soc_name)), cls.OTHER)

    @property
    def has_bfloat16(self) -> bool | None:
        """Whether it computes in bfloat16; None when only the device can tell. torch-npu does not check it, so a kernel
        would fail in the first step."""
        if self is NpuFamily.OTHER:
            return None
        return self in (NpuFamily.ATLAS_A2, NpuFamily.ATLAS_A3, NpuFamily.ASCEND_950)


_NAMES = (
    (re.compile(r"Ascend910B\d"), NpuFamily.ATLAS_A2),
    (re.compile(r"Ascend910_93\d\d"), NpuFamily.ATLAS_A3),
    (re.compile(r"Ascend910(A|B|Pro|Premium)"), NpuFamily.ASCEND_910),
    (re.compile(r"Ascend310P"), NpuFamily.ASCEND_310P),
    (re.compile(r"Ascend950"), NpuFamily.ASCEND_950),
)
