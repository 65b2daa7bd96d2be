"""The table of accelerators, and parsing of their names."""

import subprocess
import sys

import pytest

from models.errors import InvalidRequest
from pipelines.planner.devices import DEVICES, device_of_driver, parse_gpus
from pipelines.planner.step_time import group_link


def test_the_table_loads_without_torch_and_numpy() -> None:
    """The table loads without importing torch or numpy."""
    script = "import sys, pipelines.planner.devices; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "name", "number"),
    [
        ("8xh100", "h100", 8),
        ("4 x 4090", "rtx4090", 4),
        ("128xA100-80", "a100-80", 128),
        ("a100_40gb", "a100-40", 1),
        ("2xH200", "h200", 2),
        ("2 x A100 80GB", "a100-80", 2),
        ("8xNVIDIA H100 80GB HBM3", "h100", 8),
        ("8xh100-sxm5", "h100", 8),
        ("H100SXM580GB", "h100", 1),
        ("2xH100 NVL", "h100-nvl", 2),
        ("8xA800-80GB", "a800", 8),
        ("h800", "h800", 1),
        ("H20 96GB", "h20", 1),
        ("tesla-v100-sxm2-16gb", "v100-16", 1),
        ("Tesla T4", "t4", 1),
        ("RTX A6000", "a6000", 1),
        ("2 x RTX 5090", "rtx5090", 2),
        ("rtx 6000 ada", "rtx6000-ada", 1),
        ("72xGB200-NVL72", "gb200", 72),
        ("A100-PCIE-80GB", "a100-pcie", 1),
    ],
)
def test_gpus_are_a_number_and_a_name(text: str, name: str, number: int) -> None:
    """Names are parsed in any case and in the spellings of published tables."""
    gpus = parse_gpus(text)

    assert (gpus.device.name, gpus.number) == (name, number)


@pytest.mark.parametrize(
    "text", ["", "8x", "0xh100", "8xh1000", "-1xh100", "h100x8", "a100-41", "l4-24-24", f"{10**9}xh100"]
)
def test_other_gpus_are_refused_by_the_option(text: str) -> None:
    """The error states the valid values."""
    with pytest.raises(InvalidRequest, match=r"--gpus: .*; give "):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_drivers_name_leads_to_its_row(name: str, device: str | None) -> None:
    """The longest matching prefix counts, and L4 does not match L40S."""
    match = device_of_driver(name)

    assert (match.name if match else None) == device


def test_a_row_is_complete() -> None:
    """Each row has a source, and figures of a plausible magnitude."""
    for device in DEVICES:
        assert device.source, device.name
        assert 0.5 < device.flops_per_s["bf16"] / 300e12 < 10 or device.flops_per_s["bf16"] < 200e12, device.name
        assert device.flops_per_s["fp32"] < device.flops_per_s["bf16"], device.name
        assert 200e9 < device.memory_bytes_per_s < 10e12, device.name
        assert device.network_bytes_per_s <= device.node_link_bytes_per_s, device.name


def test_a_bridge_joins_two_gpus_only() -> None:
    """Two GPUs with a bridge use it, four use PCIe."""
    gpus = parse_gpus("4xa6000")

    assert group_link(gpus, size=2, span=2) == ("NVLink bridge", 56.25e9)
    assert group_link(gpus, size=4, span=4) == ("PCIe 4.0", 32e9)
