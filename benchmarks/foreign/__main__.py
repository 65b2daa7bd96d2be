"""An imported recommender's lists and its framework's own: transformers' beam search in fp32 over a prefix trie.

    python -m benchmarks.foreign --json OUT --sequences FOLDER [--base FOLDER|PACKAGE] [--state FOLDER] [--tests 500]
        [--framework CHECKOUT]     MiniOneRec's own evaluation too (benchmarks/foreign/evaluation.py)

Trains a recommender in MiniOneRec's layout (benchmarks/foreign/recommender.py), imports it by its test rows as
`tailrace import model` does, and ranks these rows by both. A folder that was trained before is used again.
docs/benchmarks.md explains the file.
"""

import ast
import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.foreign.evaluation import evaluate, evaluation_report
from benchmarks.foreign.oracle import framework_metrics, generate
from benchmarks.foreign.recommender import write_recommender
from benchmarks.load.command import ReportOptions, about_run, exit_on_errors, report_parser, write_report
from models.decoder.weights import load_decoder
from models.search import Search
from pipelines.declaration import Option
from pipelines.foreign.examples import MINIONEREC_PIECES
from pipelines.foreign.measure import CUTOFFS, code_lists
from pipelines.foreign.model import ImportedModel, catalogue_of, import_model
from pipelines.foreign.options import ImportOptions

Lists = list[list[tuple[tuple[int, ...], float]]]
"""For each row, codes with closing tokens and their scores, best first."""
_TOP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignBenchmark(ReportOptions):
    """The options of the command."""

    sequences: Annotated[Path, Option("Sequences of items by user, in time order (benchmarks/quality/sequences.py).")]
    state: Annotated[Path, Option("Folder of the trained recommender and its import.")]
    base: Annotated[str, Option("Checkpoint to extend by SID tokens; default: four layers from random weights.")] = ""
    tests: Annotated[int, Option("Test rows to rank.", at_least=1)] = 500
    train_rows: Annotated[int | None, Option("Training rows; default: one for each user.", at_least=1)] = None
    epochs: Annotated[int, Option("Epochs of the training.", at_least=1)] = 5
    beams: Annotated[int, Option("Beams of both.", at_least=10)] = 50
    framework: Annotated[Path | None, Option("Checkout of MiniOneRec, whose own evaluation runs too.")] = None


def main() -> None:
    """Train, import, compare, and write the results."""
    given = report_parser(__doc__, ForeignBenchmark).parse_args()
    options = ForeignBenchmark(**vars(given))
    with exit_on_errors():
        write_report(options.json, about_run("foreign") | compare(options))


def compare(options: ForeignBenchmark) -> dict[str, Any]:
    """Return the content of the results file without its header."""
    folder = options.state
    if not (folder / "trained.json").exists():
        base = _base(options.base) if options.base else None
        trained = write_recommender(
            options.sequences, folder, base, num_tests=options.tests, num_rows=options.train_rows, epochs=options.epochs
        )
        (folder / "trained.json").write_text(json.dumps(trained))
    arguments = ImportOptions(
        checkpoint=folder / "model",
        index=folder / "index.json",
        examples=folder / "test.csv",
        name="framework",
        beam_width=options.beams,
        max_measured=_TOP,
    )
    imported = import_model(arguments, folder)
    compared = ListComparison(imported, folder)
    vocabulary = compared.lists(imported.search)
    theirs = compared.framework_lists(imported.search)
    variants = {
        "vocabulary": vocabulary,
        "vocabulary-without-close": compared.lists(replace(imported.search, close=())),
        "catalogue": compared.lists(replace(imported.search, scores="catalogue", close=())),
    }
    evaluated: dict[str, Any] = {}
    if options.framework is not None:
        answers = evaluate(options.framework, folder, options.beams)
        evaluated = {"evaluate": evaluation_report(answers, compared.texts(vocabulary), compared.labels)}
    return evaluated | {
        "base": options.base or "qwen2 of 4 layers",
        "trained": json.loads((folder / "trained.json").read_text()),
        "num_parameters": imported.about["num_parameters"],
        "num_items": len(compared.catalogue.item_ids),
        "num_rows": len(compared.histories),
        "beams": options.beams,
        "equal_prompts": compared.equal_prompts(),
        **agreement(vocabulary, theirs),
        "framework": compared.metrics(theirs, len(imported.search.close)),
        **{
            name: compared.metrics(lists, len(lists[0][0][0]) - compared.catalogue.depth)
            for name, lists in variants.items()
        },
    }


