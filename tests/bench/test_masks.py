"""What a constraint costs: the measurement and its wide vocabulary."""

from specengine.bench.masks import mask_cost, wide_tokenizer
from specengine.bench.race.questions import Question
from tests.constraints.vocabulary import END, FIRST, SPECIAL, TOKENIZER, talking_model


def test_a_wide_vocabulary_has_the_old_tokens_and_pairs_of_them():
    wide = wide_tokenizer(TOKENIZER, 600)
    assert wide.vocab_size == 600 and wide.eos_token_ids == (END,)
    assert all(wide.token_bytes(token) == TOKENIZER.token_bytes(token) for token in range(FIRST + len(SPECIAL)))
    plain = {TOKENIZER.token_bytes(token) for token in range(FIRST)}
    pairs = [wide.token_bytes(token) for token in range(FIRST + len(SPECIAL), 600)]
    assert len({*pairs}) == len(pairs) and not plain & {*pairs}
    assert all(any(pair[:cut] in plain and pair[cut:] in plain for cut in range(1, len(pair))) for pair in pairs)


def test_cycles_with_and_without_a_schema_are_compared():
    questions = [Question("a", ("the",), json_schema='{"enum": ["a", "b"]}')]
    row = mask_cost(talking_model(), questions, 0.8, repetitions=2)
    assert row["vocabulary"] == 320 and row["plain_seconds"] > 0 and row["masked_seconds"] > 0 and row["cost"] > -1
