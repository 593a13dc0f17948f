"""Tokenizers, chat templates, incremental detokenisation and stop strings."""

from specengine.tokenizer.chat_template import ChatTemplate
from specengine.tokenizer.detokenizer import Detokenizer
from specengine.tokenizer.stop_strings import StopSearch, StopStrings
from specengine.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopSearch", "StopStrings", "Tokenizer"]
