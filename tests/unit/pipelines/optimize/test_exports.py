"""The exported decoder against the reference: equal scores for prompts of any length, close scores in int8."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.decoder.decoder import Decoder
from models.prompt import Prompt
from pipelines.optimize.exports import OnnxVariant, write_onnx
from pipelines.scoring.dense import DecoderScorer, hidden_states
from tests.support.engine.attention_shapes import attention_shape
from tests.support.training.bundles import build_catalogue

CATALOGUE = build_catalogue(26)


@pytest.fixture(params=[(4, 4), (4, 2)], ids=["heads", "grouped-heads"])
def decoder(request) -> Decoder:
    """A decoder with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    return Decoder(attention_shape(*request.param, 8, vocab_size=CATALOGUE.vocab_size, **sizes)).eval()


def scores_of(decoder: Decoder, tokens: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return (hidden_states(decoder, tokens)[-1] @ decoder.head_weight_VD.T).numpy()


def test_the_graph_is_the_decoder(decoder: Decoder, tmp_path: Path) -> None:
    """ONNX Runtime's fp32 scores equal torch's at any length; int8 scores are close and the file is smaller."""
    import onnxruntime

    sessions = {}
    for name, is_int8 in (("whole", False), ("int8", True)):
        write_onnx(decoder, tmp_path / f"{name}.onnx", is_int8=is_int8)
        sessions[name] = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])

    for length in (2, 3, 17, 40):
        tokens = torch.randint(0, CATALOGUE.vocab_size, (1, length))
        logits = {name: session.run(None, {"tokens": tokens.numpy()})[0] for name, session in sessions.items()}
        wanted = scores_of(decoder, tokens)
        np.testing.assert_allclose(logits["whole"], wanted, atol=1e-4 * np.abs(wanted).max())
        assert 0 < np.abs(logits["int8"] - wanted).max() < 0.1 * np.abs(wanted).max()
    assert (tmp_path / "int8.onnx").stat().st_size < (tmp_path / "whole.onnx").stat().st_size


def test_its_lists_are_those_of_the_scores(decoder: Decoder, tmp_path: Path) -> None:
    """The lists are the ten best unseen items of the dense scorer."""
    write_onnx(decoder, tmp_path / "whole.onnx", is_int8=False)
    histories = [np.array([3, 4, 5, 3]), np.array([7])]

    lists, num_tokens = OnnxVariant(tmp_path / "whole.onnx", CATALOGUE, Prompt(20, 5), repeats=False).rank(histories)

    for history, scores, listed in zip(
        histories, DecoderScorer(decoder, CATALOGUE, Prompt(20, 5))(histories), lists, strict=True
    ):
        scores[history] = -np.inf
        assert listed.tolist() == np.argsort(-scores, kind="stable")[:10].tolist()
    assert num_tokens == 5 + 2
