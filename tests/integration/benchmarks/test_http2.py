"""The load generator's HTTP/2 through a real edge."""

import asyncio
from pathlib import Path

import psutil
from grpc_health.v1 import health_pb2

from benchmarks.load.http2 import UNAVAILABLE, CallAnswer, Http2Channel, literal
from tests.support.gateway.edge_scene import EdgeScene
from tests.support.gateway.named_doors import RAY
from tests.support.servers import HOST, free_port
from tests.support.wait import wait_for

CHECK = "/grpc.health.v1.Health/Check"


def same(answer: CallAnswer) -> CallAnswer:
    """Return a call's answer undecoded."""
    return answer


async def test_many_calls_are_answered(tmp_path: Path) -> None:
    """Two connections carry 300 calls; an unknown method and a closed port have gRPC's status."""
    scene = EdgeScene(tmp_path)
    channel = Http2Channel(f"{HOST}:{scene.settings.grpc_port}", 2, (("x-note", "n" * 300),))
    try:
        scene.start_doors(RAY)
        scene.start_edge()
        scene.until_open()
        wait_for(lambda: scene.is_ray_up is True, what="the edge's checks")
        answers = await asyncio.gather(*(channel.call(CHECK, b"", same) for _ in range(300)))
        unknown = await channel.call("/a.Service/Method", b"", same)
        ends = [end.raddr.port for end in psutil.Process().net_connections() if end.raddr]
    finally:
        channel.close()
        scene.close()
    lost = await Http2Channel(f"{HOST}:{free_port()}", 1, ()).call(CHECK, b"", same)

    assert {answer.status for answer in answers} == {0}
    assert ends.count(scene.settings.grpc_port) == 2
    assert health_pb2.HealthCheckResponse.FromString(answers[0].message).status == 1
    assert (unknown.status, lost.status) == (12, UNAVAILABLE)


def test_a_literal_header_is_found_by_its_name() -> None:
    """The status of a refusal by the edge, whose headers have no body."""
    block = b"\x88\x00\x0bgrpc-status\x018\x00\x0cgrpc-message\x04full"

    assert [literal(block, name) for name in (b"grpc-status", b"grpc-message", b"te")] == [b"8", b"full", None]
