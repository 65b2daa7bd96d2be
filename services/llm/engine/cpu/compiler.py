"""Builds the C++ sources of this folder for the processor at hand, once: the library is kept under a name made of what it was made from.

Needs GCC (`g++`, or a `c++` that is one). The library is linked against the OpenMP runtime that torch has loaded, so that
both share one pool of threads; without one it runs on a single thread. Knows nothing of what is in the sources.
"""

import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent
_MAIN = _SOURCES / "forward.cpp"
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC"),
    *("-fno-math-errno", "-fno-tree-pre"),  # without the latter GCC 12 keeps int8's sums in memory instead of registers
    *("-Wno-psabi", "-Wno-ignored-attributes"),
)
_TIMEOUT_S = 120.0
_COMPILERS = ("g++", "c++")


class BuildFailedError(Exception):
    """The library could not be built here; the text says why, on one line."""


def built_library(cache: Path) -> Path:
    """Give the library's path below `cache`, built first if it is not there. Raises BuildFailedError."""
    compiler = _find_compiler()
    openmp = _loaded_openmp()
    made_from = [compiler, _run(compiler, "--version"), _processor(), str(openmp), *_FLAGS]
    made_from += [path.read_text() for path in sorted(_SOURCES.iterdir()) if path.suffix in {".cpp", ".h"}]
    name = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:16]
    library = cache / f"tailrace-{name}.so"
    if not library.exists():
        _build(compiler, openmp, library)
    return library


def _build(compiler: str, openmp: Path | None, library: Path) -> None:
    """Build beside the target and move it there, so that others never see half a library."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made, unlinked = Path(folder) / library.name, Path(folder) / "forward.o"
            threads = () if openmp is None else ("-fopenmp",)
            _run(compiler, *_FLAGS, *threads, "-c", str(_MAIN), "-o", str(unlinked))
            _run(compiler, "-shared", str(unlinked), *([] if openmp is None else [str(openmp)]), "-o", str(made))
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
