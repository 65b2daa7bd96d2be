"""docker-compose.yml and the Dockerfile against the code."""

import os
import re
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.docker.credentials import make_missing
from services.contracts.experiments import read_experiments
from services.gateway.surfaces.experiments import RunningExperiments
from services.gateway.surfaces.surfaces import Surfaces
from services.settings.settings import load_settings

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "docker-compose.yml").read_text()
DOCKERFILE = (ROOT / "infra/docker/Dockerfile").read_text()
LET_IN = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
ONE_SHOT = {"keys", "prepare", "pipeline"}
OURS = ONE_SHOT | {"worker", "release", "serve", "serve-gpu", "standby", "edge"}
EXAMPLE: dict[str, dict[str, Any]] = yaml.safe_load(
    re.findall(r"```yaml\n(# docker-compose.*?)---\n", (ROOT / "docs/many-models.md").read_text(), re.DOTALL)[0]
)["services"]
"""Of the page about many names."""
WRITABLE_ROOT = {"kafka"}
"""The image writes its configuration at each start."""


def default_of(value: Any) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def mounted(name: str) -> dict[str, tuple[str, str]]:
    """Return a service's mounts: path and mode by source."""
    mounts = {}
    for volume in SERVICES[name].get("volumes", []):
        source, target, *mode = volume.split(":")
        mounts[source] = (target, mode[0] if mode else "rw")
    return mounts


@pytest.mark.parametrize("name", sorted(OURS - {"keys", "edge"}))
def test_environments_are_valid_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role loads its settings from its variables."""
    for key, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(key, default_of(value))

    assert load_settings().redis_host == "redis"


@pytest.mark.parametrize("name", sorted(EXAMPLE))
def test_the_page_s_override_for_many_names_and_tenants_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each service of the example exists, loads its settings with it, and mounts the folder of the tenants file."""
    for key, value in {**SERVICES[name]["environment"], **EXAMPLE[name]["environment"]}.items():
        monkeypatch.setenv(key, default_of(value))
    settings = load_settings()
    volumes = [*SERVICES[name]["volumes"], *EXAMPLE[name].get("volumes", ())]

    if name in ("serve", "standby", "worker"):
        assert (settings.served_names, settings.llm_memory_gib) == (("default", "fr", "acme.default"), 4.0)
    if settings.tenants_file is not None and name != "worker":
        folders = [
            target for source, target, *_ in (volume.split(":") for volume in volumes) if source == "doors-secret"
        ]
        assert folders == [str(settings.tenants_file.parent)]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_and_bounded(name: str) -> None:
    """Services have pinned images, an unprivileged user, a read-only root, resource limits and health checks."""
    service = SERVICES[name]

    assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+(\.\d+)?(-\w+)?", default_of(service["image"]))
    assert re.fullmatch(r"\$\{[A-Z\d]+_IMAGE:-[^}]+\}", service["image"]), "it can be given by digest"
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["read_only"] is (name not in WRITABLE_ROOT)
    assert "privileged" not in service
    assert {"mem_limit", "cpus", "pids_limit"} <= service.keys()
    assert float(default_of(service["cpus"])) <= 2, "an engine refuses more processors than the host has"
    assert service["logging"]["options"]["max-size"]
    assert all(mount.startswith("/tmp:mode=1777") or "uid=10001" in mount for mount in service.get("tmpfs", ())), (
        "a restart gives a folder that the image lacks the mode 755"
    )
    assert ("restart" in service) == ("test" in service["healthcheck"]) == (name not in ONE_SHOT)


def test_networks_lead_only_where_they_must() -> None:
    """Ports are published on loopback only; the store and broker are only on an internal network without the edge."""
    for name, service in SERVICES.items():
        published = [default_of(port) for port in service.get("ports", [])]
        assert all(port.startswith("127.0.0.1:") for port in published), name
        assert bool(published) == (name in {"edge", "prometheus", "grafana"}), name
    assert all(SERVICES[name]["networks"] == ["data"] for name in ("redis", "kafka", "s3"))
    assert {name for name, network in FILE["networks"].items() if network == {"internal": True}} >= {
        "data",
        "watch",
        "doors",
    }
    assert SERVICES["edge"]["command"] == ["edge", "--ray-host", "serve", "--standby-host", "standby"]
    assert all("doors" in SERVICES[name]["networks"] for name in ("edge", "serve", "standby"))
    assert "data" not in SERVICES["edge"]["networks"]


def test_every_secret_that_is_named_is_made(tmp_path: Path) -> None:
    """Each path below /secrets is created by the first job and mounted where it is used."""
    for folder in ("redis", "kafka", "doors", "keys", "grafana"):
        (tmp_path / folder).mkdir()
    made = {f"/secrets/{path.relative_to(tmp_path)}" for path in make_missing(tmp_path)}

    for name, service in SERVICES.items():
        text = yaml.safe_dump({key: value for key, value in service.items() if key != "volumes"})
        for path in set(re.findall(r"/secrets/[\w./]+", text)):
            assert path in made, path
            assert path.rpartition("/")[0] in {target for target, _ in mounted(name).values()}, (name, path)


