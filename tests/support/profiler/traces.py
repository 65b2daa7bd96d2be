"""Build Kineto traces by hand: events as torch's profiler writes them, times in microseconds."""

import gzip
import json
from pathlib import Path
from typing import Any


def kernel(name: str, start: float, length: float, *, stream: int = 7, device: int = 0, **args: Any) -> dict[str, Any]:
    return _on_device("kernel", name, start, length, stream, device, args)


def memcpy(start: float, length: float, *, stream: int = 7, device: int = 0, **args: Any) -> dict[str, Any]:
    return _on_device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", start, length, stream, device, args)


def memset(start: float, length: float, *, stream: int = 7, device: int = 0) -> dict[str, Any]:
    return _on_device("gpu_memset", "Memset (Device)", start, length, stream, device, {})


def operation(
    name: str, start: float, length: float, *, thread: int = 1, category: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 100,
        "tid": thread,
        "ts": start,
        "dur": length,
        "args": args,
    }


def _on_device(
    category: str, name: str, start: float, length: float, stream: int, device: int, args: dict[str, Any]
) -> dict[str, Any]:
    about = {"device": device, "stream": stream, **args}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": start,
        "dur": length,
        "args": about,
    }


def write(path: Path, events: list[Any], **about: Any) -> Path:
    """Write a trace, compressed if its name says so."""
    content = json.dumps({"schemaVersion": 1, **about, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
