"""Every field of EngineConfig is set by a setting, or is declared internal with a reason."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from models.registry.bundle import Bundle
from services.errors import ConfigError
from services.llm.engine.config import INTERNAL_FIELDS, EngineConfig
from services.llm.ranking.deployment import engine_config, with_weights_of
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
    "engine_max_step_s": 3.0,
}
RANKING = SHARED | {"kv_num_blocks": 99, "llm_weight_kind": "int8", "llm_tensor_parallel_size": 2}
RANKING |= {"llm_adapter_memory_mib": 9, "llm_adapter_rank": 9}
TEXT = SHARED | {"text_kv_num_blocks": 99, "text_weight_kind": "int8", "text_num_speculative_tokens": 3}
TEXT["text_tensor_parallel_size"] = 2
OF_ONE_ENGINE = {"num_speculative_tokens", "adapter_memory_mib", "adapter_rank"}


@pytest.mark.parametrize(("make", "changes"), [(engine_config, RANKING), (text_engine_config, TEXT)])
def test_every_field_is_reached_by_a_setting_or_declared_internal(
    make: Callable[[Settings], EngineConfig], changes: dict[str, Any]
) -> None:
    """Each setting changes a field of its engine's configuration, and together they cover all non-internal fields."""
    plain, reached = make(Settings()), set()
    for name, value in changes.items():
        changed = make(Settings(**{name: value}))
        reached_fields = {
            field.name for field in fields(EngineConfig) if getattr(changed, field.name) != getattr(plain, field.name)
        }
        assert reached_fields, name
        reached |= reached_fields

    assert reached | INTERNAL_FIELDS.keys() | OF_ONE_ENGINE == {field.name for field in fields(EngineConfig)}
    assert not reached & INTERNAL_FIELDS.keys()


@pytest.mark.parametrize("name", ["TAILRACE_LLM_WEIGHT_KIND", "TAILRACE_TEXT_WEIGHT_KIND"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_are_refused_beside_a_gpu(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting and the value to use instead."""
    monkeypatch.setenv(name, kind)
    monkeypatch.setenv("TAILRACE_LLM_DEVICE", "cuda")

    with pytest.raises(ConfigError, match=f"{name}: {kind} weights run on a CPU only; set it to model"):
        load_settings()


@pytest.mark.parametrize(
    ("setting", "named", "device", "kind"),
    [
        ("bundle", None, "cpu", "model"),
        ("bundle", "int4", "cpu", "int4"),
        ("bundle", "int4", "cuda", "model"),
        ("model", "int4", "cpu", "model"),
        ("int8", "int4", "cpu", "int8"),
        ("int8", None, "cpu", "int8"),
    ],
)
def test_the_bundle_names_its_weights_unless_a_setting_does(
    setting: Any, named: str | None, device: str, kind: str
) -> None:
    """On a CPU the manifest selects the weight kind; an explicit setting takes precedence."""
    bundle = Bundle("v1", Path("v1"), {} if named is None else {"serving": {"weight_kind": named}})

    config = with_weights_of(bundle, Settings(llm_weight_kind=setting, llm_device=device))

    assert config.weight_kind == kind


def test_a_kind_of_another_version_is_refused() -> None:
    """A bundle with an unknown weight kind is rejected."""
    bundle = Bundle("v1", Path("v1"), {"serving": {"weight_kind": "int2"}})

    with pytest.raises(ConfigError, match="weight_kind: must be model or int8 or int8_all or int4, got 'int2'"):
        with_weights_of(bundle, Settings())
