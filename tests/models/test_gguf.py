"""Reading GGUF files: header, block types, row order, and every kind of damage."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gguf_writing import write_gguf  # noqa: E402

from specengine.models.checkpoint import GGUFCheckpoint, RandomCheckpoint, open_checkpoint
from specengine.models.gguf_file import GGUFFile
from specengine.models.presets import PRESETS
