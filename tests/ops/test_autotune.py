"""LinearChoices: what is measured, chosen and kept, with a timer that invents its times."""

import json
from collections import Counter

import pytest
import torch

from specengine import _C
from specengine.ops.autotune import FUSION_SAVES, MANY_COLUMNS, ROWS, VARIANTS, LinearChoices
from specengine.ops.linear import LIBRARY, Projection, linear_argmax_cuda, linear_cuda
from specengine.ops.weight import Weight

CPU = torch.device("cpu")
EIGHT_WARPS = [way for name, way in VARIANTS.items() if name.endswith("x8")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    return tmp_path


class Clock:
    """A timer: by default every variant takes 2, the library 3; `fast` maps rows to the ways that take 1."""

    def __init__(self, **fast: list[int]) -> None:
        self.fast = {int(rows.removeprefix("rows")): ways for rows, ways in fast.items()}
        self.measured = Counter()

    def __call__(self, weight):
        def seconds(rows: int, way: int) -> float:
            self.measured[tuple(weight.shape), rows] += 1
            ways = self.fast.get(rows, [])
            return 1 + ways.index(way) / 8 if way in ways else 3.0 if way == LIBRARY else 2.0

        return seconds


def layer_of(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> Projection:
    return Projection(tuple(Weight(torch.ones(shape, dtype=dtype), shape[0], "float32") for shape in shapes), None)


LAYER = layer_of((24, 16))
WEIGHT = LAYER.weights[0].data


def tuned(clock: Clock, rows=ROWS, **options) -> LinearChoices:
    choices = LinearChoices(CPU, timer=clock, **options)
    choices.tune(LAYER, rows)
    return choices


def test_the_fastest_way_is_chosen_for_each_number_of_rows():
    choices = tuned(Clock(rows1=[3], rows8=[4], rows16=[LIBRARY], rows64=[2]))
    assert [choices.choose(WEIGHT, rows) for rows in (1, 2, 8, 9, 16, 33, 64)] == [3, 4, 4, LIBRARY, LIBRARY, 2, 2]


def test_more_rows_than_measured_go_to_the_library():
    choices = tuned(Clock(rows64=[2]))
    assert choices.choose(WEIGHT, 65) == choices.choose(torch.ones(5, 8), 1000) == LIBRARY


def test_an_ended_product_keeps_our_kernel_where_the_library_gains_less_than_a_launch():
    def close(weight):
        return lambda rows, way: (
            10e-6 + (FUSION_SAVES * (-0.9 if rows == 1 else -1.1) if way == LIBRARY else way * 1e-7)
        )

    for strict in (False, True):
        choices = tuned(close, rows=[1, 8], strict=strict)
        ended = [choices.choose_fused(WEIGHT, rows) for rows in (1, 8, 16)]
        assert ended[:2] == ([1, 1] if strict else [1, LIBRARY])
        assert [choices.choose(WEIGHT, rows) for rows in (1, 8)] == ([1, 1] if strict else [LIBRARY, LIBRARY])


def test_what_was_not_measured_is_the_default_variant():
    choices = tuned(Clock(rows8=[4]), rows=[8])
    assert choices.choose(WEIGHT, 8) == 4
    assert choices.choose(WEIGHT, 1) == choices.choose(WEIGHT, 16) == 0
    assert choices.choose(WEIGHT.half(), 8) == choices.choose(torch.ones(24, 8), 8) == 0


def test_strict_choices_add_in_one_order_whatever_is_measured():
    one, two, three = EIGHT_WARPS
    fast = {"rows1": [LIBRARY, 2, three, two], "rows8": [2], "rows32": [2, one, three], "rows64": [LIBRARY]}
    choices = tuned(Clock(**fast), strict=True)
    assert [choices.choose(WEIGHT, rows) for rows in (1, 32)] == [three, one]
    assert {choices.choose(WEIGHT, rows) for rows in (*ROWS, 65, 5000)} <= set(EIGHT_WARPS)


def test_the_order_of_strict_products_follows_from_the_columns_alone():
    clock, choices = Clock(rows1=[EIGHT_WARPS[2]]), LinearChoices(CPU, timer=None, strict=True)
    for columns, warps in ((MANY_COLUMNS - 8, 8), (MANY_COLUMNS, 16)):
        for weight in (torch.ones(16, columns), torch.ones(64, columns)):
            chosen = {choices.choose(weight, rows) for rows in (1, 8, 65)} | {choices.choose_fused(weight, 8)}
            tuned_too = LinearChoices(CPU, timer=clock, strict=True)
            tuned_too.tune(layer_of((16, columns)))
            chosen |= {tuned_too.choose(weight, rows) for rows in (1, 8, 65)}
            assert {_C.LINEAR_VARIANTS[max(way, 1) - 1][1] for way in chosen} == {warps}


def test_every_shape_is_measured_once_in_all_its_ways():
    clock = Clock()
    choices = LinearChoices(CPU, timer=clock)
    for _ in range(2):
        choices.tune(layer_of((24, 16), (8, 16), (24, 16)), [1, 7, 8])
    assert clock.measured == {(shape, rows): len(VARIANTS) + 1 for shape in ((24, 16), (8, 16)) for rows in (1, 8)}


def test_without_a_timer_nothing_is_measured():
    choices = tuned(None)
    assert choices.report() == {"device": "cpu", "strict": False, "chosen": {}}
    assert choices.choose(WEIGHT, 1) == 0


def test_measurements_are_kept_for_the_next_process(cache):
    tuned(Clock(rows1=[3], rows8=[LIBRARY]), rows=[1])
    clock = Clock()
    again = tuned(clock, rows=[1, 8])
    assert {rows for _, rows in clock.measured} == {8} and again.choose(WEIGHT, 1) == 3
    assert LinearChoices(CPU).report() == again.report()
    (path,) = (cache / "linear").iterdir()
    assert path.suffix == ".json"


def test_the_report_names_weights_rows_and_ways():
    names = list(VARIANTS)
    choices = tuned(Clock(rows1=[3], rows8=[LIBRARY]), rows=[1, 8])
    assert choices.report()["chosen"] == {"float32 24x16": {"1": names[2], "8": "library"}}
    json.dumps(choices.report())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "{",
        lambda data: json.dumps([1]),
        lambda data: json.dumps({**data, "key": {**data["key"], "core": 0}}),
        lambda data: json.dumps({"key": data["key"]}),
        lambda data: json.dumps({**data, "seconds": {"float32 24x16": {"1": {"library": 1}}}}),
        lambda data: json.dumps({**data, "seconds": {"float32 24x16": [1]}}),
        lambda data: json.dumps(data).replace("2.0", '"2.0"'),
        lambda data: json.dumps(data).replace("2.0", "NaN"),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(cache, damage):
    tuned(Clock(rows1=[3]))
    (path,) = (cache / "linear").iterdir()
    path.write_text(damage(json.loads(path.read_text())))
    assert tuned(Clock(rows1=[4])).choose(WEIGHT, 1) == 4
    assert LinearChoices(CPU).choose(WEIGHT, 1) == 4


def test_an_unwritable_folder_only_costs_the_file(cache):
    (cache / "linear").write_text("a file where the folder should be")
    assert tuned(Clock(rows1=[3])).choose(WEIGHT, 1) == 3


def test_the_library_multiplies_where_it_is_chosen():
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    layer = Projection((Weight(weight, 24, "bfloat16"),), torch.arange(24.0))
    choices = LinearChoices(CPU, timer=Clock(rows8=[LIBRARY]))
    choices.tune(layer, [3])
    expected = x.float() @ weight.float().T + layer.bias
    torch.testing.assert_close(linear_cuda(x, layer, choices), expected)
    assert linear_argmax_cuda(x, layer, choices).tolist() == expected.argmax(dim=1).tolist()
