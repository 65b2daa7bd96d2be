"""Accelerators by their data sheets (`devices.toml`): FLOP/s, memory, bandwidth and links. Standard library only.

FLOP/s are dense. A link's bandwidth is one direction's, per GPU. The network between nodes is that of the vendor's own
system, or the assumption that `source` states.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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


def _device(row: Mapping[str, Any]) -> Device:
    rates = {dtype: row[dtype] * 1e12 for dtype in ("fp32", "bf16", "fp8") if dtype in row}
    link, pair = row["node_link"], row.get("pair_link")
    return Device(
        name=row["name"],
        chip=row.get("chip", row["name"]),
        base=row.get("base", row["name"]),
        marks=tuple(row.get("marks", ())),
        qualifiers=tuple(row.get("qualifiers", ())),
        starts=tuple(row["starts"]),
        flops_per_s=rates,
        half=row.get("half", "bf16"),
        memory_bytes=row["memory_gib"] * GIB,
        memory_bytes_per_s=row["memory_gb_per_s"] * 1e9,
        node_link=link[0],
        node_link_bytes_per_s=link[1] * 1e9,
        pair_link=pair and (pair[0], pair[1] * 1e9),
        network_bytes_per_s=row.get("network_gb_per_s", 12.5) * 1e9,
        gpus_per_node=row.get("gpus_per_node", 8),
        source=row["source"],
    )


DEVICES = tuple(map(_device, tomllib.loads(Path(__file__).with_name("devices.toml").read_text())["device"]))
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
    marks = re.findall("|".join(map(re.escape, words)), rest) if (rest := text[len(device.base) :]) and words else []
    return "".join(marks) == rest and set(device.marks) <= set(marks) and len(marks) == len(set(marks))


def device_of_driver(name: str) -> Device | None:
    """Return the device that torch reports under this name (`torch.cuda.get_device_name`), None if unknown."""
    matches = [(start, device) for device in DEVICES for start in device.starts if _is_start(start, name)]
    return max(matches, key=lambda pair: len(pair[0]))[1] if matches else None


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