def _base(name: str) -> Path:
    """Return the base checkpoint as a folder in Hugging Face layout, converted if needed."""
    if Path(name).is_dir():
        return Path(name)
    from services.llm.text.checkpoint import checkpoint_folder
    from services.settings.settings import load_settings

    return checkpoint_folder(name, load_settings().cache_dir, say=print)


def agreement(ours: Lists, theirs: Lists) -> dict[str, Any]:
    """Return the share of equal top positions, and the largest gap in score of all and of different positions."""
    pairs = [
        (own == code, abs(float(own_score) - score))
        for own_list, expected in zip(ours, theirs, strict=True)
        for (own, own_score), (code, score) in zip(own_list[:_TOP], expected[:_TOP], strict=True)
    ]
    apart = [gap for is_equal, gap in pairs if not is_equal]
    return {
        "num_positions": len(pairs),
        "equal_positions": 1 - len(apart) / len(pairs),
        "largest_gap_where_different": max(apart, default=0.0),
        "largest_score_difference": max(gap for _, gap in pairs),
    }


class ListComparison:
    """The test rows of an imported recommender, ranked by us and by its framework."""

    def __init__(self, imported: ImportedModel, folder: Path) -> None:
        self._imported, self._folder = imported, folder
        self._sids: list[str] = ["".join(sid) for sid in json.loads((folder / "index.json").read_text()).values()]
        self.histories, labels = _cases(folder / "test.csv", {sid: row for row, sid in enumerate(self._sids)})
        self.catalogue = catalogue_of(imported.codes(), np.concatenate(self.histories))
        self._labels = [self.catalogue.tokens([label]) for label in labels]
        self.labels = [self._sids[label] for label in labels]
        self._text_of = {tuple(self.catalogue.tokens([item])): sid for item, sid in enumerate(self._sids)}
        self._prompt = replace(imported.prompt, stride=1)

    def equal_prompts(self) -> float:
        """Return the share of rows whose compiled prompt is what the framework encodes."""
        tokenizer: Any = AutoTokenizer.from_pretrained(self._folder / "model")
        texts = [", ".join(self._sids[item] for item in history) for history in self.histories]
        expected = [
            [token for piece in MINIONEREC_PIECES for token in tokenizer(piece.replace("{history}", text)).input_ids]
            for text in texts
        ]
        equal = [
            self._prompt.tokens(self.catalogue, history.tolist()) == tokens
            for history, tokens in zip(self.histories, expected, strict=True)
        ]
        return float(np.mean(equal))

    def lists(self, search: Search) -> Lists:
        """Return our lists, in fp32."""
        decoder = load_decoder(self._imported.decoder_dir, torch.float32, "cpu")
        ranked = code_lists(decoder, self.catalogue, self._prompt, search, self.histories)
        return [
            [
                ((*self.catalogue.tokens([item]), *search.close), score)
                for item, score in zip(*items_and_scores, strict=True)
            ]
            for items_and_scores in ranked
        ]

    def framework_lists(self, search: Search) -> Lists:
        """Return the framework's lists, in fp32."""
        model: Any = AutoModelForCausalLM.from_pretrained(self._folder / "model", dtype=torch.float32)
        model.eval()
        items = range(len(self.catalogue.item_ids))
        sequences = sorted({(*self.catalogue.tokens([item]), *search.close) for item in items})
        return [
            generate(model, self._prompt.tokens(self.catalogue, history.tolist()), sequences, search.beam_width or _TOP)
            for history in track(self.histories, "transformers")
        ]

    def texts(self, lists: Lists) -> list[list[str]]:
        """Return lists as the texts of their codes."""
        return [[self._text_of[code[: self.catalogue.depth]] for code, _ in ranking] for ranking in lists]

    def metrics(self, lists: Lists, num_close: int) -> dict[str, float]:
        """Return HR and NDCG by the framework's formula."""
        codes = [[code[: len(code) - num_close] for code, _ in ranking] for ranking in lists]
        metrics: dict[str, float] = {}
        for cutoff in CUTOFFS:
            hit_rate, ndcg = framework_metrics(codes, [tuple(label) for label in self._labels], cutoff)
            metrics |= {f"hr@{cutoff}": hit_rate, f"ndcg@{cutoff}": ndcg}
        return metrics


def _cases(path: Path, rows: dict[str, int]) -> tuple[list[np.ndarray], list[int]]:
    """Return the histories and labels of the test rows, as rows of the index."""
    with path.open() as opened:
        read = list(csv.DictReader(opened))
    histories = [np.array([rows[sid] for sid in ast.literal_eval(row["history_item_sid"])]) for row in read]
    return histories, [rows[row["item_sid"]] for row in read]


if __name__ == "__main__":
    main()
