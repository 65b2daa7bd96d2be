"""The decoder's own rules; that its logits equal transformers' is shown in test_weights."""

import pytest
import torch

from models.decoder.config import Rope
from models.decoder.decoder import RMSNorm
from models.decoder.rope import rotary_angles, rotate


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotary_scores_depend_on_distance_alone(theta) -> None:
    """The score of a query and a key depends on the difference of their positions alone."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 16, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotated = [
            rotate(vector, *rotary_angles(torch.tensor([position]), 16, Rope(theta), torch.float64))
            for vector, position in ((query, query_position), (key, key_position))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=1e-4)


def test_the_norm_is_computed_in_fp32() -> None:
    """A bf16 row is normalised in fp32 and rounded once, at the end."""
    row = torch.randn(3, 64).to(torch.bfloat16)

    normed = RMSNorm(64, 1e-5)(row)

    wanted = row.float() * row.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed, wanted.to(torch.bfloat16), atol=0.0, rtol=0.01)
