"""An LLM behind another server's `/v1/recommendations`, in vLLM-GR's schema: item ids in, item ids and scores out.

    RankRequest ─▶ {user_id, sequence, top_k, beam_width} ─▶ POST /recommendations ─▶ {recommendations} ─▶ RankResult

The router calls it as it calls our replicas: same deadline, breaker, prediction and fallback. The server knows neither
bundles nor filters, so it is asked for more items than are needed, and the gateway drops what the request excludes.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from http import HTTPStatus

import httpx
import msgspec
import structlog

from services.contracts.engine_load import EngineLoad
from services.contracts.rank import RankRequest, RankResult
from services.contracts.recommend import Filters
from services.errors import ConfigError, DeadlineExceeded, DependencyUnavailable, InvalidRequest, Overloaded
from services.llm.serving.reply import LLM
from services.peer import peer_client, peer_headers

log = structlog.get_logger()

REPLICA = "remote"
_PATH = "/recommendations"
_RETRY_AFTER_S = 1.0
_NUM_IDLE = 64
_MAX_ITEMS = 500
_PER_ITEM_WITH_FILTER = 4
"""Items to ask for, per item needed, if the request has a filter."""
_NO_FILTERS = Filters()
_NO_LOAD = EngineLoad(num_running=0, num_waiting=0, kv_cache_usage=0.0)
_LATE = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT})
_REFUSED = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY})


class _Event(msgspec.Struct):
    item_id: str


class RankBody(msgspec.Struct, kw_only=True):
    """The body of a request. `user_id` is the request's id for an anonymous user."""

    user_id: str
    sequence: list[_Event]
    top_k: int
    beam_width: int
    sampling_strategy: str = "beam_search"


class _Item(msgspec.Struct):
    item_id: str
    score: float


class RankReply(msgspec.Struct):
    """The body of an answer; other fields are ignored."""

    recommendations: list[_Item]


class RemoteLlm:
    """The `Llm` of the tier. Create it in the event loop that serves.

    Args:
        url: The server's base URL, including /v1.
        key: Returns the API key, or an empty string; called at every request, so that the key file can be replaced.
        beam_width: Smallest beam width that is asked for.
    """

    def __init__(self, url: str, key: Callable[[], str], beam_width: int) -> None:
        self._key = key
        self._beam_width = beam_width
        self._decoder = msgspec.json.Decoder(RankReply)
        self._http = peer_client(url, num_idle=_NUM_IDLE)

    def replicas(self) -> Sequence[str]:
        """Return the server as the only replica."""
        return (REPLICA,)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank within `timeout_s`; a wait that ends early closes the connection, which cancels the server's work.

        Raises Overloaded, DeadlineExceeded, DependencyUnavailable or InvalidRequest.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._post(request, timeout_s)
            if answer.status_code != HTTPStatus.OK:
                raise _error_of(answer)
            return _result_of(self._decoder.decode(answer.content), request)
        except TimeoutError as error:
            raise DeadlineExceeded(LLM) from error
        except (httpx.HTTPError, ConfigError, msgspec.MsgspecError, ValueError) as error:
            log.warning("llm_server_failed", error=repr(error))
            raise DependencyUnavailable(LLM, _RETRY_AFTER_S) from error

    async def _post(self, request: RankRequest, timeout_s: float) -> httpx.Response:
        headers = peer_headers(self._key(), request.trace, max(1, int(timeout_s * 1_000)))
        body = msgspec.json.encode(ask_of(request, self._beam_width))
        return await self._http.post(_PATH, content=body, headers={"content-type": "application/json"} | headers)


def ask_of(request: RankRequest, beam_width: int) -> RankBody:
    """Return the body for the other server: enough items that k are left without the excluded items."""
    per_item = 1 if request.filters == _NO_FILTERS else _PER_ITEM_WITH_FILTER
    wanted = request.k * per_item + len(request.excluded_item_ids)
    num_items = min(wanted, max(_MAX_ITEMS, request.k))
    return RankBody(
        user_id=request.user_id or request.request_id,
        sequence=[_Event(item_id) for item_id in request.history_item_ids],
        top_k=num_items,
        beam_width=max(beam_width, num_items),
    )


def _result_of(answer: RankReply, request: RankRequest) -> RankResult:
    """Return the items, best first. Raises ValueError for a score that is not finite."""
    excluded = frozenset(request.excluded_item_ids)
    if not all(math.isfinite(item.score) for item in answer.recommendations):
        raise ValueError("a score is not finite")
    kept = [item for item in answer.recommendations if item.item_id not in excluded]
    kept.sort(key=lambda item: -item.score)
    return RankResult(
        item_ids=tuple(item.item_id for item in kept),
        scores=tuple(item.score for item in kept),
        bundle_version=request.bundle_version,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        queue_ms=0.0,
        compute_ms=0.0,
        load=_NO_LOAD,
        replica=REPLICA,
    )


def _error_of(answer: httpx.Response) -> Exception:
    """Return the error for a status other than 200."""
    status = answer.status_code
    if status in _LATE:
        return DeadlineExceeded(LLM)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return Overloaded(LLM, _RETRY_AFTER_S)
    if status in _REFUSED:
        return InvalidRequest("llm_url", f"the server answered {status}: {answer.text[:200]}", "see its log")
    log.warning("llm_server_failed", error=f"{status}: {answer.text[:200]}")
    return DependencyUnavailable(LLM, _RETRY_AFTER_S)
