"""Export of a decoder as an int8 ONNX graph for ONNX Runtime. It is not served.

The graph computes the scores of all tokens after one whole prompt: no paged cache, no batches of mixed lengths, no
beams, no masks. An export of a catalogue of depth 1 can therefore be measured like the engine's variants, and appears
in the table for comparison. TensorRT takes the file: `trtexec --onnx=decoder.onnx --minShapes=tokens:1x1
--optShapes=tokens:1x64 --maxShapes=tokens:1x512 --fp16`. This was not run here: no figure is claimed.

Shape suffixes: L positions, H query heads, G key/value heads, K head size, V vocabulary.
"""

import copy
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models.catalogue import Catalogue
from models.decoder.decoder import Decoder, RMSNorm
from models.prompt import Prompt

_OPSET = 17
_K = 10


class PromptScores(nn.Module):
    """A decoder over one prompt: tokens (1, L) -> scores (V,) of the next token, in widely supported operations."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores."""
        tokens_L = tokens[0]
        hidden_LD: Tensor = self.decoder(tokens_L, torch.arange(tokens_L.shape[0]), _attend)
        scores_V: Tensor = hidden_LD[-1] @ self.decoder.head_weight_VD.T
        return scores_V


def write_onnx(decoder: Decoder, path: Path, *, is_int8: bool = True) -> None:
    """Write the decoder as an ONNX graph.

    `is_int8` stores matrices in 8 bits with a scale per output, activations at run time.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = path.with_suffix(".fp32.onnx")
    with warnings.catch_warnings(), torch.no_grad():
        # of torch: its other exporter needs onnxscript, and traces shapes as constants, but lengths vary
        warnings.simplefilter("ignore")
        torch.onnx.export(
            PromptScores(_with_plain_norms(decoder)).eval(),
            (torch.zeros(1, 3, dtype=torch.int64),),
            str(whole),
            dynamo=False,
            input_names=["tokens"],
            output_names=["scores"],
            dynamic_axes={"tokens": {1: "length"}},
            opset_version=_OPSET,
        )
    if is_int8:
        root = logging.getLogger()  # the pre-processing that onnxruntime advises has no effect here
        was, root.disabled = root.disabled, True
        try:
            # 7 bits: without VNNI, a processor adds pairs of 8-bit products in 16 bits, which saturate
            quantize_dynamic(whole, path, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
        finally:
            root.disabled = was
        whole.unlink()
    else:
        whole.rename(path)


class OnnxVariant:
    """An ONNX decoder of a catalogue of depth 1 in ONNX Runtime on one thread, measured like the engine's variants."""

    def __init__(self, path: Path, catalogue: Catalogue, prompt: Prompt, *, repeats: bool) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._catalogue, self._prompt, self._repeats = catalogue, prompt, repeats
        self._token_I = catalogue.token_offsets[0] + catalogue.codes[:, 0]
        self.weight_bytes = path.stat().st_size

    def rank(self, histories: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
        """Return the list of each history, one after another, and the number of prompt tokens."""
        lists, num_tokens = [], 0
        for history in histories:
            prompt = self._prompt.tokens(self._catalogue, history.tolist())
            (scores_V,) = self._session.run(None, {"tokens": np.array([prompt], dtype=np.int64)})
            scores_I = scores_V[self._token_I]
            if not self._repeats:
                scores_I[history] = -np.inf
            best = np.argpartition(-scores_I, min(_K, len(scores_I) - 1))[:_K]
            lists.append(best[np.argsort(-scores_I[best])])
            num_tokens += len(prompt)
        return lists, num_tokens


class _PlainNorm(nn.Module):
    """An RMS norm in operations of ONNX before its opset 23."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight: Tensor = norm.weight
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise along the last dimension."""
        normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return normed


def _with_plain_norms(decoder: Decoder) -> Decoder:
    plain = copy.deepcopy(decoder)
    for module in list(plain.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                setattr(module, name, _PlainNorm(child))
    return plain


def _attend(_layer: int, q_LHK: Tensor, k_LGK: Tensor, v_LGK: Tensor) -> Tensor:
    """Attend causally: each position to all positions up to itself."""
    per_group = q_LHK.shape[1] // k_LGK.shape[1]
    q_HLK, k_HLK, v_HLK = (
        x.transpose(0, 1) for x in (q_LHK, k_LGK.repeat_interleave(per_group, 1), v_LGK.repeat_interleave(per_group, 1))
    )
    scores_HLL = q_HLK @ k_HLK.transpose(1, 2) * q_LHK.shape[-1] ** -0.5
    positions_L = torch.arange(q_LHK.shape[0])
    is_hidden_LL = positions_L.unsqueeze(0) > positions_L.unsqueeze(1)
    out_HLK: Tensor = scores_HLL.masked_fill(is_hidden_LL, -torch.inf).softmax(-1) @ v_HLK
    return out_HLK.transpose(0, 1)
