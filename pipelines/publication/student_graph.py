"""The student as an ONNX graph, built node by node for serving: one history, only the newest position.

One form outputs all items' scores, the other the state that searches the item table of a large catalogue. Training
computes keys and values for every position. Here only the newest position attends, so the projections move to the
query's side: instead of projecting L memories to keys, the query is projected once into the memory's space, and values
are projected after they were summed. This is the same arithmetic in another order, with about a fiftieth of the
operations.

Shape suffixes as in models/student.py: L positions, H heads, K head size, D hidden, F feed-forward, V items; 1 the
newest position.
"""

import itertools
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from models.student import START, Hop, StudentModel

_OPSET = 17
_IR_VERSION = 8


class _Graph:
    """Collects nodes and weights; every method returns the name of the added value."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._numbers = itertools.count()

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator.lower()}_{next(self._numbers)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def weight(self, value: Tensor | np.ndarray | list[int]) -> str:
        name = f"weight_{next(self._numbers)}"
        array = value.detach().float().numpy() if isinstance(value, Tensor) else np.asarray(value)
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def rms_norm(self, x: str, weight: Tensor, eps: float) -> str:
        mean = self.add("ReduceMean", self.add("Mul", x, x), axes=[-1], keepdims=1)
        root = self.add("Sqrt", self.add("Add", mean, self.weight(np.array([eps], dtype=np.float32))))
        return self.add("Mul", self.add("Div", x, root), self.weight(weight))

    def linear(self, x: str, weight_OI: Tensor) -> str:
        return self.add("MatMul", x, self.weight(weight_OI.T))


def student_graph(student: StudentModel) -> onnx.ModelProto:
    """Build the model: input `rows` (L,) int64 as in models/student.py, output `scores` (V,) float32."""
    graph = _Graph()
    embedded_LD = graph.add("Gather", graph.weight(student.embedding.weight), "rows")
    scores_1V = graph.linear(_final_state(graph, student, embedded_LD), student.head_weight_VD)
    graph.nodes.append(helper.make_node("Reshape", [scores_1V, graph.weight([-1])], ["scores"]))
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, ["places"])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [student.config.num_items])
    return _model(graph, student, rows, scores)


def state_graph(student: StudentModel) -> onnx.ModelProto:
    """Build the model without items: input `embedded` (L, D) float32, the history's embeddings, oldest first.

    Output `state` (D,) float32.
    """
    graph, size = _Graph(), student.config.hidden_size
    embedded_LD = graph.add("Concat", graph.weight(student.embedding.weight[START : START + 1]), "embedded", axis=0)
    final_1D = _final_state(graph, student, embedded_LD)
    graph.nodes.append(helper.make_node("Reshape", [final_1D, graph.weight([-1])], ["state"]))
    embedded = helper.make_tensor_value_info("embedded", TensorProto.FLOAT, ["items", size])
    state = helper.make_tensor_value_info("state", TensorProto.FLOAT, [size])
    return _model(graph, student, embedded, state)


def _final_state(graph: _Graph, student: StudentModel, embedded_LD: str) -> str:
    """Add all nodes from the embeddings, the beginning first, to the newest position's final state (1, D)."""
    config = student.config
    nothing_1D = graph.weight(np.zeros((1, config.hidden_size), dtype=np.float32))
    shifted = graph.add("Concat", nothing_1D, embedded_LD, axis=0)
    before_LD = graph.add("Slice", shifted, graph.weight([0]), graph.weight([-1]), graph.weight([0]))
    carried_LD = graph.add("Mul", before_LD, graph.weight(student.carry_D))
    mixed_LD = graph.add("Add", embedded_LD, carried_LD)
    memory_LD = graph.rms_norm(mixed_LD, student.norm_memory.weight, config.norm_eps)
    memory_DL = graph.add("Transpose", memory_LD, perm=[1, 0])
    length = graph.add("Shape", embedded_LD, end=1)
    state_1D = graph.add("Slice", embedded_LD, graph.weight([-1]), graph.weight([2**31]), graph.weight([0]))
    for hop in student.hops:
        assert isinstance(hop, Hop)
        state_1D = _hop(graph, hop, student, state_1D, (memory_LD, memory_DL), length)
    return graph.rms_norm(state_1D, student.norm.weight, config.norm_eps)


def _hop(graph: _Graph, hop: Hop, student: StudentModel, state_1D: str, memory: tuple[str, str], length: str) -> str:
    config = student.config
    heads, size, hidden = config.num_heads, config.head_dim, config.hidden_size
    memory_LD, memory_DL = memory
    normed_1D = graph.rms_norm(state_1D, hop.norm.weight, config.norm_eps)
    query_1D = graph.linear(normed_1D, hop.query.weight * size**-0.5)
    query_H1K = graph.add("Reshape", query_1D, graph.weight([heads, 1, size]))
    query_H1D = graph.add("MatMul", query_H1K, graph.weight(hop.key.weight.view(heads, size, hidden)))
    recency_H1L = _recency(graph, hop, length)
    weights_H1L = graph.add(
        "Softmax", graph.add("Add", graph.add("MatMul", query_H1D, memory_DL), recency_H1L), axis=-1
    )
    summed_H1D = graph.add("MatMul", weights_H1L, memory_LD)
    values_HDK = hop.value.weight.view(heads, size, hidden).transpose(1, 2)
    seen_H1K = graph.add("MatMul", summed_H1D, graph.weight(values_HDK))
    seen_1D = graph.add("Reshape", seen_H1K, graph.weight([1, hidden]))
    state_1D = graph.add("Add", state_1D, graph.linear(seen_1D, hop.output.weight))
    up_1F = graph.linear(graph.rms_norm(state_1D, hop.norm_forward.weight, config.norm_eps), hop.up.weight)
    gated_1F = graph.add("Mul", up_1F, graph.add("Sigmoid", up_1F))
    return graph.add("Add", state_1D, graph.linear(gated_1F, hop.down.weight))


def _recency(graph: _Graph, hop: Hop, length: str) -> str:
    """Add the learned recency weights, newest last: the final L columns of the reversed table."""
    newest_last_H1L = graph.weight(hop.recency_HL.flip(1).unsqueeze(1))
    start = graph.add("Neg", length)
    return graph.add("Slice", newest_last_H1L, start, graph.weight([2**31]), graph.weight([2]))


def _model(
    graph: _Graph, student: StudentModel, taken: onnx.ValueInfoProto, given: onnx.ValueInfoProto
) -> onnx.ModelProto:
    built = helper.make_graph(graph.nodes, "student", [taken], [given], graph.weights)
    model = helper.make_model(built, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    helper.set_model_props(model, {"max_items": str(student.config.max_items)})
    onnx.checker.check_model(model)
    return model
