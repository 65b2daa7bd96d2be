"""The sizes of a model that determine memory and time: of a decoder, or of any model by its parameters and FLOPs."""

from dataclasses import dataclass, field

from models.decoder.config import DecoderConfig
from models.decoder.layer import Norm, Projection, rows_of
from models.errors import InvalidRequest

_FLOPS_PER_KEPT_BYTE = 100
"""A guess for non-decoders' forward pass: ResNet-50 in bf16 has about 80, a vision transformer hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts in `num_layers` of a decoder's layers; all other layers have a dense feed-forward."""

    num: int
    per_token: int
    ffn_size: int
    num_layers: int
    shared_size: int = 0
    """Total width of the experts that every token takes."""
    router_numbers: int = 0
    """Weights of a layer's router and gates."""
    ffn_matrices: int = 3

    def read_by(self, rows: float) -> float:
        """Return the expected number of a layer's experts that these rows read, with balanced routing."""
        return float(self.num * (1 - (1 - self.per_token / self.num) ** max(rows, 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): all heads' keys and values from one vector of `kv_rank` numbers.

    One rotary key is shared by all heads.
    """

    kv_rank: int
    q_rank: int
    """0: queries are not compressed."""
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStorage:
    """Bytes per weight by kind of matrix, including scales, in the checkpoint. `kv` is per number of the KV cache."""

    attention: float = 2.0
    ffn: float = 2.0
    experts: float = 2.0
    shared: float = 2.0
    router: float = 2.0
    embedding: float = 2.0
    head: float = 2.0
    vectors: float = 2.0
    kv: float = 2.0
    method: str = ""
    """The quantisation in words, empty without."""

    def bytes_of(self, kind: str) -> float:
        return float(getattr(self, kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A decoder. Widths are numbers per token.

    They are of the residual stream, of all query heads, of all key (or value) heads, and of the feed-forward layer.
    `ffn_matrices` is 3 for a gated feed-forward layer, 2 for a plain one; `num_positions` counts learned rows of
    positions.
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
    other_parameters: int = 0
    """Other parameters: of the final norm if it differs from `hidden_size`, and of some layers only."""
    windows: tuple[int, ...] = ()
    """The sliding windows, with their sinks, of the layers that have one. Other layers see every earlier token."""
    experts: Experts | None = None
    latent: Latent | None = None
    storage: WeightStorage = field(default_factory=WeightStorage)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Keys that were not read and parts that are not counted, as notes of the plan."""

    @property
    def query_width(self) -> int:
        return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim)

    @property
    def key_width(self) -> int:
        """Numbers of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def score_width(self) -> float:
        """Numbers of a query head multiplied with each earlier token: the mean of keys' and values', over all heads."""
        latent = self.latent
        return self.num_heads * (
            (latent.nope_dim + latent.rope_dim + latent.value_dim) / 2 if latent else float(self.head_dim)
        )

    @property
    def cached_score_width(self) -> float:
        """The same in decoding, where latent attention multiplies with the cached vectors."""
        latent = self.latent
        return self.num_heads * (latent.kv_rank + latent.rope_dim / 2) if latent else self.score_width

    @property
    def cached_numbers(self) -> int:
        """Numbers of a token in a layer's cache."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else 2 * self.key_width

    @property
    def cached_heads(self) -> int:
        """Vectors of these sizes, each with its own scale in a one-byte cache."""
        return 1 if self.latent else 2 * self.num_kv_heads

    @property
    def attention_weights(self) -> int:
        """Weights in the matrices of one layer's attention."""
        if (latent := self.latent) is None:
            return self.hidden_size * (2 * self.query_width + 2 * self.key_width)
        queries = (
            latent.q_rank * (self.hidden_size + self.query_width)
            if latent.q_rank
            else self.hidden_size * self.query_width
        )
        keys = self.hidden_size * (latent.kv_rank + latent.rope_dim)
        unpacked = latent.kv_rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        return queries + keys + unpacked + self.num_heads * latent.value_dim * self.hidden_size

    @property
    def ffn_weights(self) -> int:
        """Weights in a dense feed-forward layer."""
        return self.ffn_matrices * self.hidden_size * self.ffn_size

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert."""
        return self.experts.ffn_matrices * self.hidden_size * self.experts.ffn_size if self.experts else 0

    @property
    def weights_by_kind(self) -> dict[str, int]:
        """All parameters by the kind of matrix, as `WeightStorage` names them."""
        experts, layers = self.experts, self.num_layers
        sizes = {"attention": layers * self.attention_weights, "ffn": self.num_dense_layers * self.ffn_weights}
        if experts is not None:
            sizes["experts"] = experts.num_layers * experts.num * self.expert_weights
            sizes["shared"] = experts.num_layers * experts.ffn_matrices * self.hidden_size * experts.shared_size
            sizes["router"] = experts.num_layers * experts.router_numbers
        sizes["embedding"] = self.table_parameters
        sizes["head"] = 0 if self.is_tied else self.table_parameters
        vectors = layers * self.vector_numbers + (self.num_positions + 1) * self.hidden_size
        return sizes | {"vectors": vectors + self.other_parameters}

    @property
    def matrix_weights(self) -> int:
        """Weights in the matrices of all layers."""
        sizes = self.weights_by_kind
        return sum(sizes.get(kind, 0) for kind in ("attention", "ffn", "experts", "shared", "router"))

    @property
    def layer_weights(self) -> float:
        """Weights in the matrices of one layer, the mean where layers differ."""
        return self.matrix_weights / self.num_layers

    @property
    def active_weights(self) -> float:
        """Weights in the matrices of one layer that a token is multiplied with, the mean where layers differ."""
        if (experts := self.experts) is None:
            return self.layer_weights
        unused = experts.num_layers * (experts.num - experts.per_token) * self.expert_weights
        return (self.matrix_weights - unused) / self.num_layers

    @property
    def active_ffn_size(self) -> float:
        """Width of the feed-forward layers that a token passes, the mean where layers differ."""
        if (experts := self.experts) is None:
            return float(self.ffn_size)
        width = experts.per_token * experts.ffn_size + experts.shared_size
        return (self.num_dense_layers * self.ffn_size + experts.num_layers * width) / self.num_layers

    @property
    def table_parameters(self) -> int:
        """Parameters of one table of the vocabulary: the embedding, or a separate head."""
        return self.vocab_size * self.hidden_size

    @property
    def outside_parameters(self) -> int:
        """Parameters outside the layers: embedding, positions, final norm, and a separate head."""
        tables = 1 if self.is_tied else 2
        return tables * self.table_parameters + (self.num_positions + 1) * self.hidden_size + self.other_parameters

    @property
    def num_parameters(self) -> int:
        return sum(self.weights_by_kind.values())

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights as the checkpoint stores them."""
        return sum(size * self.storage.bytes_of(kind) for kind, size in self.weights_by_kind.items())

    def bytes_read_by(self, rows: float) -> float:
        """Return the bytes of weights that a step of `rows` reads: the layers, the experts in use, and the head."""
        sizes = self.weights_by_kind
        read: dict[str, float] = {kind: sizes.get(kind, 0) for kind in ("attention", "ffn", "shared", "router")}
        if self.experts is not None:
            read["experts"] = sizes["experts"] * self.experts.read_by(rows) / self.experts.num
        head = self.table_parameters * (self.storage.embedding if self.is_tied else self.storage.head)
        return head + sum(size * self.storage.bytes_of(kind) for kind, size in read.items())

    def cached_tokens(self, length: float) -> float:
        """Return the tokens of a context in the KV cache, summed over the layers: at most a window's."""
        full = self.num_layers - len(self.windows)
        return full * length + sum(min(length, window) for window in self.windows)

    def attention_pairs(self, length: float) -> float:
        """Return the mean number of tokens that a token of a row sees, summed over the layers."""
        windowed = sum(length / 2 if length <= window else window - window**2 / (2 * length) for window in self.windows)
        return (self.num_layers - len(self.windows)) * length / 2 + windowed

    def training_flops(self, tokens: float, length: float) -> float:
        """Return the FLOPs of forward and backward pass over rows of this length, with causal attention.

        `pipelines/training/speed.py` counts in the same way.
        """
        return 6 * tokens * self.forward_weights + 12 * self.score_width * self.attention_pairs(length) * tokens

    @property
    def forward_weights(self) -> float:
        """Weights that a token is multiplied with: in the layers' matrices and the head."""
        return self.num_layers * self.active_weights + self.table_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainShape:
    """Another model, known by its parameters and the FLOPs of one sample's forward pass (a multiply-add is two).

    `activation_bytes`: bytes kept of a sample for the backward pass, a guess if `is_guessed`.
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
        windows=(window.size + window.num_sinks,) * len(window.layers) if (window := config.window) else (),
    )


def plain_shape(parameters: float, flops: float, activation_bytes: float | None = None) -> PlainShape:
    """Return a model by its sizes. Raises InvalidRequest naming the option."""
    for option, value in (("--parameters", parameters), ("--flops", flops)):
        if not 1 <= value < 1e30:
            raise InvalidRequest(option, f"{value:g} is not from 1 to 10^30", "give such as 25.6e6 and 8.2e9")
    if activation_bytes is not None and not 0 <= activation_bytes < 1e15:
        raise InvalidRequest(
            "--activation-mb", f"{activation_bytes / 1e6:g} is not from 0 to 10^9", "give megabytes of one sample"
        )
    return PlainShape(
        name="model",
        num_parameters=int(parameters),
        flops_per_sample=flops,
        activation_bytes=flops / _FLOPS_PER_KEPT_BYTE if activation_bytes is None else activation_bytes,
        is_guessed=activation_bytes is None,
    )
