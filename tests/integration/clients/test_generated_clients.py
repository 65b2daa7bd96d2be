"""docs/openapi.json suits generators: openapi-generator's Go and Java clients compile."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import openapi_generator_cli
import pytest

ROOT = Path(__file__).resolve().parents[3]
JAR = Path(openapi_generator_cli.__file__).with_name("openapi-generator.jar")
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
OPTIONS = {
    "go": (),
    "java": ("--library", "native", "--generate-alias-as-model", "-p", "openApiNullable=false"),
}
"""The generators that docs/api.md names."""
HARMLESS = {
    "OpenAPI 3.1 support is still in beta",
    "Failed to get the schema name: null",  # of `additionalProperties: false`
    "Ignoring complex example on request body",  # Java's comments have no examples
}
GENERATED = (
    "package javax.annotation;\npublic @interface Generated { String[] value(); String date(); String comments(); }\n"
)
"""The only dependency of generated code besides Jackson, which is in the generator's archive."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Return the generated client of a language, and its generator's output; each is generated once."""

    @cache
    def generate(language: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(language)
        common = ["-i", str(ROOT / "docs/openapi.json"), "-p", "disallowAdditionalPropertiesIfNotPresent=false"]
        command = [Path(sys.executable).with_name("openapi-generator-cli"), "generate", "-g", language, "-o", folder]
        done = subprocess.run([*command, *common, *OPTIONS[language]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder, done.stdout + done.stderr

    return generate


JAVA = pytest.param("java", marks=pytest.mark.grid)  # the Go client is of the same document and generator


@pytest.mark.parametrize("language", ["go", JAVA])
def test_generators_warn_of_nothing_that_matters(language: str, made: Callable[[str], tuple[Path, str]]) -> None:
    """All generator warnings are known and harmless."""
    warnings = [line for line in made(language)[1].splitlines() if re.search(r"\b(WARN|ERROR)\b", line)]

    assert warnings
    assert [line for line in warnings if not any(text in line for text in HARMLESS)] == []


def test_fields_have_the_types_that_the_server_means(made: Callable[[str], tuple[Path, str]]) -> None:
    """Milliseconds have 64 bits, IDs are strings, request fields have descriptions, and answers may gain fields."""
    folder = made("go")[0]
    request, event, answer = (
        (folder / f"model_{name}.go").read_text() for name in ("recommend_body", "event_body", "recommendation_body")
    )

    assert re.search(r"// Absent for an anonymous visitor.*\n\tUserId NullableString ", request)
    assert re.search(r"\tRecentItemIds \[\]string ", request)
    assert re.search(r"\tFilters NullableFiltersBody ", request)
    assert re.search(r"\tEventTimeMs NullableInt64 ", event)
    assert re.search(r"\tNewestEventTimeMs NullableInt64 ", answer)
    assert re.search(r"\tStagesMs map\[string\]float64 ", answer)
    assert "DisallowUnknownFields" not in answer


def test_the_go_client_compiles(made: Callable[[str], tuple[Path, str]]) -> None:
    """`go vet` accepts the client without any module."""
    go = shutil.which("go", path=PATH)
    if go is None:
        pytest.skip("no Go compiler")
    folder = made("go")[0]
    shutil.rmtree(folder / "test")  # which needs a module for its assertions
    done = subprocess.run([go, "vet", "./..."], cwd=folder, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.grid
def test_the_java_client_compiles(made: Callable[[str], tuple[Path, str]], tmp_path: Path) -> None:
    """javac accepts the client with only the classes in the generator's archive."""
    javac = shutil.which("javac", path=PATH)
    if javac is None:
        pytest.skip("no Java compiler")
    stub = tmp_path / "javax/annotation/Generated.java"
    stub.parent.mkdir(parents=True)
    stub.write_text(GENERATED)
    sources = [str(path) for path in (made("java")[0] / "src/main/java").rglob("*.java")]
    command = [javac, "-nowarn", "-d", str(tmp_path / "classes"), "-cp", str(JAR), str(stub), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert len(sources) > 30
    assert done.returncode == 0, done.stderr
