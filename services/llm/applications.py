"""The Ray Serve applications of the models. They name their classes by path, since importing these loads torch.

Each replica imports its class; the process that starts the stack does not.
"""

from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from models.registry.name_record import DEFAULT_NAME
from services.llm.serving.affinity_router import affinity
from services.settings.settings import Settings

_RANKING: Any = "services.llm.ranking.deployment.LlmDeployment"
_TEXT: Any = "services.llm.text.deployment.TextDeployment"
_LOAD_BOUND = 1.25
"""A conversation leaves its replica when the replica has this many times the mean load."""


def replica_options(router: RequestRouterConfig) -> dict[str, Any]:
    """Return the Ray Serve options that all engine replicas share.

    No reserved core, this router, and a health check each second.
    """
    return {
        "ray_actor_options": {"num_cpus": 0},
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        "request_router_config": router,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
    }


def build_llms(settings: Settings) -> dict[str, Any]:
    """Return the bound Ray Serve applications of the ranking models by name; pass their handles to `LlmHandle`.

    With a budget of memory there is one application for all names, under the first name.
    """
    if settings.llm_memory_gib is not None:
        return {settings.first_name: build_llm(settings, "llm", settings.served_names)}
    deployments = {
        name: "llm" if name == DEFAULT_NAME else f"llm-{name.replace('.', '--')}" for name in settings.served_names
    }
    return {name: build_llm(settings, deployment, (name,)) for name, deployment in deployments.items()}


def build_llm(settings: Settings, deployment_name: str = "llm", names: Sequence[str] = (DEFAULT_NAME,)) -> Any:
    """Return the bound Ray Serve application of the ranking models of these names."""
    deployment = serve.deployment(
        name=deployment_name,
        num_replicas=settings.llm_replicas,
        max_ongoing_requests=settings.max_running + settings.max_waiting,
        max_queued_requests=settings.max_waiting,
        graceful_shutdown_timeout_s=2.0,
        **replica_options(affinity()),
    )(_RANKING)
    return deployment.bind(settings, names)


def build_text(settings: Settings) -> Any:
    """Return the text model's bound Ray Serve application; pass its handle to `TextHandle`."""
    deployment = serve.deployment(
        name="text",
        num_replicas=settings.text_replicas,
        # the engine must reject by priority before Ray's queue is full
        max_ongoing_requests=2 * (settings.max_running + settings.max_waiting),
        max_queued_requests=settings.max_waiting,
        graceful_shutdown_timeout_s=5.0,
        **replica_options(affinity(_LOAD_BOUND)),
    )(_TEXT)
    return deployment.bind(settings)
