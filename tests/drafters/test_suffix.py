import lzma
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.draft_policy.cost_model import CycleCosts
from specengine.drafters.suffix.config import Config
from specengine.drafters.suffix.corpus_file import open_corpus, read_corpus, write_corpus
from specengine.drafters.suffix.drafter import CORPUS, OWN, Suffix
from specengine.ops import native
from specengine.types import SourceStats
from tests.drafters.leaf_paths import paths
from tests.drafters.steady import steady
from tests.engines import GREEDY, SAMPLED, ids, tiny_engine

FREE = CycleCosts({1: 1.0, 64: 1.0})
DEAR = CycleCosts({1: 1.0, 64: 64.0})
LOOP = [*range(1, 20)]
TARGET = SimpleNamespace(ops=native, config=SimpleNamespace(vocab_size=100))


def sequence_of(tokens, limit=100, prompt_length=1):
    told = {"draft_limit": limit, "prompt_length": prompt_length, "accepted_last": 0}
    told |= {"adapter": None, "drafter_states": {}, "sources": {}, "trace": []}
    return SimpleNamespace(tokens=list(tokens), **told)


def drafter_of(costs=FREE, path=None, **options):
    return steady(Suffix(Config(**{"corpus": path is not None} | options), path, TARGET, costs))


def draft(tokens, *, limit=100, path=None, **options):
    (tree,) = drafter_of(adaptive=False, path=path, **options).draft([sequence_of(tokens, limit)]).trees
    return tree


PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 9], [7], [50, 51], list(range(40, 60)) * 2, [5, 9, 13]]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", ["", ",adaptive=false", ",adaptive=false,remember=50,branches=1"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_output_is_that_of_plain_decoding(tmp_path, params, options, batch):
    plain = ids(tiny_engine("none").generate(PROMPTS, params))
    write_corpus(tmp_path / "corpus", plain[:2])
    engine = tiny_engine(f"suffix:{tmp_path / 'corpus'}{options}", max_batch_size=batch)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, params)
        assert ids(outputs) == plain
    if options:
        assert sum(output.stats.cycles for output in outputs) < 0.9 * sum(map(len, plain))


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "corpus", [[50, 51, 52, 53, 54]] * 3 + [[50, 51, 60]])
    return str(tmp_path / "corpus")


def test_what_followed_most_often_comes_first():
    tree = draft([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2], length=2, branches=2)
    assert paths(tree)[0] == [3, 7] and [3, 9] in paths(tree) and [4, 8] in paths(tree)
    assert tree.tokens[0] == 2 and tree.parents[0] == -1


def test_a_tree_keeps_to_its_sizes():
    tokens = LOOP * 3
    assert len(draft(tokens, nodes=7).tokens) == 7
    assert max(map(len, paths(draft(tokens, length=3, nodes=64)))) == 3
    assert max(map(len, paths(draft(tokens, limit=2, nodes=64)))) == 2
    assert len(draft(tokens, limit=0).tokens) == 1
    assert len(draft([1, 2, 3]).tokens) == 1


def test_a_corpus_tells_what_this_text_does_not(corpus):
    assert len(draft([5, 50, 51]).tokens) == 1
    assert paths(draft([5, 50, 51], path=corpus)) == [[52, 53, 54], [60]]
    both = draft([50, 51, 52, 7, 50, 51], path=corpus, nodes=32)
    assert [52, 7, 50, 51, 52, 7] in [path[:6] for path in paths(both)] and [52, 53, 54] in paths(both)


def test_answers_to_earlier_requests_are_remembered_where_asked_for():
    for remember, expected in ((0, []), (1000, [[12, 13]])):
        drafter = drafter_of(adaptive=False, remember=remember)
        drafter.release(sequence_of([9, 10, 11, 12, 13], prompt_length=2))
        assert paths(drafter.draft([sequence_of([1, 10, 11])]).trees[0]) == (expected or [[]])
        drafter.release(sequence_of([1, 2, 3], prompt_length=3))  # nothing was answered
        assert len(drafter.draft([sequence_of([7, 2])]).trees[0].tokens) == 1


