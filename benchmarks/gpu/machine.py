"""What the results were taken on: versions, card, driver, and whether Triton finds a C compiler. `python -m benchmarks.gpu.machine cuda`."""

import platform
import shutil
import subprocess
import sys

import numpy as np
import torch
import triton


def main() -> None:
    """Print it. Exits with 1 where there is no card or no compiler for one."""
    device = torch.device(sys.argv[1])
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}, numpy {np.__version__}"
    )
    compiler = shutil.which("gcc") or shutil.which("clang")
    print(f"C compiler: {compiler}")
    if device.type != "cuda":
        return
    if not torch.cuda.is_available() or compiler is None:
        sys.exit("a CUDA device and gcc or clang are needed")
    properties = torch.cuda.get_device_properties(device)
    print(f"{properties.name}, {properties.major}.{properties.minor}, {properties.total_memory / 2**30:.1f} GiB")
    print(f"{properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}", flush=True)
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)  # noqa: S607 - where the driver put it


if __name__ == "__main__":
    main()
