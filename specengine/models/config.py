"""Model configuration: the dataclasses and the two ways to read them."""

from specengine.models.config_base import ModelConfig, RopeConfig
from specengine.models.config_gguf import config_from_gguf
from specengine.models.config_hf import config_from_hf, read_model_config

__all__ = ["ModelConfig", "RopeConfig", "config_from_gguf", "config_from_hf", "read_model_config"]
