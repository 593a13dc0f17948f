"""Pre-tokenizers split text into words before the merges."""

import pytest

from specengine.tokenizer.pre_tokenizers import rules_for


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It|'s|Ġ2024|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
        ("smollm", "It|'s|Ġ|2|0|2|4|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
        ("llama-bpe", "It|'s|Ġ|202|4|,|ĠI|'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("qwen2", "It|'s|Ġ|2|0|2|4|,|ĠI|'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("qwen35", "It|'s|Ġ|2|0|2|4|,|ĠI|'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("gpt-4o", "It's|Ġ|202|4|,|ĠI'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("tekken", "It|'s|Ġ|2|0|2|4|,|ĠI|'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("deepseek-coder", "It|'|s|Ġ|2|0|2|4|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
        ("deepseek-llm", "It|'|s|Ġ|2|0|2|4|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
    ],
)
def test_each_vocabulary_cuts_words_its_own_way(pre, words):
    pieces = rules_for(pre).words().pre_tokenize_str("It's 2024, I'LL   go\n\nx")
    assert "|".join(piece for piece, _ in pieces) == words


@pytest.mark.parametrize(("pre", "count"), [("qwen2", 4), ("qwen35", 1)])
def test_qwen35_keeps_combining_marks_in_a_word(pre, count):
    assert len(rules_for(pre).words().pre_tokenize_str("हिन्दी")) == count
