"""The few numbers of training that an ML engineer turns at the command line, put into the recipes of decoder and student."""

from dataclasses import replace

from pipelines.training.distill import DistillOptions
from pipelines.training.fitting import FitOptions
from pipelines.training.train import TrainOptions
from services.errors import ConfigError


def decoder_recipe(epochs: int | None, seed: int) -> TrainOptions:
    """Return the decoder's recipe with this many epochs (None: its own number). Raises ConfigError naming the option."""
    usual = TrainOptions()
    return replace(usual, seed=_seed(seed), fit=_fit(usual.fit, "--epochs", epochs))


def student_recipe(epochs: int | None, seed: int) -> DistillOptions:
    """Return the recipe of student and twin with this many epochs (None: its own number). Raises ConfigError naming the option."""
    usual = DistillOptions()
    return replace(usual, seed=_seed(seed), fit=_fit(usual.fit, "--student-epochs", epochs))


def _fit(usual: FitOptions, option: str, epochs: int | None) -> FitOptions:
    if epochs is None:
        return usual
    if epochs < 1:
        raise ConfigError(f"{option}: {epochs} epochs train nothing; give at least 1 (usual: {usual.epochs})")
    return replace(usual, epochs=epochs)


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed: {seed} is out of range; give 0 to {2**32 - 1}")
    return seed
