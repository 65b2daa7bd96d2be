"""Accelerators by their data sheets: FLOP/s, memory, bandwidth and links. Standard library only.

FLOP/s are dense. Memory is in GiB, as drivers report it. A link's bandwidth is one direction's, per GPU. The network
between nodes is that of the vendor's own system, or the assumption that `source` states.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from models.errors import InvalidRequest

GIB = 2**30
_GPUS = re.compile(r"(?:(\d+)\s*[x*])?\s*([a-z0-9_.-]+(?: [a-z0-9_.-]+)*)", re.IGNORECASE)
_MAX_DIGITS = 6
"""Of a number of GPUs: the planner tries every divisor."""
_VENDORS = re.compile(r"^(?:nvidia|amd|tesla|geforce|instinct|quadro)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    People write its name as `base`, each of `marks`, and any of `qualifiers`, in any case and with any separators.
    `starts` are the beginnings of the names under which its driver reports it.
    """

    name: str
    chip: str
    """The chip on it: A100s of either memory share a chip, as do H100 and H200."""
    base: str
    marks: tuple[str, ...] = ()
    qualifiers: tuple[str, ...] = ()
    starts: tuple[str, ...]
    flops_per_s: Mapping[str, float]
    """By dtype of the products: fp32, bf16 (fp16 on a device without bf16, see `half`), fp8."""
    half: str = "bf16"
    """The 16-bit dtype of `flops_per_s["bf16"]`."""
    memory_bytes: float
    memory_bytes_per_s: float
    node_link: str
    """What connects the GPUs of a node."""
    node_link_bytes_per_s: float
    pair_link: tuple[str, float] | None = None
    """A bridge between two GPUs of a node, with its bytes per second."""
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
    base: str = "",
    marks: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    fp8: float | None = None,
    network_gb_per_s: float = 12.5,
    chip: str = "",
    pair: tuple[str, float] | None = None,
    half: str = "bf16",
    gpus_per_node: int = 8,
) -> Device:
    """Return a device from figures in the data sheet's units: TFLOP/s, GiB, GB/s."""
    rates = {"fp32": fp32 * 1e12, "bf16": bf16 * 1e12} | ({} if fp8 is None else {"fp8": fp8 * 1e12})
    return Device(
        name=name,
        chip=chip or name,
        base=base or name,
        marks=marks,
        qualifiers=also,
        starts=starts,
        flops_per_s=rates,
        half=half,
        memory_bytes=gib * GIB,
        memory_bytes_per_s=gb_per_s * 1e9,
        node_link=link[0],
        node_link_bytes_per_s=link[1] * 1e9,
        pair_link=pair and (pair[0], pair[1] * 1e9),
        network_bytes_per_s=network_gb_per_s * 1e9,
        gpus_per_node=gpus_per_node,
        source=source,
    )


_PCIE3, _PCIE4, _PCIE5 = ("PCIe 3.0", 16.0), ("PCIe 4.0", 32.0), ("PCIe 5.0", 64.0)
_ASSUMED = "; network assumed: 100 Gb/s a GPU"

