"""The Python interface of the compiled library: its structs, field by field as in `model.h`, and its functions.

Structs hold only addresses; the caller keeps the tensors alive. The module does not know requests.
"""

import ctypes
import enum
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from models.decoder.layer import MATRICES, NORMS

_log = logging.getLogger(__name__)
_COMPILED = "tailrace::compiled"
"""Name of a call in torch's profiler, which does not see foreign code."""
_Address, _Number, _Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class MatrixStruct(ctypes.Structure):
    """A matrix (out, in): in the model's dtype, or rows of 8 or 4 bits as `quantise.py` makes them.

    `weight` is the address of its rows or, packed by `Library.pack`, null, and `strips` that of its strips.
    """

    _fields_ = tuple((name, _Address) for name in ("weight", "strips", "bias", "scales", "sums", "multipliers"))


class LayerStruct(ctypes.Structure):
    """One layer's norms and joined matrices, in the order of the table in `models/decoder/layer.py`."""

    _fields_ = (
        *((name, _Address) for name in NORMS),
        *((name, MatrixStruct) for name in MATRICES),
    )


class SlotsStruct(ctypes.Structure):
    """The adapters of a joined matrix: `SlotMatrix`."""

    _fields_ = (("down", _Address), ("up", _Address))


class LayerSlotsStruct(ctypes.Structure):
    """The adapters of one layer's joined matrices."""

    _fields_ = tuple((name, SlotsStruct) for name in MATRICES)


class AdapterRowsStruct(ctypes.Structure):
    """The slots of rows: `AdapterRows`."""

    _fields_ = (("num_segments", _Number), ("segments", _Address), ("slots", _Address))


class ModelStruct(ctypes.Structure):
    """The decoder's shape and weights."""

    _fields_ = (
        *(
            (name, _Number)
            for name in ("is_bf16", "is_quantised", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn")
        ),
        ("num_layers", _Number),
        ("eps", _Real),
        ("rope_scale", _Real),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("embedding", MatrixStruct),
        *((name, _Address) for name in ("norm", "periods")),
    )


class StepStruct(ctypes.Structure):
    """The rows of one step, the slots of their keys and values, and the pages that each tile sees."""

    _fields_ = (
        *((name, _Number) for name in ("rows", "paged_rows", "num_tiles")),
        *((name, _Address) for name in ("tokens", "positions", "slot_mapping", "block_table")),
        *((name, _Address) for name in ("tiles", "windowed_tiles", "is_windowed", "keys", "values")),
        ("layer_slots", _Number),
        ("block_tokens", _Number),
        *((name, _Address) for name in ("tail_keys", "tail_values", "tail_places", "tail_seen")),
        *((name, _Number) for name in ("num_tail_places", "num_outputs")),
        *((name, _Address) for name in ("output_rows", "hidden")),
        *((name, AdapterRowsStruct) for name in ("adapter_rows", "output_adapter_rows")),
        ("slot_rank", _Number),
        *((name, _Address) for name in ("slot_ranks", "adapters")),
    )


class Amx(enum.IntEnum):
    """Whether the library multiplies with AMX tiles; if not, the reason."""

    ABSENT = 0
    ON = 1
    REFUSED = 2
    WRONG = 3


_WHY_NO_AMX = {
    Amx.REFUSED: "the operating system does not permit its registers",
    Amx.WRONG: "its results differ from those of the vector instructions",
}


def _shown() -> AbstractContextManager[object]:
    """Return a profiler range if a profiler runs (private API, as read in torch 2.13.0).

    Otherwise a null context, since a range costs ten microseconds even without a profiler.
    """
    return record_function(_COMPILED) if torch._C._autograd._profiler_enabled() else nullcontext()


class Library:
    """The library's functions, run on torch's number of threads.

    `amx`: whether prompts are multiplied with AMX. `packs`: whether matrices of this processor can be packed.
    """

    def __init__(self, path: Path) -> None:
        """Load the library and run its AMX self-test. Raises OSError."""
        loaded = ctypes.CDLL(str(path))
        self._forward, self._score = loaded.tailrace_forward, loaded.tailrace_score
        self.amx = Amx(loaded.tailrace_start())
        if self.amx in _WHY_NO_AMX:
            _log.warning("the engine runs without AMX, several times slower at prompts: %s", _WHY_NO_AMX[self.amx])
        self._pack = loaded.tailrace_pack
        self._pack.argtypes = (_Address, *[_Number] * 3, _Address)
        self._pack.restype = None
        self.packs = bool(loaded.tailrace_packs())
        self._forward.argtypes = (ctypes.POINTER(ModelStruct), ctypes.POINTER(StepStruct), ctypes.c_int32)
        matrix = ctypes.POINTER(MatrixStruct)
        self._score.argtypes = (ctypes.c_int32, _Address, matrix, _Address, *[_Number] * 4, ctypes.c_int32)
        self._forward.restype = self._score.restype = None

    def forward(self, model: ModelStruct, step: StepStruct) -> None:
        """Run a step: writes `step.hidden`, the cache and the tails."""
        with _shown():
            self._forward(model, step, torch.get_num_threads())

    def pack(self, matrix_NI: Tensor, parts: int) -> Tensor:
        """Return the strips of a contiguous matrix of `parts` equal parts, whose rows are whole 32-bit words.

        A strip is 16 rows, word by word, the layout that the library multiplies; the last of a part is filled up.
        """
        assert self.packs and matrix_NI.is_contiguous(), "addresses carry no strides"  # noqa: PT018
        words_NI = matrix_NI.view(torch.int32)
        width, words = len(words_NI) // parts, words_NI.shape[1]
        strips = torch.empty(parts * -(-width // 16) * 16, words, dtype=torch.int32)
        self._pack(matrix_NI.data_ptr(), parts, width, words, strips.data_ptr())
        return strips

    def score(self, x_RI: Tensor, weight_NI: Tensor) -> Tensor:
        """Multiply rows by a matrix (out, in), both contiguous and fp32 or both bf16, to fp32 (R, N)."""
        assert weight_NI.is_contiguous(), "addresses carry no strides"
        assert x_RI.dtype == weight_NI.dtype and x_RI.shape[1] == weight_NI.shape[1], "dtypes and sizes must match"  # noqa: PT018
        return self.score_rows(x_RI, MatrixStruct(weight=weight_NI.data_ptr()), 0, len(weight_NI))

    def score_rows(self, x_RI: Tensor, matrix: MatrixStruct, first: int, last: int) -> Tensor:
        """Multiply contiguous rows, fp32 or bf16, by the rows `first` to `last` - 1 of a matrix of any kind.

        Returns fp32 (R, last - first).
        """
        assert x_RI.is_contiguous(), "addresses carry no strides"
        out_RN = torch.empty(len(x_RI), last - first, dtype=torch.float32)
        with _shown():
            self._score(
                x_RI.dtype is torch.bfloat16,
                x_RI.data_ptr(),
                matrix,
                out_RN.data_ptr(),
                len(x_RI),
                x_RI.shape[1],
                first,
                last - first,
                torch.get_num_threads(),
            )
        return out_RN