@pytest.mark.parametrize("name", ["serve", "serve-gpu", "standby"])
def test_gateways_follow_the_files_of_a_mounted_folder(name: str, tmp_path: Path) -> None:
    """The mounted default folder has both files, which change nothing; with their examples enabled they are valid."""
    (source,) = [volume for volume in SERVICES[name]["volumes"] if volume.endswith(":/surfaces:ro")]
    folder = ROOT / default_of(source.removesuffix(":/surfaces:ro"))
    paths = [SERVICES[name]["environment"][f"TAILRACE_{kind}_FILE"] for kind in ("SURFACES", "EXPERIMENTS")]
    texts = [(folder / Path(path).relative_to("/surfaces")).read_text() for path in paths]
    examples = [re.sub(r"^# ?", "", text.partition("#\n")[2], flags=re.MULTILINE) for text in texts]

    assert [source.partition(":-")[0], folder.is_dir()] == ["${SURFACES_DIR", True]
    for content, names in ((texts, ([], [])), (examples, (["cart"], ["larger"]))):
        files = [tmp_path / Path(path).name for path in paths]
        for file, text in zip(files, content, strict=True):
            file.write_text(text)
        surfaces = Surfaces(files[0])
        experiments = RunningExperiments(files[1], surfaces)
        experiments.refresh()
        assert ([*surfaces.in_force], [*read_experiments(files[1]).by_name]) == names
    assert "hurried" in {
        assignment.variant for unit in range(200) for assignment in experiments.assigned(str(unit))["cart"][1]
    }, "the experiment fits the surfaces"


def test_the_object_store_is_optional_and_all_that_read_bundles_find_it() -> None:
    """The object store is off by default; each role that reads bundles has its address, credentials and a volume."""
    readers = OURS - {"keys", "edge"}

    assert SERVICES["s3"]["profiles"] == ["s3"]
    assert not any("s3" in SERVICES[name].get("depends_on", {}) for name in SERVICES)
    for name in readers:
        environment = SERVICES[name]["environment"]
        assert default_of(environment["TAILRACE_BUNDLE_STORE"]) == ""
        assert environment["AWS_ENDPOINT_URL"] == "http://s3:8333"
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert environment[variable] == SERVICES["s3"]["environment"][variable]
        assert "data" in SERVICES[name]["networks"]
        assert {"state:/state", "state:/state:${STATE_MODE:-ro}"} & set(SERVICES[name]["volumes"]), name


def test_gateways_reach_the_optional_text_server() -> None:
    """vLLM is off by default; with it, every process that writes text shares a network with it and has its address."""
    assert SERVICES["vllm"]["profiles"] == ["vllm"]
    for name in ("serve", "serve-gpu", "standby"):
        assert "front" in set(SERVICES[name]["networks"]) & set(SERVICES["vllm"]["networks"])
        assert SERVICES[name]["environment"]["TAILRACE_TEXT_URL"] == "${TEXT_URL:-}"


def test_git_and_the_image_hold_no_secret() -> None:
    """Tracked files contain no secrets, and .dockerignore excludes everything except listed paths."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    assert not [path for path in listed if re.search(r"(password|\.key|\.acl|jaas\.conf|\.pem)$", path)]
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not {".git", ".env", ".tailrace"} & LET_IN


@pytest.mark.parametrize("umask", [0o077, 0o000, 0o022])
def test_the_checkouts_modes_do_not_reach_the_image(umask: int, tmp_path: Path) -> None:
    """For any checkout umask, all users can read the image's files and only root can write them."""
    lines = (ROOT / "infra/docker/install.sh").read_text().splitlines()
    (opened,) = [line for line in lines if line.startswith("chmod -R")]
    file, program = tmp_path / "app/services/app.py", tmp_path / "app/run.sh"
    before = os.umask(umask)
    try:
        file.parent.mkdir(parents=True)
        file.touch()
        program.touch(0o777)
    finally:
        os.umask(before)

    subprocess.run(opened.replace("/app", str(tmp_path / "app")), shell=True, check=True)

    modes = [path.stat().st_mode & 0o7777 for path in (file, program, file.parent)]
    assert modes == [0o644, 0o755, 0o755]
    assert lines.index(opened) < next(at for at, line in enumerate(lines) if "compileall" in line)
    assert all(
        "install.sh" in stage for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE) if "COPY . " in stage
    )


def test_the_build_context_is_what_the_image_runs() -> None:
    """The build context has every module and no local or generated files."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    modules = [path for path in listed if path.endswith(".py") and path.split("/")[0] in LET_IN]
    left = (
        *("infra/.env", "services/.idea/workspace.xml", "infra/kubernetes/overlays/own/secrets.env", "tls.key"),
        *(
            "infra/tls/tls.key",
            "pipelines/events.parquet",
            "services/client-typescript/node_modules/a.js",
            ".git/config",
        ),
        *("models/build/lib/a.py", "services/x/.ipynb_checkpoints/a.py", "benchmarks/results/own.json", "notes.txt"),
    )

    assert len(modules) > 500
    assert [path for path in modules if not is_in_context(path)] == []
    assert is_in_context("infra/prometheus/objectives.yaml")
    assert [path for path in left if is_in_context(path)] == []


def is_in_context(path: str) -> bool:
    """Return whether .dockerignore includes a file: the last pattern that matches it or a parent folder decides."""
    is_in = True
    names = [str(parent) for parent in (Path(path), *Path(path).parents)][:-1]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        matched = (
            any(fnmatchcase(Path(name).name, anywhere) for name in names)
            if anywhere != pattern
            else any(("/" not in pattern and pattern == "*") or name == pattern for name in names)
        )
        if matched and line and not line.startswith("#"):
            is_in = line.startswith("!")
    return is_in
