"""transformers as a peer: plain `generate`, with a logits processor for the catalogue; the reference in fp32."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from benchmarks.engine.cases import NUM_LEVELS, code_table
from benchmarks.engine.catalogue import CodeTrie, mask_scores
from benchmarks.engine.worker import BenchmarkEngine, Reply, Request, serve
from models.decoder.weights import load_decoder
from models.search import Scores
from pipelines.scoring.dense import hidden_states


class TransformersEngine:
    """One model in eager mode with its default attention."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).to(options["device"]).eval()
        self._model.generation_config = _greedy()  # the checkpoint's own would end texts
        self._trie = CodeTrie(code_table(self._model.config.vocab_size))

    def describe(self) -> Reply:
        """Return versions and how beams are constrained."""
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"versions": versions, "constraint": "held to the catalogue by a logits processor"}

    @torch.inference_mode()
    def answer(self, ask: Request) -> Reply:
        """Generate or rank."""
        prompts_BT = torch.tensor(ask["prompts"], device=self._model.device)
        num_prompt = prompts_BT.shape[1]
        settings = self._settings(ask, num_prompt)
        rows_BT = self._model.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), **settings)
        new = rows_BT[:, num_prompt:].tolist()
        if ask["do"] == "write":
            return {"outputs": new}
        codes, best = self._trie.codes_of(new), ask["num_best"]
        return {"outputs": [codes[first : first + best] for first in range(0, len(codes), best)]}

    def _settings(self, ask: Request, num_prompt: int) -> dict[str, Any]:
        if ask["do"] == "write":
            return {"generation_config": _greedy(max_new_tokens=ask["num_new"][0])}
        beams = {"num_beams": ask["width"], "num_return_sequences": ask["num_best"], "length_penalty": 0.0}
        processors = LogitsProcessorList([_CatalogueProcessor(self._trie, num_prompt, ask["scores"])])
        return {"generation_config": _greedy(max_new_tokens=NUM_LEVELS, **beams), "logits_processor": processors}


def _greedy(**settings: Any) -> Any:
    """Return a greedy generation config without an end token."""
    config: Any = GenerationConfig
    return config(do_sample=False, pad_token_id=0, **settings)


class _CatalogueProcessor(LogitsProcessor):
    """Constrains beams of prompts of equal length to the catalogue."""

    def __init__(self, trie: CodeTrie, num_prompt: int, scores: Scores) -> None:
        self._trie = trie
        self._num_prompt = num_prompt
        self._scores: Scores = scores

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the scores (beams, vocabulary) of the beams `input_ids`."""
        return mask_scores(self._trie, input_ids[:, self._num_prompt :].cpu().numpy(), scores, self._scores)


class Reference:
    """The reference for outputs: transformers and our decoder over the same weights, both in fp32, without a cache.

    A token that is not the reference's best is a tie broken differently, or a fault: the gap between the best logit and
    the chosen logit distinguishes them. The same sequences through our decoder give the largest difference of logits.
    """

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


def _build(options: dict[str, Any]) -> BenchmarkEngine:
    return Reference(options) if options.get("is_reference") else TransformersEngine(options)


if __name__ == "__main__":
    serve(_build)
