"""An encoder of a few words: a real graph and tokenizer, whose vectors point into the direction of a word's topic."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from services.wishes.encoder import GRAPH, TOKENIZER


def write_tiny_encoder(folder: Path, topics: Sequence[Sequence[str]]) -> None:
    """Write an encoder that maps each word of a topic to the topic's direction, and other words to one more."""
    words = ["[UNK]", *(word for topic in topics for word in topic)]
    table = np.full((len(words), len(topics) + 1), 0.01, dtype=np.float32)
    table[0, -1] = 1
    for topic in range(len(topics)):
        table[[words.index(word) for word in topics[topic]], topic] = 1
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["mask"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["float", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["sums"], keepdims=0),
        helper.make_node("LpNormalization", ["sums"], ["vectors"], axis=-1, p=2),
    ]
    constants = {"table": table, "last": np.array([2]), "middle": np.array([1])}
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "L"]) for name in ("ids", "mask")],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["B", len(topics) + 1])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / GRAPH)
    tokenizer = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / TOKENIZER))
