"""Rules by which byte-level BPE vocabularies split text into words, by GGUF's `tokenizer.ggml.pre`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
# o200k, of OpenAI's tiktoken, which takes a word that is an entry before it merges
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters of DeepSeek-LLM: a fixed list, because newer Unicode versions have more letters.
_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C
38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B
1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4
1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113
2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B
2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06
FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF
1E900-1E943
"""


@dataclass(frozen=True)
class ByteLevelRules:
    """Properties of a byte-level vocabulary beyond its merges.

    words: makes the pre-tokenizer. ignore_merges: a word that is an entry becomes one token.
    nfc: the text is normalised to Unicode form C first. adds_bos: BOS precedes the text by default.
    """

    words: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        """Returns the backend's normalizer, or None."""
        return normalizers.NFC() if self.nfc else None


def rules_for(pre: str) -> ByteLevelRules:
    """Returns the rules of a name. Raises ValueError for an unknown name, because a guess would change the tokens."""
    if not isinstance(pre, str) or pre not in _RULES:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; expected one of {', '.join(sorted(_RULES))}")
    return _RULES[pre]


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str, single_digits: bool = False) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        steps: list[PreTokenizer] = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        steps += [Digits(individual_digits=True)] * single_digits
        return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _deepseek_llm() -> PreTokenizer:
    ranges = (tuple(chr(int(end, 16)) for end in part.split("-")) for part in _CASED.split())
    letters = "".join("-".join(ends) for ends in ranges)
    punctuation = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
    patterns = (r"[\r\n]", rf"\s?[{letters}]+", rf"\s?{punctuation}+", r"\s+$", _CJK)
    return _splits(*patterns, single_digits=True)()


_PLAIN = ByteLevelRules(_gpt2)
_DIGITS = ByteLevelRules(_single_digits)
_LLAMA_BPE = ByteLevelRules(_splits(_LLAMA3), ignore_merges=True, adds_bos=True)
_QWEN = ByteLevelRules(_splits(_QWEN2), nfc=True)

_RULES: dict[str, ByteLevelRules] = {
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "smaug-bpe": _LLAMA_BPE,
    "qwen2": _QWEN,
    "qwen35": ByteLevelRules(_splits(f"{_CONTRACTION}|{_QWEN35_WORDS}|{_TAIL}"), nfc=True),
    "deepseek-r1-qwen": _QWEN,
    "deepseek-coder": ByteLevelRules(_splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, single_digits=True)),
    "deepseek-llm": ByteLevelRules(_deepseek_llm),
    "gpt-4o": ByteLevelRules(_splits(_GPT_4O), ignore_merges=True),
    "tekken": ByteLevelRules(_splits(_TEKKEN), ignore_merges=True, adds_bos=True),
}
