"""Small vocabularies in the form of model folders and of GGUF metadata."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specengine.tokenizer.detokenizer import byte_alphabet

LETTERS = {byte: char for char, byte in byte_alphabet().items()}
BYTES = [LETTERS[byte] for byte in range(256)]


def gguf_metadata(**changes) -> dict:
    """Byte-level: 256 bytes, "th" 256, "the" 257, control <s> 258 and </s> 259, user-defined <tool> 260."""
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*BYTES, "th", "the", "<s>", "</s>", "<tool>"],
        "token_type": [1] * 258 + [3, 3, 4],
        "merges": ["t h", "th e"],
        "bos_token_id": 258,
        "eos_token_id": 259,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata() -> dict:
    """<unk> 0, <s> 1, </s> 2, the bytes at 3 to 258, then a few pieces."""
    pieces = ["▁", "a", "b", "▁a", "▁b", "é", "▁▁"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -13.0, -3.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_file() -> Path:
    package = pytest.importorskip("mistral_common")
    path = Path(package.__file__).parent / "data" / "tokenizer.model.v1"
    if not path.is_file():
        pytest.skip("mistral_common ships no tokenizer.model.v1")
    return path


def json_backend(prefix_bos: bool = True) -> tokenizers.Tokenizer:
    """Returns the same vocabulary as a tokenizer.json.  prefix_bos: BOS precedes every text."""
    vocab = {token: index for index, token in enumerate([*BYTES, "th", "the", "<s>", "</s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if prefix_bos:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
        backend.post_processor = template
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer | None = None, **files) -> Path:
    """Writes a model folder. A keyword is a file name with `__` for the dot; a dict becomes JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or json_backend()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def random_texts(count: int) -> list[str]:
    rng = random.Random(7)
    words = [
        "the",
        " ",
        "  ",
        "Hello",
        "ing",
        "\n",
        "    ",
        "é",
        "你",
        "🦙",
        "def",
        "(",
        "12",
        "aaa",
        "===",
        "\t",
    ]
    return ["".join(rng.choice(words) for _ in range(rng.randrange(30))) for _ in range(count)]
