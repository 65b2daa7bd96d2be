"""The repository agrees with itself: README, generated code, lock."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("recommend_pb2.py", "recommend_pb2.pyi", "recommend_pb2_grpc.py")
HIDDEN_OR_LOCAL = re.compile(r"^(\.|__pycache__$|build$|dist$|.*\.egg-info$)")


def listed_paths() -> list[str]:
    """The paths of the tree in README.md."""
    tree = re.search(r"^## The tree\n+```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert tree, "README.md has no fenced tree under '## The tree'"
    return [line.split()[0] for line in tree.group(1).splitlines() if line.strip()]


def test_the_tree_of_the_readme_is_the_repositorys() -> None:
    """Every path of README's tree exists, and each top-level folder, or something in it, and each folder of services is in it."""
    listed = {path.rstrip("/") for path in listed_paths()}
    folders = [path for place in (ROOT, ROOT / "services") for path in place.iterdir() if path.is_dir()]
    names = {path.relative_to(ROOT).as_posix() for path in folders if not HIDDEN_OR_LOCAL.match(path.name)}

    assert [path for path in listed if not (ROOT / path).exists()] == []
    assert names - listed - {path.partition("/")[0] for path in listed} == set()


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    """Running protoc again writes the committed files."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, "services/contracts/recommend.proto"]

    subprocess.run(command, cwd=ROOT, check=True)

    for name in GENERATED:
        committed = (ROOT / "services/contracts" / name).read_text()
        assert (tmp_path / "services/contracts" / name).read_text() == committed, f"{name} is stale: run `make proto`"


def test_the_clients_messages_are_fresh(tmp_path: Path) -> None:
    """The descriptors in the client are those of recommend.proto and of Google's error details."""
    made = tmp_path / "messages.binpb"
    sources = ["services/contracts/recommend.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"]
    places = ["-I.", f"-I{sysconfig.get_path('purelib')}", "--include_imports", f"--descriptor_set_out={made}"]

    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *places, *sources], cwd=ROOT, check=True)

    committed = (ROOT / "services/client/tailrace_client/messages.binpb").read_bytes()
    assert made.read_bytes() == committed, "messages.binpb is stale: run `make proto`"


def test_the_lock_pins_everything_and_names_no_host() -> None:
    """Each line of the lock is name==version, without a build's suffix, a path or an address."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.!]*", line)] == []


def test_the_lock_covers_what_is_declared() -> None:
    """Every dependency in pyproject.toml is in the lock, and where a version is declared it is that one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["dev"]
    lock = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)

    for requirement in declared:
        name, _, version = re.sub(r"\[.*?\]", "", requirement).partition("==")
        name = re.split(r"[<>=~! ]", name)[0].lower().replace("_", "-")
        assert name in lock, f"{requirement} is not locked: run `make lock`"
        assert not version or lock[name] == version, f"{requirement} is locked at {lock[name]}"
