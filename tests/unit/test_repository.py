"""Consistency of the repository: README, generated code, lock files."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from infra.lock import LOCK, SERVERS_PART, TORCH_LOCK, name_of, pins_of

ROOT = Path(__file__).resolve().parents[2]
VERSION = r"[a-z0-9.-]+==[0-9][0-9a-z.!]*"
GENERATED = ("recommend_pb2.py", "recommend_pb2.pyi")
HIDDEN_OR_LOCAL = re.compile(r"^(\.|__pycache__$|build$|dist$|.*\.egg-info$)")


def listed_paths() -> list[str]:
    """Return the paths of the tree in README.md."""
    tree = re.search(r"^## The tree\n+```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert tree, "README.md has no fenced tree under '## The tree'"
    return [line.split()[0] for line in tree.group(1).splitlines() if line.strip()]


def test_the_tree_of_the_readme_is_the_repositorys() -> None:
    """All paths in README's tree exist, and the tree covers each top-level folder and each folder of services."""
    listed = {path.rstrip("/") for path in listed_paths()}
    folders = [path for folder in (ROOT, ROOT / "services") for path in folder.iterdir() if path.is_dir()]
    names = {path.relative_to(ROOT).as_posix() for path in folders if not HIDDEN_OR_LOCAL.match(path.name)}

    assert [path for path in listed if not (ROOT / path).exists()] == []
    assert names - listed - {path.partition("/")[0] for path in listed} == set()


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    """Running protoc again reproduces the committed files and the client's descriptors."""
    places = ["-I.", f"-I{sysconfig.get_path('purelib')}"]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    details = ["google/rpc/status.proto", "google/rpc/error_details.proto"]
    for options in (outputs, ["--include_imports", f"--descriptor_set_out={tmp_path}/messages.binpb", *details]):
        command = [sys.executable, "-m", "grpc_tools.protoc", *places, "services/contracts/recommend.proto", *options]
        subprocess.run(command, cwd=ROOT, check=True)

    pairs = {f"services/contracts/{name}": f"services/contracts/{name}" for name in GENERATED}
    for committed, made in {**pairs, "services/client/tailrace_client/messages.binpb": "messages.binpb"}.items():
        assert (tmp_path / made).read_bytes() == (ROOT / committed).read_bytes(), f"{committed}: run `make proto`"


@pytest.mark.parametrize("lock", [LOCK, *(ROOT / "benchmarks/peers").glob("*.lock")], ids=lambda lock: lock.name)
def test_a_lock_pins_everything_by_hashes_and_names_no_host(lock: Path) -> None:
    """Each package has a version and file hashes, without build suffixes, paths or URLs."""
    pins = pins_of(lock.read_text())

    assert len(pins) > (10 if lock.name == "llamacpp.lock" else 100)
    for pin in pins.values():
        assert re.fullmatch(rf"{VERSION}(?: \\\n    --hash=sha256:[0-9a-f]{{64}})+\n", pin), pin


def test_torch_and_what_its_wheel_brings_are_pinned_by_version() -> None:
    """Torch and its own wheels are pinned without hashes, since each build differs; shared packages have hashes."""
    pins, torch = pins_of(LOCK.read_text()), pins_of(TORCH_LOCK.read_text())
    needed = {name_of(line) for line in requires("torch") or () if "extra ==" not in line}

    assert [pin for pin in torch.values() if not re.fullmatch(rf"{VERSION}\n", pin)] == []
    assert needed <= pins.keys() | torch.keys()
    assert {name for name in torch if not name.startswith(("nvidia-", "cuda-"))} == {"torch", "triton"}
    assert "torch" not in pins
    assert all(pins[name].startswith(torch[name].strip()) for name in pins.keys() & torch.keys())
    assert not pins_of(LOCK.read_text().partition(SERVERS_PART)[0]).keys() & torch.keys()


def test_the_lock_covers_what_is_declared() -> None:
    """Every dependency in pyproject.toml is locked, at the declared version if it declares a version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = pins_of(TORCH_LOCK.read_text()) | pins_of(LOCK.read_text())

    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        name, (_, _, version) = name_of(requirement), requirement.partition("==")
        assert name in pins, f"{requirement} is not locked: run `make lock`"
        assert not version or pins[name].startswith(f"{name}=={version}"), f"{requirement} is locked at {pins[name]}"


@pytest.mark.parametrize(("file", "num_hashed", "num_torch"), [("Makefile", 3, 2), ("infra/docker/Dockerfile", 1, 1)])
def test_packages_are_installed_by_their_hashes_and_torch_from_one_index(
    file: str, num_hashed: int, num_torch: int
) -> None:
    """Packages install by their hashes, as wheels but for one peer, and torch by version from the user's index."""
    text = (ROOT / file).read_text()
    installs = re.findall(r"pip install (.+?)(?: \\| \$\(TO_LOG\))?$", text, re.MULTILINE)
    hashed = [line for line in installs if "--require-hashes --no-deps --only-binary :all: -" in line]
    torch = [line for line in installs if re.search(r"(--constraint |-c /)requirements-torch\.lock torch$", line)]

    assert (len(hashed), len(torch)) == (num_hashed, num_torch)
    assert all(line.endswith("--no-deps --no-build-isolation -e .") for line in installs if line not in hashed + torch)
    assert not re.search(
        r"extra-index|apt-get|apk |curl |wget |https?://", text.replace("https://download.pytorch.org", "")
    )


def test_a_failing_installation_prints_a_line_a_step_and_names_its_log(tmp_path: Path) -> None:
    """pip's output goes to the log file, its last lines with the error also to the terminal, and make fails."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = venv / "bin" / "pip"  # this environment's, without a second's unpacking
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {venv}/bin/python "$@"\n')
    pip.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS"))}

    made = subprocess.run(
        ["make", f"VENV={venv}", f"PYTHON={sys.executable}", f"{venv}/.installed"],
        cwd=ROOT,
        env={**own, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )

    assert made.returncode != 0
    assert [line.partition(":")[0] for line in made.stdout.splitlines()] == ["install 1/4", "install 2/4"]
    assert "No matching distribution" in made.stderr
    assert f"pip failed: the whole log is {venv}/install.log" in made.stderr
    assert "No matching distribution" in (venv / "install.log").read_text()
