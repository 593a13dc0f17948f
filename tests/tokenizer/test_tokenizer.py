"""The tokenizer encodes texts and chats and decodes token ids."""

import threading

import pytest

from specengine.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import gguf_metadata, random_texts

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", [None, 3, b"hi", ["hi"], "a\ud800", "\udcff"])
def test_text_that_is_not_a_unicode_string_is_refused(text):
    with pytest.raises(ValueError, match="text"):
        Tokenizer.from_gguf(gguf_metadata()).encode(text)


def test_ids_without_an_entry_have_no_text_and_negative_ones_are_refused():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.decode([257, 5000]) == "the"
    with pytest.raises(ValueError, match="ids must be token ids, got -1"):
        tokenizer.decode([-1])


def test_ids_may_be_elements_of_an_array():
    torch = pytest.importorskip("torch")
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.decode(torch.tensor([258, 257])) == "the"


def test_one_token_is_shown_with_its_space_and_special_tokens_spelled_out():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert [tokenizer.token_text(token) for token in (32, 257, 258, 0xC3)] == [" ", "the", "<s>", "\ufffd"]


def test_a_chat_is_encoded_with_its_special_tokens_and_one_bos():
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = gguf_metadata(add_bos_token=True) | {"tokenizer.chat_template": template}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(USER) == "<s>hi</s>"
    assert tokenizer.encode_chat(USER) == [258, ord("h"), ord("i"), 259]


@pytest.mark.parametrize(("name", "first"), [("Vicuna 7B v1.5", "A"), ("Llama-2-7b-chat", "[")])
def test_built_in_formats_get_bos_from_the_tokenizer_once(name, first):
    tokenizer = Tokenizer.from_gguf(gguf_metadata(add_bos_token=True) | {"general.name": name})
    assert tokenizer.encode_chat(USER)[:2] == [258, ord(first)]


def test_the_model_name_chooses_a_format_only_without_a_template():
    metadata = gguf_metadata() | {"general.name": "Vicuna 7B v1.5"}
    rendered = Tokenizer.from_gguf(metadata).render_chat(USER)
    assert rendered.startswith("A chat between") and rendered.endswith("USER: hi ASSISTANT:")
    metadata["tokenizer.chat_template"] = "own"
    assert Tokenizer.from_gguf(metadata).render_chat(USER) == "own"


def test_a_tokenizer_without_a_template_says_so():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template; give a plain prompt"):
        tokenizer.render_chat(USER)


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(smollm2_path).fields
    return Tokenizer.from_gguf({key: field.contents() for key, field in fields.items()})


@pytest.mark.full
@pytest.mark.model
def test_smollm2_encodes_a_chat_as_its_reference_does(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France? Explain in two sentences."}]
    # fmt: off
    expected = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 16374, 281, 827, 8545, 30, 2, 198,
        1, 520, 9531, 198,
    ]
    # fmt: on
    assert smollm2.encode_chat(messages) == expected
    assert smollm2.decode(expected, skip_special_tokens=False) == smollm2.render_chat(messages)
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49152)


@pytest.mark.full
@pytest.mark.model
def test_smollm2_encodes_as_transformers_does(smollm2, smollm2_path):
    transformers = pytest.importorskip("transformers")
    folder, name = str(smollm2_path.parent), smollm2_path.name
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    texts = [
        "def f(x):\n    return x**2  # square\n\n\n",
        "In 2024, π ≈ 3.14159; 1,000,000 · 0x1F",
        "café naïve Ünïcode 你好世界 🦙🏽👨‍👩‍👧 e\u0301\u200b",
        "   lead\t\ttab \r\n\r\n x   ",
        "I'm you're IT'S <|im_start|>user\nhi<|im_end|> a<|endoftext|>b",
        "",
    ]
    # transformers does not split digits for this vocabulary, which changes the ids after a run of spaces.
    for text in [*texts, *(text.replace("12", "") for text in random_texts(100))]:
        ids = smollm2.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer, ticks, done = Tokenizer.from_gguf(gguf_metadata()), [], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    before, ids = len(ticks), tokenizer.encode("the <tool> " * 50_000)
    passed = len(ticks) - before
    done.set()
    thread.join()
    assert ids == tokenizer.encode("the <tool> ") * 50_000
    assert passed > 3  # 1 where the library keeps the interpreter's lock
