"""Costs of passes: the curve, its measurement with a fake target's clock, and the file it is kept in."""

import json
import threading

import pytest

from specengine.draft_policy import measured_costs
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.measured_costs import FAR, NEAR, ROUNDS, ROWS, costs_of, measure
from specengine.tensor_parallel.loading import load_model


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A tiny target whose costs nobody knows yet."""
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    return load_model("random:tiny-llama", device="cpu").target


def kept(folder):
    (path,) = (folder / "costs").iterdir()
    return path


def forget(target):
    measured_costs._known.pop(target)


# ---- the curve


def test_costs_are_linear_between_the_measured_rows_and_beyond_the_last():
    costs = CostModel((1, 2, 4), (1.0, 1.5, 3.5))
    assert [costs(rows) for rows in [1, 2, 3, 4, 6, 20]] == [1.0, 1.5, 2.5, 3.5, 5.5, 19.5]


def test_more_rows_never_cost_less():
    costs = CostModel((1, 2, 4, 8), (1.0, 1.4, 1.2, 2.4))
    assert [costs(rows) for rows in [2, 3, 4, 8]] == [1.4, 1.4, 1.4, 2.4]


def test_rows_beyond_the_last_are_never_free():
    flat = CostModel((1, 2), (1.0, 1.0))
    assert [flat(rows) for rows in [2, 4]] == [1.0, 1.5]
    assert [CostModel((1,), (1.0,))(rows) for rows in [1, 3]] == [1.0, 2.0]


def test_a_prefix_makes_rows_dearer():
    costs = CostModel((1, 2), (1.0, 1.5), (0.01, 0.02))
    assert [costs(rows, 100) for rows in [1, 2]] == [2.0, 3.5]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (((), ()), "rows"),
        (((2, 4), (1.0, 2.0)), "rows"),
        (((1, 4, 2), (1.0, 2.0, 3.0)), "rows"),
        (((1, 2), (1.0,)), "seconds"),
        (((1, 2), (1.0, float("nan"))), "seconds"),
        (((1, 2), (0.0, 1.0)), "seconds"),
        (((1, 2), (1.0, 2.0), (-1.0, 0.0)), "per_position"),
    ],
)
def test_what_is_no_curve_is_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        CostModel(*arguments)


# ---- the measurement


class FakeTarget:
    """Passes that take 1 + rows / 8 + prefix * rows / 1000 units, and now and then ten times as long."""

    def __init__(self, unit: float, slow: tuple[int, ...] = ()) -> None:
        self.unit, self.slow, self.passes = unit, slow, []

    def __call__(self, rows: int, prefix: int) -> float:
        taken = self.unit * (1 + rows / 8 + prefix * rows / 1000) * (10 if len(self.passes) in self.slow else 1)
        self.passes.append((rows, prefix, taken))
        return taken


def test_every_row_count_is_measured_at_two_prefixes_and_slow_spells_are_forgotten():
    fake = FakeTarget(1e-5, slow=(0, 1, 2, 15))
    costs = measure(fake, (0, 100))
    assert costs.rows == (1, 2, 4, 8, 16, 32) and len(fake.passes) == 2 * len(ROWS) * ROUNDS
    assert costs.seconds == pytest.approx([1e-5 * (1 + n / 8) for n in costs.rows])
    assert costs.per_position == pytest.approx([1e-5 * n / 1000 for n in costs.rows])


def test_a_slow_target_is_measured_at_few_rows_and_extrapolated():
    fake = FakeTarget(1.0)
    costs = measure(fake, (0, 100), budget=2.0)
    assert [rows for rows, _, _ in fake.passes] == [1, 4]
    assert costs.rows == (1, 4) and costs.per_position == (0.0, 0.0)
    assert [costs(rows) for rows in [2, 8]] == pytest.approx([1.25, 2.25])


def test_the_slowest_target_runs_one_pass():
    fake = FakeTarget(100.0)
    assert measure(fake).rows == (1,) and len(fake.passes) == 1


def test_a_context_too_short_for_two_prefixes_is_measured_at_one():
    fake = FakeTarget(1e-5)
    assert measure(fake, (64, 64)).per_position == (0.0,) * len(ROWS)
    assert len(fake.passes) == len(ROWS) * ROUNDS


def test_a_real_target_runs_the_rows_and_prefixes_it_was_asked_for(target, monkeypatch):
    seen, original = set(), target.forward

    def forward(tree, cache, batch, greedy):
        seen.add((len(tree.tokens), int(batch.lengths[0])))
        return original(tree, cache, batch, greedy)

    monkeypatch.setattr(target, "forward", forward)
    far = target.config.max_position - 64  # shorter than FAR
    assert far < FAR and len(costs_of(target).rows) == len(ROWS)
    assert seen == {(rows, prefix) for rows in ROWS for prefix in (NEAR, far)}


# ---- the file


def test_costs_are_measured_once_per_machine_and_model(target, tmp_path, monkeypatch):
    first = costs_of(target)
    data = json.loads(kept(tmp_path).read_text())
    assert data["seconds"] == list(first.seconds)
    monkeypatch.setattr(measured_costs, "measure", None)  # would be called
    assert costs_of(target) is first
    forget(target)
    again = costs_of(target)
    assert again.rows == first.rows and again.per_position == first.per_position


def test_a_busy_spell_in_the_file_is_forgotten_and_a_quiet_one_kept(target, tmp_path, monkeypatch):
    costs_of(target)
    path = kept(tmp_path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "seconds": [0.04, 1e-9, 0.04, 0.04, 0.04, 0.04]}))
    forget(target)
    monkeypatch.setattr(measured_costs, "_Passes", lambda target, longest: lambda rows, prefix: rows / 1000)
    seconds = (0.001, 1e-9, 0.004, 0.008, 0.016, 0.032)
    assert costs_of(target).seconds == seconds
    assert json.loads(path.read_text())["seconds"] == list(seconds)


def test_a_slow_target_is_not_measured_again(target, tmp_path, monkeypatch):
    costs_of(target)
    path = kept(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": [9.0] * 6}))
    forget(target)
    assert costs_of(target).seconds == (9.0,) * 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "",
        lambda data: "[1, 2",
        lambda data: "null",
        lambda data: "\x00\xff",
        lambda data: json.dumps(data)[:-9],
        lambda data: json.dumps({**data, "key": {**data["key"], "core": 1}}),
        lambda data: json.dumps({**data, "key": {**data["key"], "device": "another"}}),
        lambda data: json.dumps({**data, "seconds": data["seconds"][:-1]}),
        lambda data: json.dumps({**data, "seconds": ["1"] * 6}),
        lambda data: json.dumps({**data, "rows": 3}),
        lambda data: json.dumps({"key": data["key"]}),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(target, tmp_path, damage):
    costs_of(target)
    path = kept(tmp_path)
    good = json.loads(path.read_text())
    path.write_text(damage({**good, "seconds": [1e-9] * 6}))
    forget(target)
    assert costs_of(target).seconds != (1e-9,) * 6
    assert json.loads(kept(tmp_path).read_text())["key"] == good["key"]


def test_a_folder_that_cannot_be_written_is_no_error(target, tmp_path):
    (tmp_path / "costs").write_text("a file where the folder should be")
    assert costs_of(target).rows[0] == 1


def test_another_model_has_a_file_of_its_own(target, tmp_path):
    costs_of(target)
    costs_of(load_model("random:tiny-qwen3", device="cpu").target)
    costs_of(load_model("random:tiny-llama", device="cpu", dtype="bfloat16").target)
    assert len(list((tmp_path / "costs").iterdir())) == 3


def test_engines_that_share_a_target_measure_it_once(target, monkeypatch):
    calls, original = [], measured_costs.measure
    monkeypatch.setattr(measured_costs, "measure", lambda *args: calls.append(args) or original(*args))
    threads = [threading.Thread(target=costs_of, args=(target,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
