"""The memory behind the block pool: keys and values of all layers in fixed blocks. It knows no requests and no hashes."""

import torch
from torch import Tensor

from models.decoder import DecoderConfig


class KvCache:
    """Two tensors (layers, blocks, block tokens, G, K): one slot for each token of each block."""

    def __init__(
        self, config: DecoderConfig, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_hidden_layers, num_blocks, block_tokens, config.num_key_value_heads, config.head_dim)
        self.block_tokens = block_tokens
        self.num_groups = config.num_key_value_heads
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots_T: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Store tokens in their slots (block * block tokens + offset)."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots_T, k_TGK)
        self._values[layer].flatten(0, 1).index_copy_(0, slots_T, v_TGK)

    def read(self, layer: int, blocks_EN: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the blocks of several contexts: (E, N) block ids -> keys and values (E, N * block tokens, G, K)."""
        return self._keys[layer][blocks_EN].flatten(1, 2), self._values[layer][blocks_EN].flatten(1, 2)
