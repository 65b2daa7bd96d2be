"""The output of `tailrace up` when the stack is ready: addresses, folders, and two example calls."""

import re
import shlex
from pathlib import Path

from infra.local.servers.environment import gateway_log
from infra.local.servers.ray_home import ray_logs
from infra.local.servers.text import describe_text
from services.settings.settings import Settings

_NO_USER = "YOUR-USER-ID"
_PLAIN_ID = re.compile(r"[\w.@:-]+", re.ASCII)
"""Ids that need no quoting in a shell, in JSON or in Python."""
_NUM_LOOKED_AT = 1_000


def describe_stack(settings: Settings, bundle_version: str) -> str:
    """Return the addresses and folders of a running stack."""
    http = rest_address(settings)
    return "\n".join(
        [
            f"bundle   {bundle_version}",
            f"REST     {http}    (OpenAPI page: {http}/docs)",
            *([f"console  {http}/"] if settings.console else []),
            f"gRPC     {settings.grpc_address}    (tailrace.v1.Recommender, with reflection)",
            *_text_lines(settings),
            f"metrics  http://{settings.http_host}:{settings.metrics_port}/metrics",
            f"Redis    {settings.redis_host}:{settings.redis_port}",
            f"Kafka    {settings.kafka_bootstrap}    (topic {settings.interactions_topic})",
            f"state    {settings.state_dir}",
            f"logs     {gateway_log(settings)}    (requests; other logs in the same folder)",
            f"Ray      {ray_logs(settings.state_dir)}    (its logs while it runs)",
        ]
    )


def _text_lines(settings: Settings) -> list[str]:
    """Return the line on text generation, if enabled."""
    if not (settings.text_path or settings.text_url):
        return []
    return [f"text     {rest_address(settings)}/v1    (OpenAI's API; {describe_text(settings)[0]})"]


def rest_address(settings: Settings) -> str:
    return f"http{'s' if settings.tls_dir else ''}://{settings.http_host}:{settings.http_port}"


def plaintext_rest_address(settings: Settings) -> str:
    """Return a plaintext REST address: the edge's, or that of Ray's ingress if the edge uses TLS."""
    if settings.tls_dir is None:
        return rest_address(settings)
    return f"http://{settings.inner_host}:{settings.inner_http_port}"


def example_user(settings: Settings) -> str:
    """Return the user with the longest history among the first users of the base tables, or a placeholder.

    Only users with a plain id qualify.
    """
    import pyarrow as pa  # other commands print only addresses
    import pyarrow.parquet as pq

    from services.stream.rebuild import base_table

    longest = (0, _NO_USER)
    try:
        with pq.ParquetFile(base_table(settings.offline_log_dir)) as file:
            users = next(file.iter_batches(_NUM_LOOKED_AT, columns=["user_id", "num_events"]))
    except (OSError, pa.ArrowException, StopIteration):
        return _NO_USER
    for user_id, num_events in zip(users["user_id"].to_pylist(), users["num_events"].to_pylist(), strict=True):
        if _PLAIN_ID.fullmatch(user_id):
            longest = max(longest, (num_events, user_id))
    return longest[1]


def rest_call(settings: Settings, user_id: str) -> str:
    """Return a shell command that gets recommendations; if keys are required, it sends $TAILRACE_KEY."""
    key = """ -H "authorization: Bearer $TAILRACE_KEY\"""" if settings.api_keys_file else ""
    trust = f" --cacert {_authority(settings.tls_dir)}" if settings.tls_dir else ""
    url = f"{rest_address(settings)}/v1/recommendations"
    return f"""curl -s{trust} {url}{key} -H 'content-type: application/json' -d '{{"user_id": "{user_id}", "k": 5}}'"""


def grpc_call(settings: Settings, user_id: str, python: str) -> str:
    """Return a shell command that calls gRPC from Python; `python` is the interpreter of the stack's environment."""
    scheme, names, trust = "grpc", "Client", ""
    if settings.tls_dir:
        scheme, names, trust = "grpcs", "Client, Tls", f", tls=Tls('{_authority(settings.tls_dir)}')"
    key = ", api_key='$TAILRACE_KEY'" if settings.api_keys_file else ""
    client = f"Client('{scheme}://{settings.grpc_address}'{trust}{key})"
    code = f"from tailrace_client import {names}; print({client}.recommend('{user_id}', k=5, deadline_ms=2000))"
    return f'{shlex.quote(python)} -c "{code}"'


def _authority(tls_dir: Path) -> Path:
    """Return the file that callers trust: cert-manager's ca.crt next to the certificate, or the certificate."""
    return authority if (authority := tls_dir / "ca.crt").exists() else tls_dir / "tls.crt"
