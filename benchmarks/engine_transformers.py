"""transformers as a contestant: `generate` as it comes, its beams held to the catalogue by a logits processor."""

from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from benchmarks.engine_cases import NUM_LEVELS, CodeTable, code_table
from benchmarks.engine_worker import Ask, Reply, serve


class TransformersContestant:
    """One model in eager mode with its default attention."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).to(options["device"]).eval()
        self._model.generation_config = _greedy()  # the checkpoint's own would end texts
        self._codes = code_table(self._model.config.vocab_size)

    def describe(self) -> Reply:
        """Give versions, and that beams are held to the catalogue."""
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"versions": versions, "constraint": "catalogue, by a logits processor"}

    @torch.inference_mode()
    def answer(self, ask: Ask) -> Reply:
        """Write or rank."""
        prompts_BT = torch.tensor(ask["prompts"], device=self._model.device)
        num_prompt = prompts_BT.shape[1]
        rows = self._model.generate(
            prompts_BT, attention_mask=torch.ones_like(prompts_BT), **self._settings(ask, num_prompt)
        )
        new = rows[:, num_prompt:].tolist()
        if ask["do"] == "write":
            return {"outputs": new}
        codes = (np.array(new) - np.array(self._codes.token_offsets)).tolist()
        best = ask["num_best"]
        return {"outputs": [codes[first : first + best] for first in range(0, len(codes), best)]}

    def _settings(self, ask: Ask, num_prompt: int) -> dict[str, Any]:
        if ask["do"] == "write":
            return {"generation_config": _greedy(max_new_tokens=ask["num_new"][0])}
        beams = {"num_beams": ask["width"], "num_return_sequences": ask["num_best"], "length_penalty": 0.0}
        processors = LogitsProcessorList([_CatalogueProcessor(self._codes, num_prompt)])
        return {"generation_config": _greedy(max_new_tokens=NUM_LEVELS, **beams), "logits_processor": processors}


def _greedy(**settings: Any) -> Any:
    """Make settings in which nothing is drawn and no token ends a text."""
    config: Any = GenerationConfig
    return config(do_sample=False, pad_token_id=0, **settings)


class _CatalogueProcessor(LogitsProcessor):
    """Scores only codes that lead on to an item, as log-probabilities over the level's codes, as our engine does."""

    def __init__(self, table: CodeTable, num_prompt: int) -> None:
        size = table.level_size
        codes = table.codes[np.lexsort(table.codes.T[::-1])]
        self._size = size
        self._offsets = table.token_offsets
        self._num_prompt = num_prompt
        self._first_S = np.zeros(size, dtype=bool)
        self._first_S[codes[:, 0]] = True
        self._second_SS = np.zeros((size, size), dtype=bool)
        self._second_SS[codes[:, 0], codes[:, 1]] = True
        self._third = codes[:, 2]
        pairs = codes[:, 0] * size + codes[:, 1]
        self._starts = np.searchsorted(pairs, np.arange(size * size + 1))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the scores (beams, vocabulary) of the beams that have spelled `input_ids`."""
        level = input_ids.shape[1] - self._num_prompt
        spelled = input_ids[:, self._num_prompt :].cpu().numpy() - np.array(self._offsets[:level], dtype=np.int64)
        allowed_BS = torch.from_numpy(self._allowed(spelled)).to(scores.device)
        first = self._offsets[level]
        logp_BS = scores[:, first : first + self._size].log_softmax(-1).masked_fill(~allowed_BS, -torch.inf)
        masked_BV = torch.full_like(scores, -torch.inf)
        masked_BV[:, first : first + self._size] = logp_BS
        return masked_BV

    def _allowed(self, spelled: np.ndarray) -> np.ndarray:
        if spelled.shape[1] == 0:
            return np.tile(self._first_S, (len(spelled), 1))
        spelled = spelled.clip(0, self._size - 1)  # beams that do not count yet hold any token
        if spelled.shape[1] == 1:
            allowed: np.ndarray = self._second_SS[spelled[:, 0]]
            return allowed
        pairs = spelled[:, 0] * self._size + spelled[:, 1]
        allowed = np.zeros((len(spelled), self._size), dtype=np.bool_)
        for row, pair in enumerate(pairs):
            allowed[row, self._third[self._starts[pair] : self._starts[pair + 1]]] = True
        return allowed


if __name__ == "__main__":
    serve(TransformersContestant)
