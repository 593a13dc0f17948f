"""Text in, text out: tokenizers, chat templates, incremental detokenisation and stop strings."""

from .chat_template import CHAT_FORMATS, ChatTemplate
from .detokenizer import Detokenizer
from .stop_strings import StopStrings
from .tokenizer import Tokenizer

__all__ = ["CHAT_FORMATS", "ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]
