"""Text in, text out: tokenizers, chat templates, incremental detokenisation and stop strings."""

from specengine.text.chat_template import ChatTemplate
from specengine.text.detokenizer import Detokenizer
from specengine.text.stop_strings import StopStrings
from specengine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]
