"""Acceptance by level, counted by hand on a text of one dialogue."""

import pytest
import torch

from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.training_batch import TrainingBatch, ahead

TOKENS = [5, 6, 7, 8, 9, 10]  # greedy is 6 7 8 9 0 -: the last token differs from it
GREEDY = [6, 7, 8, 9, 0, 0]


def batch(wanted=(1, 1, 1, 1, 1, 0)) -> TrainingBatch:
    return TrainingBatch(
        torch.tensor([TOKENS]), torch.tensor([6]), torch.tensor([wanted]).bool(), torch.tensor([GREEDY]),
        torch.zeros(1, 6, 4),
    )  # fmt: skip


def ranked(*levels) -> list[torch.Tensor]:
    """The two best guesses of rows 0 .. 5, per level."""
    return [torch.tensor([level]) for level in levels]


def test_level_i_of_row_t_is_compared_with_the_token_after_position_t_plus_i():
    truth = [[token, -1] for token in [7, 8, 9, 0, 0, 0]], [[token, -1] for token in [8, 9, 0, 0, 0, 0]]
    report = LevelReport.of([torch.tensor(1.0), torch.tensor(2.0)], ranked(*truth), batch())
    assert report.rows.tolist() == [4, 3]  # rows 0 .. 3 have a wanted position one further, rows 0 .. 2 two further
    assert report.agreed.tolist() == [4, 3]
    # row 3's first guess is right but the text differs, so the next token of that path is unknown
    assert report.reached.tolist() == [4, 3]
    assert report.acceptance == [1, 1]
    assert report.tau == 3
    assert report.loss.tolist() == [1, 2]


def test_a_level_counts_only_rows_whose_guesses_above_it_were_taken():
    first = [[7, -1], [1, 8], [9, -1], [0, -1], [0, 0], [0, 0]]  # row 1 is wrong, its second guess is right
    second = [[1, 8], [9, -1], [0, -1], [0, 0], [0, 0], [0, 0]]  # row 0 is wrong, its second guess is right
    report = LevelReport.of([torch.zeros(()), torch.zeros(())], ranked(first, second), batch())
    assert report.agreed.tolist() == [3, 2]
    assert report.reached.tolist() == [4, 2]  # rows 0 and 2
    assert report.accepted.tolist() == [3, 1]
    assert report.near.tolist() == [4, 2]
    assert report.tau == pytest.approx(1 + 3 / 4 + 3 / 4 * 1 / 2)
    assert report.near_tau == pytest.approx(1 + 1 + 3 / 4 * 1)


def test_a_text_that_left_the_guess_ends_the_path():
    tokens = batch().tokens.clone()
    tokens[0, 3] = 1  # after row 0's first guess 7 the text has 1, greedy has 8
    other = TrainingBatch(tokens, batch().lengths, batch().wanted, batch().greedy, batch().last)
    levels = ranked([[7, -1]] * 6, [[8, -1]] * 6, [[9, -1]] * 6)
    zeros = [torch.zeros(())] * 3
    assert LevelReport.of(zeros, levels, batch()).accepted.tolist() == [1, 1, 1]
    assert LevelReport.of(zeros, levels, other).accepted.tolist() == [1, 1, 0]


def test_unwanted_positions_are_not_counted():
    levels = ranked([[7, -1]] * 6)
    assert LevelReport.of([torch.zeros(())], levels, batch((0, 0, 1, 1, 0, 0))).rows.tolist() == [2]


def test_reports_add_up():
    one = LevelReport.of([torch.tensor(1.0)], ranked([[7, 0], [8, 0], [9, 0], [0, 0], [0, 0], [0, 0]]), batch())
    assert (one + one).rows.tolist() == [8]
    assert (one + one).acceptance == one.acceptance


@pytest.mark.parametrize("steps", [1, 3, 6, 9])
def test_rows_are_looked_up_ahead_and_zero_past_the_end(steps):
    x = torch.arange(1, 13).reshape(2, 6)
    expected = [[row[i + steps] if i + steps < 6 else 0 for i in range(6)] for row in x.tolist()]
    assert ahead(x, steps).tolist() == expected
