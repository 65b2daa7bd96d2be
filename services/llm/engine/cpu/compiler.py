"""Finds or builds the library from the C++ sources of this folder, for this processor or for a target.

A library's file name is a hash of its sources, flags, compiler and processor. A prebuilt library of the same sources
for a target that this processor supports is used without a compiler; otherwise GCC builds the library (`g++`, or a
`c++` that is GCC). The library is linked against the OpenMP runtime that torch has loaded, so that both share a thread
pool; without OpenMP it is single-threaded.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent
PREBUILT = _SOURCES / "prebuilt"
"""Folder of prebuilt libraries; it may be absent."""

_MAIN = _SOURCES / "forward.cpp"
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC"),
    *("-fno-math-errno", "-fno-tree-pre"),  # with tree-pre GCC 12 keeps the int8 sums in memory instead of registers
    *("-Wno-psabi", "-Wno-ignored-attributes"),
)
_NATIVE = ("-march=native",)
_TIMEOUT_S = 300.0
_COMPILERS = ("g++", "c++")


@dataclass(frozen=True, slots=True)
class Target:
    """A class of processors to build for; a processor belongs to it if Linux reports all of `flags` (/proc/cpuinfo)."""

    name: str
    machine: str
    options: tuple[str, ...]
    flags: frozenset[str] = frozenset()


# Levels of the x86-64 psABI. Linux reports LZCNT as `abm`; SSE3 and below are implied by AVX.
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
"""For each machine, the most capable first."""


class BuildFailedError(Exception):
    """The library could not be built; the text is the reason, in one line."""


def targets_of(machine: str) -> tuple[Target, ...]:
    """Return the targets of a machine (`uname -m`), most capable first; empty for an unknown machine."""
    return tuple(target for target in TARGETS if target.machine == machine)


def suitable(machine: str, flags: Set[str]) -> tuple[Target, ...]:
    """Return the targets that a processor with these flags supports, most capable first."""
    return tuple(target for target in targets_of(machine) if target.flags <= flags)


def built_library(cache: Path, prebuilt: Path = PREBUILT) -> Path:
    """Return the path of a library for this processor, from `prebuilt` or else from `cache`.

    A library absent from the cache is built, only once by processes that start together. Raises BuildFailedError.
    """
    for target in suitable(platform.machine(), processor_flags()):
        library = prebuilt / _prebuilt_name(target)
        if library.exists():
            return library
    compiler = _find_compiler()
    made_with = (compiler, _run(compiler, "--version"), _processor(), str(_loaded_openmp()))
    library = cache / f"{_name(*made_with, *_NATIVE)}.so"
    if not library.exists():
        with _turn_in(cache):
            if not library.exists():
                _build(compiler, _NATIVE, library)
    return library


def build_ahead(target: Target, prebuilt: Path) -> Path:
    """Build the library for a target, which this processor need not support. Returns its path.

    Raises BuildFailedError.
    """
    library = prebuilt / _prebuilt_name(target)
    _build(_find_compiler(), target.options, library)
    return library


def processor_flags() -> frozenset[str]:
    """Return the feature flags that Linux reports for this processor."""
    return frozenset(_processor().split())


def _prebuilt_name(target: Target) -> str:
    """Name a prebuilt library: independent of the compiler and of the path of OpenMP, but not of OpenMP's file name."""
    openmp = _loaded_openmp()
    return f"{_name('' if openmp is None else openmp.name, *target.options)}-{target.name}.so"


def _name(*made_with: str) -> str:
    made_from = [*made_with, *_FLAGS]
    made_from += [path.read_text() for path in sorted(_SOURCES.iterdir()) if path.suffix in {".cpp", ".h"}]
    digest = hashlib.sha256("\n".join(made_from).encode()).hexdigest()
    return f"tailrace-{digest[:16]}"


def _build(compiler: str, options: Sequence[str], library: Path) -> None:
    """Build in a scratch folder and rename into place once it is on disk, so that no process loads half a library."""
    openmp = _loaded_openmp()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made, unlinked = Path(folder) / library.name, Path(folder) / "forward.o"
            threads = () if openmp is None else ("-fopenmp",)
            _run(compiler, *_FLAGS, *options, *threads, "-c", str(_MAIN), "-o", str(unlinked))
            _run(compiler, "-shared", str(unlinked), *([] if openmp is None else [str(openmp)]), "-o", str(made))
            with made.open("rb") as written:
                os.fsync(written.fileno())
            made.replace(library)
    except OSError as error:
        raise BuildFailedError(f"{library.parent} is not writable ({error})") from error


@contextmanager
def _turn_in(cache: Path) -> Iterator[None]:
    """Wait while another process builds in this folder; without locking support each process builds separately."""
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    try:
        folder = os.open(cache, os.O_RDONLY)
    except OSError:
        yield  # the build reports the problem
        return
    try:
        with suppress(OSError):  # NFS without folder locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _find_compiler() -> str:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None and "clang" not in _run(path, "--version"):
            return path
    raise BuildFailedError("no GCC is installed")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        complaint = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[:200])
        raise BuildFailedError(f"{Path(command[0]).name} failed ({complaint.strip()})") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailedError(f"{Path(command[0]).name} did not run ({error})") from error
    return done.stdout


def _loaded_openmp() -> Path | None:
    """Return the GNU OpenMP runtime among the files that this process has mapped (Linux).

    torch's runtime takes precedence if another package has loaded a copy of its own.
    """
    maps = Path("/proc/self/maps")
    libraries = re.findall(r"\s(/\S*libgomp\S*)$", maps.read_text(), re.MULTILINE) if maps.exists() else []
    paths = sorted(map(Path, libraries), key=lambda path: "torch" not in path.parts)
    return paths[0] if paths else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^(flags|Features)\s*:.*$", info.read_text(), re.MULTILINE) if info.exists() else None
    return platform.machine() + (match.group(0) if match else "")
