"""The reference for outputs: transformers in fp32. Measures how far each engine's greedy tokens are from it.

A token that is not the reference's best is a tie broken differently, or a fault: the gap between the best logit and the
chosen one distinguishes them. The same sequences through our decoder in fp32 give the largest difference of logits.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine.worker import Reply, Request, serve
from models.decoder.weights import load_decoder
from pipelines.training.dense import hidden_states


class Reference:
    """transformers and our decoder over the same weights, both in fp32, no cache."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._theirs: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
        self._ours = load_decoder(Path(options["model"]), torch.float32, "cpu")

    def describe(self) -> Reply:
        """Return nothing: the reference adds no description."""
        return {}

    @torch.inference_mode()
    def answer(self, ask: Request) -> Reply:
        """Compare one engine's outputs for these prompts with the reference."""
        prompts_BT, new_BN = torch.tensor(ask["prompts"]), torch.tensor(ask["outputs"])
        rows_BT = torch.cat((prompts_BT, new_BN), dim=1)[:, :-1]
        first = prompts_BT.shape[1] - 1
        logits_BTV = self._theirs(rows_BT).logits
        gap_BN = _gap(logits_BTV[:, first:], new_BN)
        return {
            "best_share": float((gap_BN == 0).float().mean()),
            "largest_gap": float(gap_BN.max()),
            "logits_max_error": float((self._our_logits(rows_BT) - logits_BTV).abs().max()),
        }

    def _our_logits(self, rows_BT: Tensor) -> Tensor:
        logits_XV = hidden_states(self._ours, rows_BT) @ self._ours.head_weight_VD.T
        return logits_XV.view(*rows_BT.shape, -1)


def _gap(logits_BNV: Tensor, chosen_BN: Tensor) -> Tensor:
    return logits_BNV.amax(-1) - logits_BNV.gather(-1, chosen_BN.unsqueeze(-1)).squeeze(-1)


if __name__ == "__main__":
    serve(Reference)
