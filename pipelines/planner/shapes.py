"""The sizes of a model that memory and time follow from: of a decoder in Hugging Face's layout, or of any model by its parameters and FLOPs."""

import json
from dataclasses import dataclass
from pathlib import Path

from models.decoder.config import FAMILIES, DecoderConfig, read_config
from models.decoder.layer import Norm, Projection, rows_of
from models.errors import CheckpointError, InvalidRequest

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

_FLOPS_PER_KEPT_BYTE = 100
"""A guess for models that are no decoders: of a forward pass. ResNet-50 in bf16 has about 80, a vision transformer several hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A dense decoder. Widths are numbers a token: of the residual stream, of all query heads, of all key (or value) heads, of the feed-forward layer.

    `ffn_matrices` is 3 for a gated feed-forward layer, 2 for a plain one; `num_positions` counts learned rows of positions.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    ffn_matrices: int = 3
    is_tied: bool = True
    num_positions: int = 0
    vector_numbers: int = 0
    """Biases and norms of one layer."""
    has_qk_norm: bool = False
    """Whether queries and keys are normalised, which keeps both in fp32."""

    @property
    def query_width(self) -> int:
        """Numbers of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of one layer."""
        return self.hidden_size * (2 * self.query_width + 2 * self.key_width + self.ffn_matrices * self.ffn_size)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return self.layer_weights + self.vector_numbers

    @property
    def table_parameters(self) -> int:
        """Parameters of one table of the vocabulary: the embedding, or the head where it is another."""
        return self.vocab_size * self.hidden_size

    @property
    def outside_parameters(self) -> int:
        """Parameters outside the layers: embedding, positions, final norm, and a head of its own."""
        tables = 1 if self.is_tied else 2
        return tables * self.table_parameters + (self.num_positions + 1) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        return self.num_layers * self.layer_parameters + self.outside_parameters

    def training_flops(self, tokens: float, length: float) -> float:
        """Return the FLOPs of forward and backward pass over rows of this length, as `pipelines/training/speed.py` counts them: attention over the causal half."""
        return 6 * tokens * self.forward_weights + 6 * self.num_layers * self.query_width * length * tokens

    @property
    def forward_weights(self) -> int:
        """Weights that a token is multiplied with: those of the layers' matrices and of the head."""
        return self.num_layers * self.layer_weights + self.table_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainShape:
    """A model that is no decoder, known by its parameters and the FLOPs of one sample's forward pass (a multiply-add is two).

    `activation_bytes` is what one sample keeps for the backward pass, `is_guessed` where nobody said.
    """

    name: str
    num_parameters: int
    flops_per_sample: float
    activation_bytes: float
    is_guessed: bool = False


Shape = DecoderShape | PlainShape


def shape_of(config: DecoderConfig, name: str) -> DecoderShape:
    """Return the shape of one of our decoders."""
    rows = list(rows_of(config))
    norms = sum(row.size(config) for row in rows if isinstance(row, Norm))
    biases = sum(row.rows(config) for row in rows if isinstance(row, Projection) and row.has_bias(config))
    return DecoderShape(
        name=name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        is_tied=config.tie_word_embeddings,
        vector_numbers=norms + biases,
        has_qk_norm=config.qk_norm,
    )


def read_shape(path: Path) -> DecoderShape:
    """Read a Hugging Face folder, or its `config.json`. Raises InvalidRequest where it is absent, CheckpointError where its decoder is not supported."""
    file = path if path.name == "config.json" else path / "config.json"
    if not file.is_file():
        raise InvalidRequest(
            "MODEL", f"{path} has no config.json", "give a folder in Hugging Face's layout, or --parameters and --flops"
        )
    _refuse_other_models(file)
    return shape_of(read_config(file.parent), file.parent.resolve().name)


def plain_shape(
    parameters: float, flops: float, activation_bytes: float | None = None, name: str = "model"
) -> PlainShape:
    """Return a model that is no decoder. Raises InvalidRequest naming the option."""
    for option, value in (("--parameters", parameters), ("--flops", flops)):
        if not 1 <= value < 1e30:
            raise InvalidRequest(option, f"{value:g} is no size of a model", "give such as 25.6e6 and 8.2e9")
    if activation_bytes is not None and not 0 <= activation_bytes < 1e15:
        raise InvalidRequest(
            "--activation-mb", f"{activation_bytes / 1e6:g} is no size", "give megabytes of one sample"
        )
    return PlainShape(
        name=name,
        num_parameters=int(parameters),
        flops_per_sample=flops,
        activation_bytes=flops / _FLOPS_PER_KEPT_BYTE if activation_bytes is None else activation_bytes,
        is_guessed=activation_bytes is None,
    )


def shape_from(
    path: Path | None, parameters: float | None, flops: float | None, activation_bytes: float | None = None
) -> Shape:
    """Return the shape of a folder, or of a model that is no decoder by its sizes. Raises InvalidRequest where neither or both are given."""
    sizes = [value for value in (parameters, flops) if value is not None]
    if path is not None and not sizes:
        return read_shape(path)
    if path is None and parameters is not None and flops is not None:
        return plain_shape(parameters, flops, activation_bytes)
    problem = (
        "beside --parameters and --flops" if path is not None else "is not given, and --parameters with --flops neither"
    )
    raise InvalidRequest(
        "MODEL", problem, "give a folder with a config.json, or both options for a model that is no decoder"
    )


def _refuse_other_models(file: Path) -> None:
    """Refuse what the trainer cannot train, with the way to plan it all the same. What is not readable is left to `read_config`."""
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(raw, dict):
        return
    experts = next((raw[key] for key in _EXPERT_KEYS if raw.get(key)), None)
    if experts is not None:
        raise CheckpointError(
            f"{file}: a mixture of {experts} experts would need expert parallelism, which this trainer does not offer; plan a dense model"
        )
    family = raw.get("model_type", "llama")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{file}: model_type {family!r} is none of {', '.join(FAMILIES)}; give --parameters and --flops to plan it as a model that is no decoder"
        )
