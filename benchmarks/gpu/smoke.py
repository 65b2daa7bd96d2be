"""Basic GPU features that the engine needs: versions, empty and mixed-dtype products, a kernel, capture and replay.

    python -m benchmarks.gpu.smoke cuda OUT [--tiny]

A failed check is a row with its error, and the command exits with 1.
"""

import argparse
import gc
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.load.command import write_report
from services.llm.engine.device import DeviceStream
from services.llm.engine.gpu.forward import TritonOps
from services.llm.engine.gpu.graph_device import CapturedStep, CudaGraphDevice, GraphDevice

Check = Callable[[torch.device], Any]


def main() -> None:
    """Run the checks, write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="no difference: it is tiny")
    options = parser.parse_args()
    device, rows = torch.device(options.device), list[dict[str, Any]]()
    for check in (versions, products, kernel, replays, replays_after_the_end_of_another):
        began_s = time.monotonic()
        try:
            outcome, error = check(device), None
        except Exception:  # noqa: BLE001 - each check has its own result
            outcome, error = None, traceback.format_exc()
        seconds = round(time.monotonic() - began_s, 3)
        rows.append({"check": check.__name__, "seconds": seconds, "found": outcome, "error": error})
        print(rows[-1], flush=True)
        write_report(options.out, {"checks": rows})
    sys.exit(any(row["error"] for row in rows))


def versions(device: torch.device) -> dict[str, Any]:
    """Return versions and the device."""
    software = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cpu":
        return software
    about = torch.cuda.get_device_properties(device)
    return software | {
        "cuda": torch.version.cuda,
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
    }


def products(device: torch.device) -> str:
    """Multiply zero rows, and bf16 into fp32, as the head does. CPUs have no `out_dtype`."""
    left, right = torch.ones(4, 32, device=device).bfloat16(), torch.ones(32, 8, device=device).bfloat16()
    assert torch.mm(left[:0], right).shape == (0, 8)
    if device.type == "cpu":
        return "no out_dtype on a CPU"
    for rows in (0, 4):
        product = torch.mm(left[:rows], right, out_dtype=torch.float32)
        assert (product.dtype, product.shape) == (torch.float32, (rows, 8))
        assert bool((product == 32).all())
    return "ok"


def kernel(device: torch.device) -> float:
    """Compile and run one kernel; return its largest error."""
    x_TD, weight_D = torch.randn(3, 64, device=device), torch.rand(64, device=device)
    found_TD = TritonOps().rms_norm(x_TD, weight_D, 1e-6)
    wanted_TD = x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + 1e-6) * weight_D
    error = float((found_TD - wanted_TD).abs().max())
    assert error < 1e-5, error
    return error


def replays(device: torch.device) -> list[float]:
    """Capture a product and a kernel, change the input, replay."""
    stream = DeviceStream(device)
    with stream.entered(), torch.inference_mode():
        step, x_TD, weight_DD = _captured(device)
        sums = []
        for value in (1.0, 3.0):
            x_TD.fill_(value)
            sums.append(float(step.replay()[0].sum()))
    wanted = [float((torch.full((4, 64), value) @ weight_DD.float().cpu()).sum()) for value in (1.0, 3.0)]
    assert all(abs(a - b) < 0.01 * abs(b) + 1 for a, b in zip(sums, wanted, strict=True)), (sums, wanted)
    return sums


def replays_after_the_end_of_another(device: torch.device) -> list[float]:
    """Capture on two streams, free the first stream's graphs, overwrite their memory, replay: same results."""
    first, second = DeviceStream(device), DeviceStream(device)
    with first.entered(), torch.inference_mode():
        ending, *_ = _captured(device)
    with second.entered(), torch.inference_mode():
        step, x_TD, weight_DD = _captured(device)
        x_TD.fill_(1.0)
        before = float(step.replay()[0].sum())
        del ending, first
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        taken = [torch.full((2**20,), torch.nan, device=device) for _ in range(16)]
        eager = float((x_TD.fill_(1.0) @ weight_DD).sum())
        after = float(step.replay()[0].sum())
    assert len(taken) == 16
    assert after == before, (before, after, eager)
    return [before, after, eager]


def _captured(device: torch.device) -> tuple[CapturedStep, torch.Tensor, torch.Tensor]:
    x_TD = torch.ones(4, 64, device=device).bfloat16()
    weight_DD = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64).bfloat16()
    step = CapturedStep(_graph_device(device), lambda: (x_TD @ weight_DD,), [x_TD], lambda: None)
    step.warm_up()
    step.capture()
    return step, x_TD, weight_DD


def _graph_device(device: torch.device) -> GraphDevice:
    if device.type == "cuda":
        return CudaGraphDevice()
    from tests.support.engine.replaying_device import ReplayingDevice

    return ReplayingDevice()


if __name__ == "__main__":
    main()
