"""Builds the library ahead of time.

`python -m services.llm.engine.cpu.prebuild FOLDER [TARGET ...]`; the default is all targets of this machine. For images
and packages: with the folder in place as `prebuilt` next to the sources, the engine needs no compiler. Needs GCC and
torch.
"""

import platform
import sys
from pathlib import Path

from services.llm.engine.cpu.compiler import BuildFailedError, build_ahead, targets_of


def main() -> None:
    """Build the targets in sequence and print their paths; exits with 1 at the first failure."""
    import torch  # noqa: F401 - loads the OpenMP runtime that the library is linked against

    folder, *names = sys.argv[1:]
    for target in targets_of(platform.machine()):
        if names and target.name not in names:
            continue
        try:
            sys.stdout.write(f"{build_ahead(target, Path(folder))}\n")
        except BuildFailedError as error:
            sys.exit(f"error: {target.name}: {error}")


if __name__ == "__main__":
    main()
