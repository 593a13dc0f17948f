"""What one training run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specengine.rules.base import check_number
from specengine.train.config import TrainConfig
from specengine.train.data.dialogues import DialogueConfig
from specengine.train.export import STORAGE
from specengine.train.objectives.registry import objective_class
from specengine.utils.spec_string import check_range

STORES = ("disk", "memory", "none")


@dataclass(frozen=True)
class TrainJob:
    """The options of the command line; see its help."""

    drafter: str
    target: str
    out: Path
    config: TrainConfig
    dialogues: DialogueConfig
    prompts: Path | None = None
    data: Path | None = None
    start: Path | None = None
    tokens: int = 1_000_000
    vocabulary: int = 8192
    keep_vocabulary: bool = False
    everything: bool = False
    longest: int = 2048
    store: str = "disk"
    storage: str = "bfloat16"
    bases: tuple[str, ...] = ()
    rise: float = 0.003
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("store", STORES), ("storage", STORAGE)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected {', '.join(known)}, got {getattr(self, name)!r}")
        check_range("tokens", self.tokens, 1, 1 << 40)
        check_range("vocabulary", self.vocabulary, 0, 1 << 24)
        if self.keep_vocabulary and self.start is None:
            raise ValueError("keep-vocabulary: expected a drafter to start from (--start)")
        check_number("rise", self.rise, 1e-6, 1)
        if self.bases and self.storage != "packed":
            raise ValueError(f"base: differences are stored with --storage packed, got {self.storage}")
        objective_class(self.drafter)