DEVICES = (
    _device(
        "a100-40",
        chip="a100",
        base="a100",
        marks=("40",),
        also=("sxm4", "sxm"),
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
        base="a100",
        also=("80", "sxm4", "sxm"),
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
        "a100-pcie",
        chip="a100",
        base="a100",
        marks=("pcie",),
        also=("80",),
        starts=("NVIDIA A100 80GB PCIe",),
        bf16=312,
        fp32=19.5,
        gib=80,
        gb_per_s=1935,
        link=_PCIE4,
        pair=("NVLink bridge", 300),
        network_gb_per_s=25,
        source="NVIDIA A100 data sheet (2021), PCIe" + _ASSUMED,
    ),
    _device(
        "a800",
        chip="a100",
        also=("80", "sxm4", "sxm"),
        starts=("NVIDIA A800",),
        bf16=312,
        fp32=19.5,
        gib=80,
        gb_per_s=2039,
        link=("NVLink 3", 200),
        network_gb_per_s=25,
        source="NVIDIA A800 data sheet (2022): an A100 with NVLink at 400 GB/s both ways; network as the DGX A100",
    ),
    _device(
        "h100",
        also=("80", "sxm5", "sxm"),
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
        base="h100",
        marks=("pcie",),
        also=("80",),
        starts=("NVIDIA H100 PCIe",),
        bf16=756,
        fp32=51,
        fp8=1513,
        gib=80,
        gb_per_s=2000,
        link=_PCIE5,
        pair=("NVLink bridge", 300),
        network_gb_per_s=25,
        source="NVIDIA H100 data sheet (2023), PCIe; network assumed: 200 Gb/s a GPU",
    ),
    _device(
        "h100-nvl",
        base="h100",
        marks=("nvl",),
        also=("94",),
        starts=("NVIDIA H100 NVL",),
        bf16=835.5,
        fp32=60,
        fp8=1671,
        gib=94,
        gb_per_s=3900,
        link=_PCIE5,
        pair=("NVLink bridge", 300),
        network_gb_per_s=25,
        source="NVIDIA H100 data sheet (2024), NVL; network assumed: 200 Gb/s a GPU",
    ),
    _device(
        "h800",
        chip="h100",
        also=("80", "sxm5", "sxm"),
        starts=("NVIDIA H800",),
        bf16=989.4,
        fp32=66.9,
        fp8=1978.9,
        gib=80,
        gb_per_s=3350,
        link=("NVLink 4", 200),
        network_gb_per_s=50,
        source="NVIDIA H800 data sheet (2023): an H100 with NVLink at 400 GB/s both ways; network as the DGX H100",
    ),
    _device(
        "h20",
        also=("96", "sxm5", "sxm"),
        starts=("NVIDIA H20",),
        bf16=148,
        fp32=44,
        fp8=296,
        gib=96,
        gb_per_s=4000,
        link=("NVLink 4", 450),
        network_gb_per_s=50,
        source="NVIDIA H20 data sheet (2023), 96 GB; network assumed: 400 Gb/s a GPU",
    ),
    _device(
        "h200",
        chip="h100",
        also=("141", "sxm5", "sxm"),
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
        also=("180", "192", "sxm6", "sxm"),
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
        "gb200",
        chip="b200",
        also=("186", "192", "nvl72"),
        starts=("NVIDIA GB200",),
        bf16=2500,
        fp32=80,
        fp8=5000,
        gib=185,
        gb_per_s=8000,
        link=("NVLink 5", 900),
        network_gb_per_s=50,
        gpus_per_node=72,
        source="NVIDIA GB200 NVL72 data sheet (2024), a 72nd of the rack, one NVLink domain; network: 400 Gb/s a GPU",
    ),
    _device(
        "l40s",
        also=("48",),
        starts=("NVIDIA L40S",),
        bf16=362,
        fp32=91.6,
        fp8=733,
        gib=48,
        gb_per_s=864,
        link=_PCIE4,
        source="NVIDIA L40S data sheet (2023)" + _ASSUMED,
    ),
    _device(
        "l40",
        also=("48",),
        starts=("NVIDIA L40",),
        bf16=181,
        fp32=90.5,
        fp8=362,
        gib=48,
        gb_per_s=864,
        link=_PCIE4,
        source="NVIDIA L40 data sheet (2022)" + _ASSUMED,
    ),
    _device(
        "l4",
        also=("24",),
        starts=("NVIDIA L4",),
        bf16=121,
        fp32=30.3,
        fp8=242,
        gib=24,
        gb_per_s=300,
        link=_PCIE4,
        source="NVIDIA L4 data sheet (2023)" + _ASSUMED,
    ),
    _device(
        "t4",
        also=("16",),
        starts=("Tesla T4", "NVIDIA T4"),
        bf16=65,
        fp32=8.1,
        half="fp16",
        gib=16,
        gb_per_s=320,
        link=_PCIE3,
        source="NVIDIA T4 data sheet (2019), fp16" + _ASSUMED,
    ),
    _device(
        "v100",
        also=("32", "sxm2", "sxm3", "sxm"),
        starts=("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "NVIDIA V100"),
        bf16=125,
        fp32=15.7,
        half="fp16",
        gib=32,
        gb_per_s=900,
        link=("NVLink 2", 150),
        source="NVIDIA V100 data sheet (2020), SXM2, fp16; network of the DGX-2: 8 x 100 Gb/s",
    ),
    _device(
        "v100-16",
        chip="v100",
        base="v100",
        marks=("16",),
        also=("sxm2", "sxm"),
        starts=("Tesla V100-SXM2-16GB",),
        bf16=125,
        fp32=15.7,
        half="fp16",
        gib=16,
        gb_per_s=900,
        link=("NVLink 2", 150),
        source="NVIDIA V100 data sheet (2020), SXM2, fp16; network of the DGX-2: 8 x 100 Gb/s",
    ),
    _device(
        "v100-pcie",
        chip="v100",
        base="v100",
        marks=("pcie",),
        also=("32",),
        starts=("Tesla V100-PCIE-32GB",),
        bf16=112,
        fp32=14,
        half="fp16",
        gib=32,
        gb_per_s=900,
        link=_PCIE3,
        source="NVIDIA V100 data sheet (2020), PCIe, fp16" + _ASSUMED,
    ),
    _device(
        "a10",
        also=("24", "g"),
        starts=("NVIDIA A10",),
        bf16=125,
        fp32=31.2,
        gib=24,
        gb_per_s=600,
        link=_PCIE4,
        source="NVIDIA A10 data sheet (2021)" + _ASSUMED,
    ),
    _device(
        "a30",
        also=("24",),
        starts=("NVIDIA A30",),
        bf16=165,
        fp32=10.3,
        gib=24,
        gb_per_s=933,
        link=_PCIE4,
        pair=("NVLink bridge", 100),
        source="NVIDIA A30 data sheet (2022)" + _ASSUMED,
    ),
    _device(
        "a40",
        also=("48",),
        starts=("NVIDIA A40",),
        bf16=149.7,
        fp32=37.4,
        gib=48,
        gb_per_s=696,
        link=_PCIE4,
        pair=("NVLink bridge", 56.25),
        source="NVIDIA A40 data sheet (2021)" + _ASSUMED,
    ),
    _device(
        "a6000",
        also=("48",),
        starts=("NVIDIA RTX A6000",),
        bf16=154.8,
        fp32=38.7,
        gib=48,
        gb_per_s=768,
        link=_PCIE4,
        pair=("NVLink bridge", 56.25),
        source="NVIDIA Ampere GA102 paper, appendix (2021); RTX A6000 data sheet" + _ASSUMED,
    ),
    _device(
        "rtx6000-ada",
        base="6000",
        marks=("ada",),
        also=("48", "generation"),
        starts=("NVIDIA RTX 6000 Ada",),
        bf16=364.2,
        fp32=91.1,
        fp8=728.5,
        gib=48,
        gb_per_s=960,
        link=_PCIE4,
        source="NVIDIA RTX 6000 Ada data sheet (2023)" + _ASSUMED,
    ),
    _device(
        "rtx5090",
        base="5090",
        also=("32",),
        starts=("NVIDIA GeForce RTX 5090",),
        bf16=209.5,
        fp32=104.8,
        fp8=419,
        gib=32,
        gb_per_s=1792,
        link=_PCIE5,
        source="NVIDIA RTX Blackwell architecture paper, appendix A (2025), fp32 accumulation" + _ASSUMED,
    ),
    _device(
        "rtx4090",
        base="4090",
        also=("24",),
        starts=("NVIDIA GeForce RTX 4090",),
        bf16=165.2,
        fp32=82.6,
        fp8=330.3,
        gib=24,
        gb_per_s=1008,
        link=_PCIE4,
        source="NVIDIA Ada architecture paper, appendix A (2023)" + _ASSUMED,
    ),
    _device(
        "rtx3090",
        base="3090",
        also=("24",),
        starts=("NVIDIA GeForce RTX 3090",),
        bf16=71,
        fp32=35.6,
        gib=24,
        gb_per_s=936,
        link=_PCIE4,
        source="NVIDIA Ampere GA102 paper, appendix A (2021)" + _ASSUMED,
    ),
    _device(
        "mi300x",
        also=("192", "oam"),
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
"""If several prefixes of a driver's name match, the longest wins."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """A number of equal devices, in nodes of `device.gpus_per_node`."""

    device: Device
    number: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes; the last may be partly used."""
        return -(-self.number // self.device.gpus_per_node)


def device_named(name: str, field: str = "--gpus") -> Device:
    """Return the device of this name, in any case and with any separators, or as its driver reports it.

    Raises InvalidRequest naming `field` and the nearest names.
    """
    if (reported := device_of_driver(name.strip())) is not None:
        return reported
    wanted = _VENDORS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
    wanted = re.sub(r"(?<=\d)gb|hbm\d?e?", "", re.sub(r"^rtx", "", wanted))
    matches = [device for device in DEVICES if _is_written(device, wanted)]
    if matches:
        return max(matches, key=lambda device: (len(device.base), len(device.marks)))
    names = [device.name for device in DEVICES]
    near = get_close_matches(name.strip().lower(), names, n=3, cutoff=0.5)
    fix = f"give {' or '.join(near)}; known: " if near else "give one of "
    raise InvalidRequest(field, f"unknown device {name.strip()!r}", fix + ", ".join(names))


def _is_written(device: Device, text: str) -> bool:
    """Whether a text without separators is the device's base, all its marks and any of its qualifiers, in any order."""
    if not text.startswith(device.base):
        return False
    words = sorted((*device.marks, *device.qualifiers), key=len, reverse=True)
    found = re.findall("|".join(map(re.escape, words)), rest) if (rest := text[len(device.base) :]) and words else []
    return "".join(found) == rest and set(device.marks) <= set(found) and len(found) == len(set(found))


def device_of_driver(name: str) -> Device | None:
    """Return the device that torch reports under this name (`torch.cuda.get_device_name`), None if unknown."""
    found = [(start, device) for device in DEVICES for start in device.starts if _is_start(start, name)]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else None


def parse_gpus(text: str) -> Gpus:
    """Read `8xh100`; without a number, one GPU. Raises InvalidRequest."""
    match = _GPUS.fullmatch(text.strip())
    if match is None or (match[1] and not match[1].strip("0")):
        raise InvalidRequest("--gpus", f"{text!r} is not a number and a device", "give such as 8xh100 or 1xl4")
    if len(match[1] or "") > _MAX_DIGITS:
        raise InvalidRequest("--gpus", f"over {10**_MAX_DIGITS - 1:,} GPUs", "give a smaller number")
    return Gpus(device_named(match[2]), int(match[1] or 1))


def _is_start(start: str, name: str) -> bool:
    """Whether a name begins with these words: `NVIDIA L4` does not begin `NVIDIA L40S`; `A10` begins `A10G`."""
    rest = name[len(start) :]
    return name.startswith(start) and not re.match(r"\d", rest)
