"""Accelerators by their data sheets: FLOP/s, memory, bandwidth and links. Needs the standard library alone.

FLOP/s are dense, without the sparsity that data sheets like to print. GPUs' gigabytes of memory are GiB, as drivers report them. A link's bandwidth
is one direction's, of one GPU. Between nodes no data sheet of a GPU decides: the network is that of the vendor's own system with 8 of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from models.errors import InvalidRequest

GIB = 2**30
_GPUS = re.compile(r"(?:(\d+)\s*[x*])?\s*([a-z0-9_.-]+(?: [a-z0-9_.-]+)*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator. `starts` are the beginnings of the names under which its driver reports it, `aliases` what people write for it."""

    name: str
    chip: str
    """The chip on it: A100s of either memory have the same, and so have H100 and H200."""
    aliases: tuple[str, ...] = ()
    starts: tuple[str, ...]
    flops_per_s: Mapping[str, float]
    """By dtype of the products: fp32, bf16 (fp16 where there is no bf16), fp8."""
    memory_bytes: float
    memory_bytes_per_s: float
    node_link: str
    """What connects the GPUs of a node."""
    node_link_bytes_per_s: float
    network_bytes_per_s: float
    """Between nodes, a GPU's own share."""
    gpus_per_node: int = 8
    source: str


def _device(
    name: str,
    *,
    starts: tuple[str, ...],
    bf16: float,
    fp32: float,
    gib: float,
    gb_per_s: float,
    link: tuple[str, float],
    source: str,
    fp8: float | None = None,
    network_gb_per_s: float = 12.5,
    aliases: tuple[str, ...] = (),
    chip: str = "",
) -> Device:
    """Return a device from figures in the data sheet's units: TFLOP/s, GiB, GB/s."""
    rates = {"fp32": fp32 * 1e12, "bf16": bf16 * 1e12} | ({} if fp8 is None else {"fp8": fp8 * 1e12})
    return Device(
        name=name,
        chip=chip or name,
        aliases=aliases,
        starts=starts,
        flops_per_s=rates,
        memory_bytes=gib * GIB,
        memory_bytes_per_s=gb_per_s * 1e9,
        node_link=link[0],
        node_link_bytes_per_s=link[1] * 1e9,
        network_bytes_per_s=network_gb_per_s * 1e9,
        source=source,
    )


_PCIE4, _PCIE5 = ("PCIe 4.0", 32.0), ("PCIe 5.0", 64.0)

