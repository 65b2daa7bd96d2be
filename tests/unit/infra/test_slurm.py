"""The Slurm script, checked without Slurm."""

import re
import subprocess

from tests.support.manifests import ROOT

SCRIPT = ROOT / "infra/slurm/train.sbatch"


def test_the_script_is_bash_and_its_options_come_before_its_commands() -> None:
    """sbatch ignores `#SBATCH` after the first command; options are `--name=value` or switches, times H:MM:SS."""
    lines = SCRIPT.read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    given = [(number, line.removeprefix("#SBATCH ")) for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    options = dict(line.removeprefix("--").partition("=")[::2] for _, line in given)

    checked = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stderr) == (0, "")
    assert lines[0] == "#!/bin/bash"
    assert all(number < first_command and re.fullmatch(r"--[a-z-]+(=\S+)?", line) for number, line in given)
    assert re.fullmatch(r"\d+:\d\d:\d\d", options["time"])
    assert int(options["nodes"]) > 0
    assert options["ntasks-per-node"] == "1"
