"""transformers in the comparison: plain `generate`, its beams constrained to the catalogue by a logits processor."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from benchmarks.engine.cases import NUM_LEVELS, code_table
from benchmarks.engine.catalogue import CodeTrie, mask_scores
from benchmarks.engine.worker import Reply, Request, serve


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
        processors = LogitsProcessorList([_CatalogueProcessor(self._trie, num_prompt)])
        return {"generation_config": _greedy(max_new_tokens=NUM_LEVELS, **beams), "logits_processor": processors}


def _greedy(**settings: Any) -> Any:
    """Return a greedy generation config without an end token."""
    config: Any = GenerationConfig
    return config(do_sample=False, pad_token_id=0, **settings)


class _CatalogueProcessor(LogitsProcessor):
    """Constrains the beams of prompts of one length to the catalogue."""

    def __init__(self, trie: CodeTrie, num_prompt: int) -> None:
        self._trie = trie
        self._num_prompt = num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the scores (beams, vocabulary) of the beams `input_ids`."""
        return mask_scores(self._trie, input_ids[:, self._num_prompt :].cpu().numpy(), scores)


if __name__ == "__main__":
    serve(TransformersEngine)
