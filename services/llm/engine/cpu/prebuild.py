"""Builds the library ahead: `python -m services.llm.engine.cpu.prebuild FOLDER [TARGET ...]`, by default all targets of this machine's make.

For images and packages: whoever finds the folder as `prebuilt` beside the sources needs no compiler. Needs one itself, and torch.
"""

import platform
import sys
from pathlib import Path

from services.llm.engine.cpu.compiler import BuildFailedError, build_ahead
from services.llm.engine.cpu.targets import targets_of


def main() -> None:
    """Build one after another and name each; ends with 1 at the first that fails."""
    import torch  # noqa: F401 - it loads the OpenMP runtime that the library is linked against

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