def test_memory_of_earlier_requests_is_bounded():
    drafter = drafter_of(adaptive=False, remember=100)
    for first in range(0, 90, 3):
        drafter.release(sequence_of([1, *([first, first + 1, first + 2] * 10)]))
        drafter.draft([sequence_of([1])])
        assert sum(map(len, drafter.earlier(None).automata())) <= 200
    assert len(drafter.draft([sequence_of([87, 88])]).trees[0].tokens) > 1
    assert len(drafter.draft([sequence_of([0, 1, 2, 0, 1, 99, 6])]).trees[0].tokens) == 1  # long ago


def test_it_learns_what_pays_and_drafts_no_more_where_nothing_does():
    drafter = drafter_of(CycleCosts({1: 1.0, 2: 1.15, 4: 1.4, 8: 2.2, 16: 4.0, 32: 7.5}))
    right, wrong = sequence_of(LOOP * 2), sequence_of(LOOP * 2)
    sizes = {}
    for step in range(60):
        for name, request in (("right", right), ("wrong", wrong)):
            draft = drafter.draft([request])
            (tree,) = draft.trees
            sizes.setdefault(name, []).append(len(tree.tokens))
            following = (LOOP * 3)[request.tokens[-1] :] if name == "right" else [20 + step % 70, LOOP[step % 19]]
            committed = following[: tree.accepted(following) + 1] if name == "right" else following
            request.tokens += committed
            drafter.observe(draft, [committed], None)
    assert sizes["right"][-1] > 8 and max(sizes["wrong"][-10:]) < sizes["right"][-1]
    assert max(len(tree.tokens) for tree in drafter_of(DEAR).draft([sequence_of(LOOP * 2)]).trees) == 1


def test_the_sources_learn_apart(corpus):
    drafter = drafter_of(path=corpus)
    request = sequence_of([50, 51, 7, 50, 51])
    for _ in range(30):
        draft = drafter.draft([request])
        request.tokens += [7, 50, 51]
        drafter.observe(draft, [[7, 50, 51]], None)
    own, other = (drafter.rates[source].rates() for source in (OWN, CORPUS))
    kind = 6 + 2  # two tokens matched, the corpus said 52 three times of four
    assert other[kind] < 0.2  # 0.4 at first
    assert max(own[6:30]) > 0.95


@pytest.mark.parametrize("adaptive", [True, False])
def test_what_each_source_drafted_and_what_was_accepted_of_it_is_counted(corpus, adaptive):
    drafter = drafter_of(path=corpus, adaptive=adaptive, length=3)
    request = sequence_of([50, 51, 7, 50, 51])
    draft = drafter.draft([request])
    assert paths(draft.trees[0]) == [[7, 50, 51], [52, 53, 54], [60]]
    request.tokens, request.accepted_last = [*request.tokens, 7, 50, 3], 2
    drafter.observe(draft, [[7, 50, 3]], None)
    assert request.sources == {"text": SourceStats(3, 2), "corpus": SourceStats(4, 0)}


def test_a_rest_is_not_learned_from(corpus):
    drafter = drafter_of(path=corpus)
    request = sequence_of([3, 50, 51])
    before = drafter.rates[CORPUS].rates()
    draft = drafter.draft([request])
    drafter.skip([request])
    request.tokens += [9]
    drafter.observe(draft, [[9]], None)
    assert drafter.rates[CORPUS].rates() == before


