"""The size limit of gRPC messages at the servers: `pytest tests/integration/doors/test_rpc_size.py`."""

import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest

from infra.local.servers.ray_home import ray_environment
from services.settings.settings import Settings, inherited_environment
from tests.support.gateway.counting_rpc_server import KINDS
from tests.support.servers import HOST, free_port

MAX_BYTES = 2**20
FLOOD_BYTES = 150 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_over_the_bound_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    """150 MiB without a key, plain or as a small gzip, is RESOURCE_EXHAUSTED without using the server's memory."""
    port = free_port()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.gateway.counting_rpc_server", kind, str(port), str(MAX_BYTES)],
        env={**inherited_environment(), **ray_environment(tmp_path, Settings(max_body_bytes=MAX_BYTES))},
    )
    try:
        with grpc.insecure_channel(f"{HOST}:{port}", [("grpc.max_send_message_length", -1)]) as channel:
            call = channel.unary_unary("/tailrace.v1.Recommender/Recommend", None, None)

            def refusal(num_bytes: int, compression: grpc.Compression) -> tuple[grpc.StatusCode, str]:
                with pytest.raises(grpc.RpcError) as refused:
                    call(bytes(num_bytes), compression=compression, wait_for_ready=True, timeout=120)
                return refused.value.code(), refused.value.details()

            within = refusal(MAX_BYTES, grpc.Compression.NoCompression)
            before_bytes = psutil.Process(child.pid).memory_info().rss
            beyond = [
                refusal(num_bytes, compression)
                for num_bytes in (MAX_BYTES + 1, FLOOD_BYTES)
                for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip)
            ]
            grown_bytes = psutil.Process(child.pid).memory_info().rss - before_bytes
    finally:
        child.kill()
        child.wait()

    assert within == (grpc.StatusCode.UNAUTHENTICATED, f"read {MAX_BYTES}")
    assert {code for code, _ in beyond} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert grown_bytes < FLOOD_BYTES / 4
