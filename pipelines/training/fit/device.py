"""Device of the offline models: one option for training and evaluation."""

import torch

from pipelines.training.options import DeviceChoice
from services.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device of this name. Raises ConfigError naming the option."""
    if name not in set(DeviceChoice):
        raise ConfigError(f"--device: {name!r} is not known; give one of {', '.join(DeviceChoice)}")
    if name == DeviceChoice.CUDA and not torch.cuda.is_available():
        raise ConfigError("--device: torch finds no CUDA device here; give auto or cpu")
    has_gpu = name != DeviceChoice.CPU and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
