"""All GPU checks, in one command of at most 8 minutes.

    python -m benchmarks.gpu OUT [--tiny] [--part NAME ...]

Needs torch, triton, numpy, safetensors and tokenizers; with pytest (and xdist, hypothesis) the GPU tests run too. Each
step is a separate process with a time limit, and writes its JSON into OUT as it proceeds: a step that fails or hangs
costs only its own results. All processes share one cache of compiled kernels. `summary.json` has the status of each
step and the end of its output; `gpu-check.tar.gz` holds logs and traces. Exits with 1 if a step failed. `--tiny` runs
the same steps with minimal sizes on a CPU, in Triton's interpreter; `--part` reruns selected steps.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.gpu.steps import TOTAL_S, Step, steps

ROOT = Path(__file__).resolve().parents[2]
_HOME = ROOT / ".bench/gpu"
ARCHIVE, SUMMARY = "gpu-check.tar.gz", "summary.json"
_SLOWER = 6
"""Factor on the time limits on a shared CPU."""
_MAX_ARCHIVE_BYTES, _MAX_LOG_BYTES, _TAIL = 15 * 2**20, 2**20, 2_000
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a step; `code` None: it was stopped at its limit."""

    name: str
    command: str
    code: int | None
    seconds: float
    limit_s: float
    output_tail: str


def main() -> None:
    """Run the steps, write the summary and the archive after each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--tiny", action="store_true", help="each step at its smallest, on a CPU")
    parser.add_argument("--part", nargs="+", default=[], metavar="NAME", help="only these steps")
    options = parser.parse_args()
    out, scratch = options.out.resolve(), _HOME / "work"
    wanted = [step for step in steps(out, scratch, tiny=options.tiny) if step.name in options.part or not options.part]
    wanted = [step for step in wanted if options.part or not step.is_extra]
    if len(wanted) < len(set(options.part)):
        names = ", ".join(step.name for step in steps(out, scratch, tiny=options.tiny))
        parser.error(f"--part: {' '.join(options.part)} is not a step; choose from {names}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    out.mkdir(parents=True, exist_ok=True)
    if not options.part:
        shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True, exist_ok=True)
    ended = run_all(wanted, out, scratch, scale=_SLOWER if options.tiny else 1)
    sys.exit(any(step.code != 0 for step in ended))


def run_all(wanted: Sequence[Step], out: Path, scratch: Path, *, scale: float) -> list[Ended]:
    """Run the stages within the total time; keep other steps' entries of earlier runs."""
    summary = out / SUMMARY
    rows = {row["name"]: row for row in json.loads(summary.read_text())} if summary.exists() else {}
    began_s, ended = time.monotonic(), []
    for _, stage in groupby(wanted, key=lambda step: step.stage):
        left_s = scale * TOTAL_S - (time.monotonic() - began_s)
        for step in run_stage(list(stage), scratch, scale=scale, left_s=left_s):
            ended.append(step)
            print(f"{step.name}: {step.code} after {step.seconds:.0f} of {step.limit_s:.0f} s", flush=True)
            rows[step.name] = asdict(step)
            _write(summary, json.dumps(list(rows.values()), indent=1) + "\n")
        archive(scratch, out / ARCHIVE)
    print(f"{time.monotonic() - began_s:.0f} s in all", flush=True)
    return ended


def run_stage(stage: Sequence[Step], scratch: Path, *, scale: float, left_s: float) -> Iterator[Ended]:
    """Run steps concurrently; yield each as it ends or reaches its limit. All their processes are ended."""
    began_s = time.monotonic()
    running = {step: _started(step, scratch, interpreted=scale != 1) for step in stage}
    try:
        while running:
            time.sleep(_POLL_S)
            seconds = time.monotonic() - began_s
            for step, process in list(running.items()):
                limit_s = min(scale * step.limit_s, left_s)
                code = process.poll()
                if code is None and seconds < limit_s:
                    continue
                _kill(running.pop(step))
                tail = (scratch / f"{step.name}.txt").read_text(errors="replace")[-_TAIL:]
                yield Ended(step.name, " ".join(step.command), code, seconds, limit_s, tail)
    finally:
        for process in running.values():
            _kill(process)


def _started(step: Step, scratch: Path, *, interpreted: bool) -> subprocess.Popen[bytes]:
    variables = [f"TRITON_CACHE_DIR={_HOME / 'triton'}", "PYTHONUNBUFFERED=1", "HF_HUB_OFFLINE=1"]
    variables += ["TRITON_INTERPRET=1", "OMP_NUM_THREADS=1"] if interpreted else []
    with (scratch / f"{step.name}.txt").open("w") as output:
        return subprocess.Popen(
            ("/usr/bin/env", *variables, *step.command),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, which would otherwise keep GPU memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def archive(scratch: Path, path: Path) -> None:
    """Pack logs and traces, smallest first, up to the maximal transfer size; long logs are cut to their end."""
    for log in scratch.glob("*.txt"):
        if log.stat().st_size > _MAX_LOG_BYTES:
            log.write_bytes(log.read_bytes()[-_MAX_LOG_BYTES:])
    packed, used = path.with_suffix(".part"), 0
    with tarfile.open(packed, "w:gz") as file:
        for member in sorted(
            (member for member in scratch.rglob("*") if member.is_file()), key=lambda member: member.stat().st_size
        ):
            used += member.stat().st_size
            if used <= _MAX_ARCHIVE_BYTES:
                file.add(member, member.relative_to(scratch).as_posix())
            else:
                print(f"{member.name} is too large for {path.name}: {member.stat().st_size:,} bytes", flush=True)
    packed.replace(path)


def _write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    main()
