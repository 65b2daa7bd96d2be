"""Steps of one fixed shape: requests of equally many rows, each row seeing all of its request's pages.

Text decode (one row each) and beams are such steps. Everything about them is told in tensors that stay in place, so that
what is laid out from them on the device can be recorded once and run again over other contents.

Shape suffixes: R requests, N block ids of all requests.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RegularRows:
    """Request r has rows r * `rows_each` on, at position `position_R[r]`, over the first `limit_R[r]` tokens of its pages.

    Its block ids are `blocks_N` from `first_block_R[r]` on. No request sees more than `max_context` tokens. All int64.
    """

    limit_R: Tensor
    position_R: Tensor
    first_block_R: Tensor
    blocks_N: Tensor
    rows_each: int
    max_context: int
