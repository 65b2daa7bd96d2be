"""Text on a real local Ray: a caller that disconnects, a full queue, and a replica that dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.contracts.text import SamplingOptions, TextDone, TextEvent, TextRequest
from services.errors import Overloaded
from services.settings.settings import Settings
from tests.support.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files and sockets to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at start
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Ray announces its next defaults
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
APP = f"text-{os.getpid()}"
LONG = {"ignore_eos": True, "max_tokens": 30_000}


def build_request(**fields) -> TextRequest:
    """Build a greedy request."""
    known = {
        "request_id": "r",
        "model": "tiny",
        "prompt": "the tail gets out",
        "max_tokens": 16,
        "sampling": SamplingOptions(temperature=0),
    }
    return TextRequest(**{**known, **fields})


@pytest.fixture
async def started(local_ray, tmp_path: Path) -> AsyncIterator:
    """A function that runs the deployment over a tiny checkpoint and returns its handle; the deployment is deleted afterwards."""
    from ray import serve

    from services.llm.handles import TextHandle
    from services.llm.text.deployment import build_text

    def start(**fields):
        """Run it."""
        folder = write_checkpoint(tmp_path / "tiny", max_positions=32_000)
        settings = Settings(state_dir=tmp_path, text_path=str(folder), text_max_tokens=30_000, **fields)
        return TextHandle(serve.run(build_text(settings), name=APP, route_prefix=None), default_deadline_s=30.0)

    yield start
    await asyncio.to_thread(serve.delete, APP)


async def written(handle, **fields) -> list[TextEvent]:
    """Return all events of a text."""
    return [event async for event in handle.write(build_request(**fields))]


def replica_pids() -> list[int]:
    """Return the processes of this test's replicas, by their process titles."""
    titles = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if f"ServeReplica:{APP}:" in title]


async def test_a_disconnect_frees_a_place_and_a_full_queue_refuses(started) -> None:
    """With one place to run and one to wait, one of two more is overloaded; when the first caller disconnects the other is served."""
    handle = started(max_running=1, max_waiting=1)
    first = handle.write(build_request(**LONG))
    await anext(first)

    others = [asyncio.create_task(written(handle)) for _ in range(2)]
    refused, waiting = await asyncio.wait(others, timeout=30.0, return_when=asyncio.FIRST_COMPLETED)
    await first.aclose()
    events = await asyncio.wait_for(waiting.pop(), 20.0)

    assert [type(task.exception()) for task in refused] == [Overloaded]
    assert isinstance(events[-1], TextDone)


async def test_of_two_replicas_one_may_die(started) -> None:
    """Prompts stick to a replica, both serve, and when one is killed every new request, and every answer that is to come whole, is
    served by the other.
    """
    handle = started(text_replicas=2, kv_block_tokens=4)
    prompts = [f"{number} times the tail gets out of the turbine" for number in range(24)]

    async def cached_of(prompt: str) -> int:
        """Generate, and return how many tokens of the prompt were cached."""
        done = (await written(handle, prompt=prompt))[-1]
        assert isinstance(done, TextDone)
        await asyncio.sleep(0.05)  # the router records an answer's end a moment later
        return done.num_cached_tokens

    cold = [await cached_of(prompt) for prompt in prompts]
    warm = [await cached_of(prompt) for prompt in prompts]
    whole = {"max_tokens": 400, "ignore_eos": True, "in_pieces": False}
    under_way = [asyncio.create_task(written(handle, prompt=f"again {prompt}", **whole)) for prompt in prompts]
    await cached_of("one that comes back while they are under way")
    os.kill(replica_pids()[0], signal.SIGKILL)
    left = await asyncio.gather(*map(cached_of, prompts))
    ended = await asyncio.gather(*under_way)

    assert all(many > few for many, few in zip(warm, cold, strict=True)), (cold, warm)
    assert [events[-1].num_completion_tokens for events in ended] == [400] * len(prompts)
    assert any(many == few for many, few in zip(left, warm, strict=True))
    assert any(many < few for many, few in zip(left, warm, strict=True))
