"""What the real torch_npu sees of the simulated machine."""

from __future__ import annotations

import pytest
import torch

from npu_sim.simulator.process import run_simulated
from npu_sim.simulator.state import State


def test_torch_npu_finds_the_device(npu: State) -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == "Ascend910B4"
    assert torch.accelerator.current_accelerator() == torch.device("npu")


def test_memory_is_as_large_as_asked(npu: State) -> None:
    free, total = torch.npu.mem_get_info()
    assert total == 1024 << 20
    assert free <= total
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert npu.used_bytes[0] >= kept.nbytes
    assert torch.npu.mem_get_info()[0] == total - npu.used_bytes[0]


def test_visible_devices_are_numbered_from_zero() -> None:
    printed = run_simulated(
        """
        import torch
        from npu_sim.simulator.state import own
        kept = torch.zeros(8 << 20, dtype=torch.uint8, device="npu:1")
        print(torch.npu.device_count(), [bool(used) for used in own().used_bytes])
        """,
        NPU_SIM_DEVICES="4",
        ASCEND_RT_VISIBLE_DEVICES="1,3,9,0",
    )
    assert printed.split("\n")[-2] == "2 [False, False, False, True, False, False, False, False]"


def test_without_devices_there_is_no_npu() -> None:
    printed = run_simulated(
        "import torch; print(torch.npu.is_available(), torch.npu.device_count())", NPU_SIM_DEVICES="0"
    )
    assert printed.split("\n")[-2] == "False 0"


@pytest.mark.parametrize(
    ("soc", "bfloat16", "attention"),
    [
        ("Ascend910B4", True, "npu::npu_fusion_attention_v3"),
        ("Ascend910_9392", True, "npu::npu_fusion_attention_v3"),
        ("Ascend310P3", False, "aten::softmax"),
    ],
)
def test_chips_differ_as_the_wheel_knows_them(soc: str, bfloat16: bool, attention: str) -> None:
    printed = run_simulated(
        """
        import torch
        from npu_sim.simulator.log import record
        query = torch.randn(1, 4, 8, 64).half().npu()
        with torch.inference_mode(), record() as log:
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        print(torch.npu.get_device_name(0), torch.npu.is_bf16_supported())
        print(*log.native)
        try:
            print(float((torch.ones(2).bfloat16().npu() + 1).sum()))
        except RuntimeError as error:
            print(error)
        """,
        NPU_SIM_SOC=soc,
    ).split("\n")
    assert printed[-4] == f"{soc} {bfloat16}"
    assert any(name.startswith(attention) for name in printed[-3].split()), printed
    assert printed[-2] == ("4.0" if bfloat16 else f"aten::add.Tensor takes no bfloat16 on {soc}, error code is 161002")
