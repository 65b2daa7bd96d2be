"""Architecture guards: light, side-effect-free imports, and names. `make lint` checks import directions."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "services/client"
PACKAGES = ("services", "models", "pipelines", "infra", "benchmarks", "feature_repo")
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}

WITHOUT_CIRCLES = (
    "benchmarks",
    "infra",
    "models",
    "pipelines",
    "pipelines.training",
    "services",
    "services.llm",
    "services.llm.engine",
)
"""Packages whose subpackages must not import each other in a cycle, directly or through other packages."""

IMPORT_ALL = """
import importlib, os, sys
root, modules = sys.argv[1], sys.argv[2:]
started = []

def watch(event, arguments):
    if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
        return
    if event not in {"open", "os.mkdir", "os.remove", "os.rename", "os.putenv", "os.unsetenv", "os.fork", "os.exec",
                     "os.posix_spawn", "os.system", "subprocess.Popen", "socket.bind", "socket.connect",
                     "_thread.start_new_thread", "signal.pthread_kill"}:
        return
    frame = sys._getframe(1)
    while frame is not None and "site-packages" not in frame.f_code.co_filename:
        if frame.f_code.co_filename.startswith(root + os.sep):
            started.append(f"{frame.f_code.co_filename}:{frame.f_lineno}: {event} {arguments!r}")
            return
        frame = frame.f_back

sys.addaudithook(watch)
for module in modules:
    importlib.import_module(module)
sys.exit("\\n".join(started) or 0)
"""
"""Imports modules and reports the side effects of our own code; side effects of third-party code are ignored."""


def source_files() -> list[Path]:
    """Return all Python files of the project except tests and generated code."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in paths if "_pb2" not in path.name)


def modules_below(package: str) -> list[str]:
    """Return the dotted names of a package's modules without entry points; empty if `package` is a module."""
    files = sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    names = (
        path.relative_to(CLIENT if path.is_relative_to(CLIENT) else ROOT).with_suffix("")
        for path in files
        if path.name != "__main__.py"
    )
    return [".".join(name.parts).removesuffix(".__init__") for name in names]


def python(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in a fresh interpreter."""
    command = [sys.executable, "-B", "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("services.router", {"torch", "ray", "feast", "kafka", "numpy"}),
        ("services.client", {"services", "models", "infra", "pydantic", "starlette", "numpy", "google.rpc"}),
        ("services.contracts", {"torch", "ray", "feast", "kafka", "numpy"}),
        ("services.llm.engine.engine", {"grpc", "pandas", "prometheus_client", "pyarrow", "pydantic", "structlog"}),
        ("services.llm.handles", {"torch", "services.llm.ranking.deployment"}),
        ("services.student", {"torch", "ray", "feast", "kafka"}),
        ("services.stream.__main__", {"torch", "ray"}),
        ("benchmarks.engine.tailrace", {"ray", "rich", "typer", "transformers", "pydantic", "pyarrow", "psutil"}),
        ("pipelines.run", {"sklearn", "pandas", "ray", "feast"}),
        ("infra.cli.main", {"torch", "ray", "feast", "kafka", "pydantic", "numpy"}),
        ("infra.local", {"torch", "ray", "feast", "kafka"}),
    ],
)
def test_a_package_imports_without_what_it_does_not_need(package: str, heavy: set[str]) -> None:
    """In a fresh interpreter, importing a package or module does not load the heavy packages, even indirectly."""
    script = (
        "import importlib, sys; heavy = set(sys.argv[1].split(',')); [importlib.import_module(m) for m in "
        "sys.argv[2:]]; sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )

    done = python(script, ",".join(heavy), *(modules_below(package) or [package]))

    assert done.returncode == 0, f"{package} loads {done.stderr}"


ALONE_WITH_TORCH = """
import importlib, sys
from importlib.metadata import packages_distributions
import numpy, safetensors.torch, tokenizers, triton, torch._dynamo
import torch.distributed.checkpoint, torch.distributed.pipelining, torch.distributed.tensor

class Missing:
    loaded = {name.partition(".")[0] for name in sys.modules}
    names = set(packages_distributions()) - loaded - set(sys.argv[1].split(","))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for module in sys.argv[2:]:
    importlib.import_module(module)
"""
"""Imports modules where only our packages and torch, triton, numpy, safetensors and tokenizers are installed."""


def test_what_runs_on_a_gpu_image_needs_torch_numpy_safetensors_and_tokenizers_alone() -> None:
    """A fresh interpreter imports these packages although all other dependencies are missing."""
    rooms = (
        "pipelines.training.fit",
        "pipelines.training.parallel",
        "pipelines.planner",
        "pipelines.profiler",
        "benchmarks.gpu",
    )
    modules = [module for room in rooms for module in modules_below(room) or [room]]

    done = python(ALONE_WITH_TORCH, ",".join(PACKAGES), *modules)

    assert done.returncode == 0, done.stderr


def test_importing_does_nothing() -> None:
    """Importing a module does not write files, start processes or threads, or change the environment."""
    modules = [module for package in PACKAGES[:-1] for module in modules_below(package)]

    done = python(IMPORT_ALL, str(ROOT), *modules)

    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_files_are_named_for_what_they_hold() -> None:
    """File and folder names are specific: names such as utils are forbidden."""
    names = {path.relative_to(ROOT).as_posix() for path in source_files()}
    empty = {name for name in names if FORBIDDEN_NAMES & set(re.split(r"[/.]", name))}

    assert not empty


def undocumented(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the public functions of more than one statement that have no docstring."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("_"):
                continue
            case ast.ClassDef():
                yield from undocumented(node.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if len(node.body) > 1 and ast.get_docstring(node) is None:
                yield node.name


def test_functions_of_several_statements_have_a_docstring() -> None:
    """A name may describe one statement; more statements need a sentence, also in tests."""
    files = [*source_files(), *(ROOT / "tests").rglob("*.py")]
    lacking = {path.name: [*undocumented(ast.parse(path.read_text()).body)] for path in files}

    assert {name: functions for name, functions in lacking.items() if functions} == {}


def test_no_import_runs_back_up_between_rooms() -> None:
    """The folders and modules of a package have no import cycles, including cycles outside the import contracts."""
    graph = grimp.build_graph("benchmarks", "infra", "models", "pipelines", "services", cache_dir=None)

    circles = {package: graph.nominate_cycle_breakers(package) for package in WITHOUT_CIRCLES}

    assert not {package: back for package, back in circles.items() if back}


OF_TENANTS = "recommend|recommend_batch|record|assign|bundle|explanations|users|export|items"
"""The operations of the data plane that take ids of callers."""
ALLOWED = {"console/editor.py: items"}
"""The console edits the default tenant's items: its calls are closed to tenants."""


def test_doors_reach_operations_through_the_tenant_s_plane() -> None:
    """No door calls an operation of the data plane itself: its ids would be another tenant's, or nobody's."""
    uses = {
        f"{path.parent.name}/{path.name}: {name}"
        for room in ("rest", "grpc", "openai", "console")
        for path in (ROOT / "services/gateway" / room).glob("*.py")
        for name in re.findall(rf"plane(?:\(\))?\.({OF_TENANTS})\b", path.read_text())
    }

    assert uses == ALLOWED
