"""A Ray of this process's environment, for tests and benchmarks of replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from services.settings.settings import environment_set

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as in a stack: Ray's default of 15 starves replicas
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def local_ray() -> Iterator[None]:
    """Run Ray Serve on free ports, without dashboard or proxies.

    A failed start is retried: Ray gives its node server 30 s, which no option changes.
    """
    with environment_set(**_ENVIRONMENT):
        import ray
        from ray import serve

        start = partial(
            ray.init,
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(_ROOT)}},
        )
        try:
            start()
        except Exception:  # noqa: BLE001 - Ray raises a bare one
            ray.shutdown()
            start()
        serve.start(proxy_location="Disabled")
        try:
            yield
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()
