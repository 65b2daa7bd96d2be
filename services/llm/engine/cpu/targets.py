"""The processors for which the library is built ahead, where it is to run without a compiler, and which of them suit one.

Knows no files and runs nothing.
"""

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processor. `flags` are the words by which Linux tells it (/proc/cpuinfo), all of which it must have."""

    name: str
    machine: str
    options: tuple[str, ...]
    flags: frozenset[str] = frozenset()


# The levels are those of the x86-64 psABI. Linux calls LZCNT `abm`, and SSE3 and below are implied by AVX.
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BYTES = _V4 | {"avx512_vnni"}
_BF16 = _BYTES | {"avx512_bf16"}
_TILES = _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}

_BYTES_OPTIONS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_OPTIONS = (*_BYTES_OPTIONS, "-mavx512bf16")

TARGETS = (
    Target("x86-64-v4-amx", "x86_64", (*_BF16_OPTIONS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"), _TILES),
    Target("x86-64-v4-bf16", "x86_64", _BF16_OPTIONS, _BF16),
    Target("x86-64-v4-vnni", "x86_64", _BYTES_OPTIONS, _BYTES),
    Target("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Target("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Target("armv8-a", "aarch64", ("-march=armv8-a",)),
)
"""Best first, for each machine."""


def targets_of(machine: str) -> tuple[Target, ...]:
    """Return what is built for a machine (`uname -m`), best first; empty for a machine that is not known."""
    return tuple(target for target in TARGETS if target.machine == machine)


def suitable(machine: str, flags: Set[str]) -> tuple[Target, ...]:
    """Return what runs on a processor with these flags, best first."""
    return tuple(target for target in targets_of(machine) if target.flags <= flags)
