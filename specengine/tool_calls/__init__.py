"""Tool calls and reasoning in a model's text: parsers, grammars, and the prompt for templates without tools."""