def test_what_is_no_option_is_refused(tmp_path, corpus):
    for wrong in ({"nodes": 1}, {"length": 0}, {"length": 33}, {"branches": 0}, {"remember": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: "):
            Config(**wrong)
    with pytest.raises(ValueError, match="corpus: false, but "):
        drafter_of(path=corpus, corpus=False)
    with pytest.raises(FileNotFoundError, match="expected a corpus"):
        drafter_of(path=str(tmp_path / "nothing"))
    small = SimpleNamespace(ops=native, config=SimpleNamespace(vocab_size=60))
    with pytest.raises(ValueError, match="have token 60, the target's vocabulary ends at 59"):
        Suffix(Config(), corpus, small, FREE)
    (tmp_path / "corpus").write_bytes((tmp_path / "corpus").read_bytes()[:-40])
    with pytest.raises(ValueError, match="the corpus cannot be read"):
        drafter_of(path=corpus)
    (tmp_path / "other").write_bytes(b"text")
    with pytest.raises(ValueError, match="the corpus cannot be read"):
        drafter_of(path=str(tmp_path / "other"))
    save_file({"tokens": torch.ones(2), "order": torch.ones(2)}, tmp_path / "floats", {"format": "specengine-corpus-1"})
    with pytest.raises(ValueError, match=r"floats: the corpus cannot be read.*float32"):
        drafter_of(path=str(tmp_path / "floats"))
    with pytest.raises(ValueError, match="there is nothing in them"):
        write_corpus(tmp_path / "empty", [[], []])
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(("highest", "dtype"), [(0xFFFE, torch.uint16), (0xFFFF, torch.int32)])
def test_a_corpus_has_two_bytes_per_token_where_they_are_enough(tmp_path, highest, dtype):
    write_corpus(tmp_path / "corpus", [[50, highest, 52], [50, 51]])
    assert load_file(tmp_path / "corpus")["tokens"].dtype is dtype
    corpus = open_corpus(tmp_path / "corpus", highest + 1)
    assert corpus.continuations([50], 4, 2, 1, [1.0] * 30, 0.0)[0] == [50, 51]
    assert corpus.continuations([3, 50, highest], 4, 2, 1, [1.0] * 30, 0.0)[0] == [highest, 52]
    with pytest.raises(ValueError, match=f"have token {highest}"):
        open_corpus(tmp_path / "corpus", highest)


@pytest.mark.parametrize("highest", [0xFFFE, 0xFFFF])
def test_a_packed_corpus_is_small_and_the_same(tmp_path, monkeypatch, highest):
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    texts = [[50, 51, 52, 53, highest] * 500, [50, 51, 60]]
    write_corpus(tmp_path / "whole", texts)
    write_corpus(tmp_path / "packed", texts, packed=True)
    assert 8 * (tmp_path / "packed").stat().st_size < (tmp_path / "whole").stat().st_size
    expected = read_corpus(tmp_path / "whole")
    for _ in range(2):  # made, and kept
        found = read_corpus(tmp_path / "packed")
        assert all(torch.equal(found[name].int(), expected[name].int()) for name in ("tokens", "order"))
        assert len(open_corpus(tmp_path / "packed", highest + 1)) == len(expected["tokens"])
        (kept,) = (tmp_path / "cache/weights").iterdir()
    kept.unlink()
    about = {"format": "specengine-corpus-1", "tokens": "uint16"}
    for small, problem in ((b"damaged", "damaged"), (lzma.compress(bytes(1 << 22)), "too many for the file")):
        save_file({"packed": torch.frombuffer(bytearray(small), dtype=torch.uint8)}, tmp_path / "packed", about)
        with pytest.raises(ValueError, match=f"the corpus cannot be read .its tokens are .*{problem}"):
            open_corpus(tmp_path / "packed", highest + 1)


def test_a_corpus_is_found_in_a_folder_and_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_corpus(tmp_path / "folder/corpus.safetensors", [[50, 51, 52]])
    for path in ("~/folder", "~/folder/corpus.safetensors", str(tmp_path / "folder")):
        assert paths(draft([50, 51], path=path)) == [[52]]


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path, corpus):
    ours, other = (SimpleNamespace(encode=lambda text, add_special_tokens, n=n: [n, len(text)]) for n in range(2))
    write_corpus(tmp_path / "marked", [[50, 51, 52]], ours)
    drafter = drafter_of(path=str(tmp_path / "marked"))
    drafter.check_tokenizer(ours)
    drafter.check_tokenizer(None)
    with pytest.raises(ValueError, match="marked: its texts are of another tokenizer"):
        drafter.check_tokenizer(other)
    drafter_of(path=corpus).check_tokenizer(other)  # it does not tell
    drafter_of().check_tokenizer(other)
