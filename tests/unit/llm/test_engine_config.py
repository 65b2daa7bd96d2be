"""Every field of EngineConfig is reached by a setting, or is declared internal with a reason."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from services.errors import ConfigError
from services.llm.engine.config import INTERNAL_FIELDS, EngineConfig
from services.llm.ranking.deployment import engine_config
from services.llm.text.deployment import text_engine_config
from services.settings.settings import Settings, load_settings

SHARED: dict[str, Any] = {
    "kv_block_tokens": 8,
    "kv_kind": "fp8",
    "max_step_tokens": 999,
    "max_chunk_tokens": 99,
    "max_beam_rows": 9,
    "default_beam_width": 9,
    "max_running": 9,
    "max_waiting": 9,
}
RANKING = SHARED | {"kv_num_blocks": 99, "llm_weight_kind": "int8"}
TEXT = SHARED | {"text_kv_num_blocks": 99, "text_weight_kind": "int8"}


@pytest.mark.parametrize(("make", "changes"), [(engine_config, RANKING), (text_engine_config, TEXT)])
def test_every_field_is_reached_by_a_setting_or_declared_internal(
    make: Callable[[Settings], EngineConfig], changes: dict[str, Any]
) -> None:
    """Each setting changes a field of its engine's configuration, and together they change all fields but the internal ones."""
    plain, reached = make(Settings()), set()
    for name, value in changes.items():
        changed = make(Settings(**{name: value}))
        found = {one.name for one in fields(EngineConfig) if getattr(changed, one.name) != getattr(plain, one.name)}
        assert found, name
        reached |= found

    assert reached | INTERNAL_FIELDS.keys() == {field.name for field in fields(EngineConfig)}
    assert not reached & INTERNAL_FIELDS.keys()


@pytest.mark.parametrize("name", ["TAILRACE_LLM_WEIGHT_KIND", "TAILRACE_TEXT_WEIGHT_KIND"])
def test_int8_weights_are_refused_beside_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting and what to set instead."""
    monkeypatch.setenv(name, "int8")
    monkeypatch.setenv("TAILRACE_LLM_DEVICE", "cuda")

    with pytest.raises(ConfigError, match=f"{name}: int8 weights run on a CPU only; set it to model"):
        load_settings()
