"""The encoder's graph against the framework that trained such models, on random weights of a small shape."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from pipelines.wishes.minilm import MiniLM, export, quantise


@pytest.fixture(scope="module")
def framework() -> torch.nn.Module:
    """A BERT of 6 layers and 12 heads with random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=48, num_hidden_layers=6, intermediate_size=96, num_attention_heads=12
    )
    return BertModel(config, add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def model(framework: torch.nn.Module) -> MiniLM:
    return MiniLM(
        {name: tensor for name, tensor in framework.state_dict().items() if tensor.is_floating_point()}
    ).eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of different lengths."""
    ids, mask = torch.randint(1, 50, (3, 7)), torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = mask[2, 2:] = 0
    return ids * mask, mask


@torch.inference_mode()
def test_vectors_equal_the_frameworks_mean_of_tokens(framework: torch.nn.Module, model: MiniLM) -> None:
    """Padding counts nothing, and vectors have length 1."""
    ids, mask = batch()
    hidden = framework(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(model(ids, mask), mean / mean.norm(dim=1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_the_exported_graph_takes_any_shape_and_int8_stays_close(model: MiniLM, tmp_path: Path) -> None:
    """The graph in fp32 equals the model; with int8 weights, vectors keep their direction."""
    ids, mask = batch()
    expected = model(ids, mask).numpy()
    feed = {"ids": ids.numpy(), "mask": mask.numpy()}
    export(model, tmp_path / "fp32.onnx")
    exact = onnxruntime.InferenceSession(str(tmp_path / "fp32.onnx")).run(None, feed)[0]
    np.testing.assert_allclose(exact, expected, atol=1e-5)
    quantise(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    rounded = onnxruntime.InferenceSession(str(tmp_path / "int8.onnx")).run(None, feed)[0]
    assert (rounded * expected).sum(axis=1).min() > 0.97
