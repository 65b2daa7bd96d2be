"""The decoder's own rules; that its logits equal transformers' is shown in test_weights."""

import torch

from models.decoder.decoder import RMSNorm


def test_the_norm_is_computed_in_fp32() -> None:
    """A bf16 row is normalised in fp32 and rounded once, at the end."""
    row = torch.randn(3, 64).to(torch.bfloat16)

    normed = RMSNorm(64, 1e-5)(row)

    wanted = row.float() * row.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed, wanted.to(torch.bfloat16), atol=0.0, rtol=0.01)
