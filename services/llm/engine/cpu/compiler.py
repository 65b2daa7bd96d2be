"""Finds or builds the library that the C++ sources of this folder make: ahead for kinds of processors, or once for the one at hand.

A library is kept under a name made of what it was made from. One that was built ahead, from these very sources and for this
processor, needs no compiler; building needs GCC (`g++`, or a `c++` that is one). The library is linked against the OpenMP
runtime that torch has loaded, so that both share one pool of threads; without one it runs on a single thread. Knows nothing
of what is in the sources.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.llm.engine.cpu.targets import Target, suitable

_SOURCES = Path(__file__).parent
PREBUILT = _SOURCES / "prebuilt"
"""Where libraries built ahead lie, if there are any."""

_MAIN = _SOURCES / "forward.cpp"
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC"),
    *("-fno-math-errno", "-fno-tree-pre"),  # without the latter GCC 12 keeps int8's sums in memory instead of registers
    *("-Wno-psabi", "-Wno-ignored-attributes"),
)
_NATIVE = ("-march=native",)
_TIMEOUT_S = 300.0
_COMPILERS = ("g++", "c++")


class BuildFailedError(Exception):
    """The library could not be built here; the text says why, on one line."""


def built_library(cache: Path, prebuilt: Path = PREBUILT) -> Path:
    """Return the library's path: one from `prebuilt` that fits, else below `cache`, built first if it is not there.

    Raises BuildFailedError.
    """
    for target in suitable(platform.machine(), processor_flags()):
        library = prebuilt / _prebuilt_name(target)
        if library.exists():
            return library
    compiler = _find_compiler()
    made_with = (compiler, _run(compiler, "--version"), _processor(), str(_loaded_openmp()))
    library = cache / f"{_name(*made_with, *_NATIVE)}.so"
    if not library.exists():
        _build(compiler, _NATIVE, library)
    return library


def build_ahead(target: Target, prebuilt: Path) -> Path:
    """Build the library for a kind of processor, which need not be the one at hand, and give its path.

    Raises BuildFailedError.
    """
    library = prebuilt / _prebuilt_name(target)
    _build(_find_compiler(), target.options, library)
    return library


def processor_flags() -> frozenset[str]:
    """Return what Linux calls the abilities of the processor at hand."""
    return frozenset(_processor().split())


def _prebuilt_name(target: Target) -> str:
    """Name a library built ahead: it runs beside one build of OpenMP, wherever that lies, and by any compiler."""
    openmp = _loaded_openmp()
    return f"{_name('' if openmp is None else openmp.name, *target.options)}-{target.name}.so"


def _name(*made_with: str) -> str:
    made_from = [*made_with, *_FLAGS]
    made_from += [path.read_text() for path in sorted(_SOURCES.iterdir()) if path.suffix in {".cpp", ".h"}]
    digest = hashlib.sha256("\n".join(made_from).encode()).hexdigest()
    return f"tailrace-{digest[:16]}"


def _build(compiler: str, options: Sequence[str], library: Path) -> None:
    """Build beside the target and move it there once it is on disk, so that nobody ever sees half a library."""
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
        raise BuildFailedError(f"{library.parent} cannot be written to ({error})") from error


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
    """Find the GNU OpenMP runtime among the files that this process has mapped (Linux)."""
    maps = Path("/proc/self/maps")
    found = re.findall(r"\s(/\S*libgomp\S*)$", maps.read_text(), re.MULTILINE) if maps.exists() else []
    return Path(found[0]) if found else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^(flags|Features)\s*:.*$", info.read_text(), re.MULTILINE) if info.exists() else None
    return platform.machine() + (found.group(0) if found else "")
