"""Settings come from the environment alone, are typed, and tolerate no mistake."""

import pytest

from services.errors import ConfigError
from services.settings import Settings, load_settings


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
