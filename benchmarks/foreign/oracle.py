"""The frameworks' own decoding: transformers' beam search over a prefix trie, one unpadded prompt at a time.

The beams of a prompt start from one computation of it, which tests hold equal to transformers' own, where each beam
computes the whole prompt again.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList


class PrefixTrie(LogitsProcessor):
    """Masks tokens that continue no code, after the log-softmax over the whole vocabulary."""

    def __init__(self, sequences: Sequence[Sequence[int]], prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._next: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            for length in range(len(sequence)):
                self._next.setdefault(tuple(sequence[:length]), set()).add(sequence[length])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of allowed tokens, -inf for all others."""
        masked = torch.full_like(scores, -torch.inf)
        for row, tokens in enumerate(input_ids[:, self._prompt_len :].tolist()):
            allowed = sorted(self._next.get(tuple(tokens), ()))
            masked[row, allowed] = scores[row, allowed]
        return masked


@torch.inference_mode()
def generate(
    model: Any, prompt: Sequence[int], sequences: Sequence[Sequence[int]], num_beams: int, *, share_prompt: bool = True
) -> list[tuple[tuple[int, ...], float]]:
    """Return the codes, best first, with their scores, without beams that hold no code."""
    length = len(sequences[0])
    config: Any = GenerationConfig
    model.generation_config = config()  # a base's sampling settings would fill absent ones
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=length,
        min_new_tokens=length,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty=0.0,
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
        past_key_values=_prompt_cache(model, prompt, num_beams) if share_prompt else None,
        logits_processor=LogitsProcessorList([PrefixTrie(sequences, len(prompt))]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = output.sequences[:, len(prompt) :].tolist()
    known = {tuple(sequence) for sequence in sequences}
    scored = [(tuple(answer), score) for answer, score in zip(answers, output.sequences_scores.tolist(), strict=True)]
    return [(answer, score) for answer, score in scored if answer in known and score > -1e8]


def _prompt_cache(model: Any, prompt: Sequence[int], num_beams: int) -> Any:
    """Return the keys and values of all tokens but the last, once for each beam."""
    cache = model(torch.tensor([list(prompt[:-1])]), use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(num_beams)
    return cache


def framework_metrics(lists: Sequence[Sequence[Any]], labels: Sequence[Any], cutoff: int) -> tuple[float, float]:
    """Return HR and NDCG as the frameworks compute them, by code."""
    hits, gained = 0, 0.0
    for codes, label in zip(lists, labels, strict=True):
        rank = next((position for position, code in enumerate(codes[:cutoff]) if code == label), None)
        if rank is not None:
            hits, gained = hits + 1, gained + math.log(2) / math.log(rank + 2)
    return hits / len(labels), gained / len(labels)
