"""The Dockerfile against the project."""

import importlib.util
import re
from pathlib import Path

import yaml

from services.llm.engine.cpu.compiler import PREBUILT
from tests.support.manifests import pod_of, render

ROOT = Path(__file__).resolve().parents[4]
DOCKERFILE = (ROOT / "infra" / "docker" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def stage(name: str) -> str:
    """Return the instructions of a build stage, its FROM line included."""
    (found,) = re.findall(rf"^(FROM \S+ AS {name}\n(?:(?!FROM ).*\n)*)", DOCKERFILE, re.MULTILINE)
    return re.sub(r"^#.*\n|^\n", "", found, flags=re.MULTILINE)


def test_every_package_is_held_by_a_lock() -> None:
    """The lock's first part by hashes and as wheels, torch by version from one index alone; nothing else is downloaded."""
    hashed, torch = re.findall(r"pip install (.+?)(?: \\)?$", DOCKERFILE, re.MULTILINE)
    (cut,) = re.findall(r"sed '/\^(.+)\$/,\$d' /requirements.lock > /image.lock", DOCKERFILE)

    assert hashed == "--require-hashes --no-deps --only-binary :all: -r /image.lock"
    assert torch == '${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} -c /requirements-torch.lock torch'
    assert (ROOT / "requirements.lock").read_text().splitlines().count(cut) == 1
    assert not re.search(r"apt-get|apk |curl |wget |https?://", DOCKERFILE)


def test_the_engine_s_library_is_copied_to_the_path_that_the_code_loads() -> None:
    """The build runs our module, and the image has its output in our folder, which the checkout does not provide."""
    (module,) = re.findall(r"python -m (\S+prebuild)", DOCKERFILE)
    (folder,) = re.findall(r"^COPY --from=kernels \S+ /app/(\S+)$", DOCKERFILE, re.MULTILINE)

    assert importlib.util.find_spec(module)
    assert ROOT / folder == PREBUILT
    assert folder in (ROOT / ".dockerignore").read_text().splitlines()


def test_what_is_copied_is_not_ignored() -> None:
    """The build context has each file that the Dockerfile names, and each package."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    named = set(re.findall(r"(?:requirements[\w-]*\.lock|infra/docker/[\w.]+)", DOCKERFILE))

    assert {"requirements.lock", "requirements-torch.lock"} <= named
    assert all(path.split("/")[0] in let_in and (ROOT / path).is_file() for path in named)
    assert {"services", "models", "pipelines", "infra", "feature_repo"} <= let_in


def test_triton_can_compile_and_load_its_launcher_in_the_gpu_image() -> None:
    """It needs a C compiler, which the other image lacks, and a cache that is no tmpfs, since that may hold no executables."""
    base, *rooms = stage("rooms").splitlines()
    base_gpu, *rooms_gpu = stage("rooms-gpu").splitlines()
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", stage("gpu"))
    pod = pod_of(render("gpu"), "tailrace-llm")
    (volume,) = [one["name"] for one in pod.container("ray-worker")["volumeMounts"] if one["mountPath"] == cache]

    assert (base.split()[1], base_gpu.split()[1]) == ("${PYTHON_IMAGE}", "${BUILD_IMAGE}")
    assert re.search(r"^ARG BUILD_IMAGE=python:[\d.]+-bookworm$", DOCKERFILE, re.MULTILINE), "the full image has gcc"
    assert rooms == rooms_gpu
    assert stage("gpu").startswith("FROM rooms-gpu ")
    assert f" {cache} " in (ROOT / "infra/docker/rooms.sh").read_text()
    assert f"kernels:{cache}" in COMPOSE["services"]["serve-gpu"]["volumes"]
    assert [one["emptyDir"] for one in pod.spec["volumes"] if one["name"] == volume] == [{"sizeLimit": "1Gi"}]


def test_a_card_is_served_alike_by_compose_and_kubernetes() -> None:
    """The same engine settings on both, in bf16 (fp32 attention spills its registers), with a KV pool sized by the card."""
    image = dict(re.findall(r"(TAILRACE_LLM_\w+)=(\w+)", stage("gpu")))
    compose = COMPOSE["services"]
    own = compose["serve-gpu"]["environment"].items() - compose["serve"]["environment"].items()
    overlay = (ROOT / "infra/kubernetes/overlays/gpu/settings.env").read_text().splitlines()

    assert image == {"TAILRACE_LLM_DEVICE": "cuda", "TAILRACE_LLM_DTYPE": "bfloat16"}
    assert dict(own) | image == dict(line.split("=") for line in overlay)
    assert compose["serve"]["environment"].items() <= compose["serve-gpu"]["environment"].items()
