"""Tokens that a folder adds have the ids and texts that `transformers` gives them, in whichever file they are named."""

import pytest
from tokenizers import AddedToken

from specengine.tokenizer import Tokenizer
from tests.tokenizer.folder_layouts import (
    BACKENDS,
    SIZES,
    difference,
    reference,
    tokenizer_json,
    vocabulary,
    with_tokens,
    write,
)

CONFIG, MAP, IDS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FINE_TUNED = ("ABC", "<tool>", "he llo", "\u2581\u2581")


def mark(content: str, **flags) -> dict:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, **plain, "special": True, **flags}


def typed(content: str, **flags) -> dict:
    return mark(content, **flags) | {"__type": "AddedToken"}


def layouts(name: str) -> dict[str, dict]:
    """Returns files by the layout's name.  name: of the backend; n is its first unused id."""
    n, entries = SIZES[name], vocabulary(name)
    pair = {str(n): mark("<|im_start|>"), str(n + 1): mark("<|im_end|>", special=False, normalized=True)}
    shown = AddedToken("<|im_end|>", special=False, normalized=False)
    hidden = AddedToken("<|im_end|>", special=True, normalized=False)
    return {
        "nothing": {},
        "ids in the config": {CONFIG: {"added_tokens_decoder": pair, "eos_token": "<|im_end|>"}},
        "ids in another order": {CONFIG: {"added_tokens_decoder": dict(reversed(pair.items()))}},
        "ids of entries": {CONFIG: {"added_tokens_decoder": {str(entries["a"]): mark("a", special=False)}}},
        "ids and others": {
            CONFIG: {"added_tokens_decoder": pair, "pad_token": "<pad>", "extra_special_tokens": ["<x>", "ABC"]},
            MAP: {"eos_token": "<ignored>"},
            IDS: {"<ignored too>": n + 7},
        },
        "spaces beside tokens": {
            CONFIG: {
                "added_tokens_decoder": {
                    str(n): mark("<l>", lstrip=True),
                    str(n + 1): mark("<r>", rstrip=True, special=False),
                    str(n + 2): mark("ABC", single_word=True, special=False),
                }
            }
        },
        "older ids": {IDS: {"ABC": n + 1, "he llo": n}},
        "older ids of special tokens": {
            CONFIG: {"eos_token": "<|im_end|>", "extra_special_tokens": ["<x>"]},
            MAP: {"pad_token": mark("<pad>")},
            IDS: {"<|im_end|>": n, "<pad>": n + 1, "<x>": n + 2, "<w>": n + 3},
        },
        "older ids of known tokens": {"tokenizer.json": with_tokens(name, shown), IDS: {"<|im_end|>": n, "ABC": n + 1}},
        "additional special tokens": {CONFIG: {"additional_special_tokens": ["<x>", "<y>"]}},
        "extra before additional ones": {
            CONFIG: {"additional_special_tokens": ["<x>"], "extra_special_tokens": ["<y>"]}
        },
        "extra tokens with names": {CONFIG: {"extra_special_tokens": {"boi_token": "<boi>", "eoi_token": "<eoi>"}}},
        "extra tokens in the map": {
            CONFIG: {"extra_special_tokens": ["<x>"]},
            MAP: {"extra_special_tokens": ["<x>", {"content": "<y>", "lstrip": True}]},
        },
        "additional tokens in the map": {MAP: {"additional_special_tokens": ["<x>", "<y>"]}},
        "names in the config": {CONFIG: {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}},
        "names of further tokens": {CONFIG: {"image_token": "<image>", "unk_token": "<u>", "cls_token": "<c>"}},
        "names with flags": {CONFIG: {"eos_token": typed("<eos>", lstrip=True), "eot_token": typed("<eot>")}},
        "names in the map": {MAP: {"eos_token": mark("<eos>", rstrip=True), "bos_token": "<s>"}},
        "names in both": {CONFIG: {"eos_token": "<one>", "bos_token": "<s>"}, MAP: {"eos_token": "<two>"}},
        "no name in the map": {CONFIG: {"eos_token": "</s>"}, MAP: {"eos_token": None}},
        "tokens of a fine-tune": {"tokenizer.json": with_tokens(name, *FINE_TUNED)},
        "special by the config": {
            "tokenizer.json": with_tokens(name, shown),
            CONFIG: {"added_tokens_decoder": {str(n): mark("<|im_end|>")}},
        },
        "special by tokenizer.json": {
            "tokenizer.json": with_tokens(name, hidden),
            CONFIG: {"added_tokens_decoder": {str(n): mark("<|im_end|>", special=False)}},
        },
        "special by name": {"tokenizer.json": with_tokens(name, shown), CONFIG: {"eos_token": "<|im_end|>"}},
        "not special by name beside ids": {
            "tokenizer.json": with_tokens(name, shown),
            CONFIG: {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
        },
        "special tokens split": {CONFIG: {"split_special_tokens": True, "eos_token": "</s>"}},
    }


def differences(folder, files: dict) -> str | None:
    write(folder, files)
    theirs = reference(folder)
    # The library (0.23) shows a special token that is matched in normalised text, though it is to skip it.
    special = {index for index, token in theirs.added_tokens_decoder.items() if token.special}

    def decode(ids: list[int], skip: bool) -> str:
        return theirs.decode([index for index in ids if not (skip and index in special)], skip_special_tokens=skip)

    return difference(Tokenizer.from_folder(folder), theirs, decode)


@pytest.mark.parametrize("backend", BACKENDS)
def test_added_tokens_have_the_ids_and_texts_of_transformers(backend, tmp_path):
    pytest.importorskip("transformers")
    found = {
        layout: differences(tmp_path / layout, {"tokenizer.json": backend} | files)
        for layout, files in layouts(backend).items()
    }
    assert len(found) == 26 and not {layout: problem for layout, problem in found.items() if problem}


@pytest.mark.parametrize(
    ("backend", "name", "wanted"),
    [
        ("byte level", "GPT2Tokenizer", True),
        ("byte level", "GPT2Tokenizer", False),
        ("byte level", "PreTrainedTokenizerFast", True),
        ("llama", "LlamaTokenizer", False),
        ("metaspace", "LlamaTokenizer", False),
        ("metaspace", "PreTrainedTokenizerFast", False),
    ],
)
def test_the_space_before_a_text_is_that_of_the_tokenizer_class(backend, name, wanted, tmp_path):
    pytest.importorskip("transformers")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if name == "GPT2Tokenizer":
        names = dict.fromkeys(names, "<|endoftext|>")
    saved = with_tokens(backend, *(AddedToken(text, special=True) for text in names.values()), "ABC")
    saved = saved.replace('"add_prefix_space":false', f'"add_prefix_space":{str(not wanted).lower()}')
    config = {"tokenizer_class": name, "add_prefix_space": wanted, **names}
    assert differences(tmp_path, {"tokenizer.json": saved, CONFIG: config}) is None


def test_a_token_of_a_fine_tune_keeps_the_space_before_it(tmp_path):
    """Also with versions of the library that lose it (0.22)."""
    tokenizer = Tokenizer.from_folder(write(tmp_path, {"tokenizer.json": with_tokens("llama", *FINE_TUNED)}))
    for text in ("a ABC b", "hello <tool> a", "a he llo b", "a    b", "ABC <tool> he llo", "bABC"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        detokenizer = tokenizer.detokenizer()
        assert "".join(detokenizer.feed([index]) for index in ids) == text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({CONFIG: {"added_tokens_decoder": {"300": mark("<x>")}}}, r"config\.json: added token '<x>' has id 300 but"),
        ({CONFIG: {"added_tokens_decoder": {"260": mark("<s>")}}}, "'<s>' has id 260 but would become 258"),
        ({CONFIG: {"added_tokens_decoder": {"x": mark("<x>")}}}, "the key is no token id"),
        ({CONFIG: {"added_tokens_decoder": {"260": "<x>"}}}, r"added_tokens_decoder\['260'\]: expected an object"),
        ({CONFIG: {"added_tokens_decoder": {"260": mark("<x>", lstrip=1)}}}, r"added_tokens_decoder\['260'\]: "),
        ({CONFIG: {"added_tokens_decoder": {"260": {}}}}, "expected a text or an object with the text `content`"),
        ({IDS: {"<x>": 261}}, r"added_tokens\.json: added token '<x>' has id 261 but would become 260"),
        ({IDS: {"<x>": 258}}, r"'<x>' has id 258, as '<s>' in tokenizer\.json"),
        ({IDS: {"<x>": "260"}}, r"added_tokens\.json: '<x>' must have a token id, got '260'"),
        ({CONFIG: {"eos_token": 3}}, r"tokenizer_config\.json: eos_token: expected an object, got 3"),
        ({MAP: {"eos_token": 3}}, r"special_tokens_map\.json: eos_token: expected an object, got 3"),
        ({CONFIG: {"extra_special_tokens": "<x>"}}, "extra_special_tokens must be a list of tokens or an object"),
        ({CONFIG: {"additional_special_tokens": [["<x>"]]}}, r"extra_special_tokens\[0\]: expected an object"),
    ],
)
def test_a_token_that_cannot_be_added_is_refused_by_file_and_name(files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(write(tmp_path, {"tokenizer.json": "byte level"} | files))


def test_a_token_does_not_get_the_id_of_another(tmp_path):
    saved = tokenizer_json("byte level").replace('"the":257', '"the":260')
    with pytest.raises(ValueError, match=r"tokenizer\.json: tokens '<x>', 'the' have one id, 260"):
        Tokenizer.from_folder(write(tmp_path, {"tokenizer.json": saved, CONFIG: {"pad_token": "<x>"}}))


def test_the_text_of_a_token_that_is_matched_in_normalised_text_is_the_name_that_templates_get(tmp_path):
    saved = with_tokens("llama", AddedToken("<bos>", special=True, normalized=True))
    config = {"bos_token": "<bos>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    tokenizer = Tokenizer.from_folder(write(tmp_path, {"tokenizer.json": saved, CONFIG: config}))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<bos>hi"
    assert tokenizer.decode([272]) == "" and tokenizer.decode([260, 272], skip_special_tokens=False) == "a <bos>"