DEVICES = (
    _device(
        "a100-40",
        chip="a100",
        aliases=("a100-40gb", "a100-sxm4-40gb"),
        starts=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        bf16=312,
        fp32=19.5,
        gib=40,
        gb_per_s=1555,
        link=("NVLink 3", 300),
        network_gb_per_s=25,
        source="NVIDIA A100 data sheet (2021); network of the DGX A100: 8 x 200 Gb/s",
    ),
    _device(
        "a100-80",
        chip="a100",
        aliases=("a100", "a100-80gb", "a100-sxm4-80gb"),
        starts=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB", "NVIDIA A100"),
        bf16=312,
        fp32=19.5,
        gib=80,
        gb_per_s=2039,
        link=("NVLink 3", 300),
        network_gb_per_s=25,
        source="NVIDIA A100 data sheet (2021); network of the DGX A100: 8 x 200 Gb/s",
    ),
    _device(
        "h100",
        aliases=("h100-80", "h100-80gb", "h100-sxm"),
        starts=("NVIDIA H100 80GB HBM3",),
        bf16=989.4,
        fp32=66.9,
        fp8=1978.9,
        gib=80,
        gb_per_s=3350,
        link=("NVLink 4", 450),
        network_gb_per_s=50,
        source="NVIDIA H100 data sheet (2023), SXM; network of the DGX H100: 8 x 400 Gb/s",
    ),
    _device(
        "h100-pcie",
        starts=("NVIDIA H100 PCIe",),
        bf16=756,
        fp32=51,
        fp8=1513,
        gib=80,
        gb_per_s=2000,
        link=_PCIE5,
        network_gb_per_s=25,
        source="NVIDIA H100 data sheet (2023), PCIe",
    ),
    _device(
        "h200",
        chip="h100",
        aliases=("h200-141", "h200-141gb"),
        starts=("NVIDIA H200",),
        bf16=989.4,
        fp32=66.9,
        fp8=1978.9,
        gib=140.4,
        gb_per_s=4800,
        link=("NVLink 4", 450),
        network_gb_per_s=50,
        source="NVIDIA H200 data sheet (2024), SXM; network of the DGX H200: 8 x 400 Gb/s",
    ),
    _device(
        "b200",
        aliases=("b200-180",),
        starts=("NVIDIA B200",),
        bf16=2250,
        fp32=75,
        fp8=4500,
        gib=179,
        gb_per_s=7700,
        link=("NVLink 5", 900),
        network_gb_per_s=50,
        source="NVIDIA HGX B200 data sheet (2025); network of the DGX B200: 8 x 400 Gb/s",
    ),
    _device(
        "l40s",
        starts=("NVIDIA L40S",),
        bf16=362,
        fp32=91.6,
        fp8=733,
        gib=48,
        gb_per_s=864,
        link=_PCIE4,
        source="NVIDIA L40S data sheet (2023); network assumed: 100 Gb/s a GPU",
    ),
    _device(
        "l4",
        aliases=("l4-24",),
        starts=("NVIDIA L4",),
        bf16=121,
        fp32=30.3,
        fp8=242,
        gib=24,
        gb_per_s=300,
        link=_PCIE4,
        source="NVIDIA L4 data sheet (2023); network assumed: 100 Gb/s a GPU",
    ),
    _device(
        "a10",
        aliases=("a10g",),
        starts=("NVIDIA A10",),
        bf16=125,
        fp32=31.2,
        gib=24,
        gb_per_s=600,
        link=_PCIE4,
        source="NVIDIA A10 data sheet (2021); network assumed: 100 Gb/s a GPU",
    ),
    _device(
        "rtx4090",
        aliases=("4090", "rtx-4090"),
        starts=("NVIDIA GeForce RTX 4090",),
        bf16=165.2,
        fp32=82.6,
        fp8=330.3,
        gib=24,
        gb_per_s=1008,
        link=_PCIE4,
        source="NVIDIA Ada architecture paper, appendix A (2023); network assumed: 100 Gb/s a GPU",
    ),
    _device(
        "rtx3090",
        aliases=("3090", "rtx-3090"),
        starts=("NVIDIA GeForce RTX 3090",),
        bf16=71,
        fp32=35.6,
        gib=24,
        gb_per_s=936,
        link=_PCIE4,
        source="NVIDIA Ampere GA102 paper, appendix A (2021); network assumed: 100 Gb/s a GPU",
    ),
    _device(
        "mi300x",
        starts=("AMD Instinct MI300X",),
        bf16=1307.4,
        fp32=163.4,
        fp8=2614.9,
        gib=192,
        gb_per_s=5300,
        link=("Infinity Fabric", 448),
        network_gb_per_s=50,
        source="AMD Instinct MI300X data sheet (2023); network assumed: 400 Gb/s a GPU",
    ),
)
"""Longer beginnings of a driver's name come first where one begins another."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """So many of one device, in nodes of `device.gpus_per_node`."""

    device: Device
    number: int

    @property
    def num_nodes(self) -> int:
        """Nodes that hold them, the last one perhaps in part."""
        return -(-self.number // self.device.gpus_per_node)


def device_named(name: str, field: str = "--gpus") -> Device:
    """Return the device that is written so, in any case, with spaces or hyphens, or as its driver reports it. Raises InvalidRequest with `field` and the names that are known."""
    wanted = re.sub(r"[ _-]+", "-", name.strip().lower())
    for device in DEVICES:
        if wanted in {device.name, *device.aliases}:
            return device
    if (reported := device_of_driver(name.strip())) is not None:
        return reported
    known = ", ".join(device.name for device in DEVICES)
    raise InvalidRequest(field, f"{name.strip()!r} is no device of the table", f"give one of {known}")


def device_of_driver(name: str) -> Device | None:
    """Return the device that torch reports under this name (`torch.cuda.get_device_name`), None where the table has none."""
    found = [(start, device) for device in DEVICES for start in device.starts if _is_start(start, name)]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else None


def parse_gpus(text: str) -> Gpus:
    """Read `8xh100`; without a number it is one. Raises InvalidRequest."""
    match = _GPUS.fullmatch(text.strip())
    if match is None or match[1] == "0":
        raise InvalidRequest("--gpus", f"{text!r} is no number of GPUs", "give such as 8xh100 or 1xl4")
    return Gpus(device_named(match[2]), int(match[1] or 1))


def _is_start(start: str, name: str) -> bool:
    """Whether a name begins with these words: `NVIDIA L4` begins `NVIDIA L4`, and not `NVIDIA L40S`; `A10` begins `A10G`."""
    rest = name[len(start) :]
    return name.startswith(start) and not re.match(r"\d", rest)
