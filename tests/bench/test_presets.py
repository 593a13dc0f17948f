"""Presets: every contender opens, and published numbers are paired with measured ones."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specengine.bench.__main__ import app
from specengine.bench.presets.catalog import PRESETS, named
from specengine.bench.presets.side_by_side import efficiency, published, side_by_side
from specengine.bench.race.contenders import open_contender
from specengine.bench.race.rule_sweep import exact_contender
from specengine.bench.report.tables import preset_table
from specengine.tensor_parallel.loading import load_model
from tests.selection import wide

TINY = "random:tiny-llama"
SMALL = ("--model", TINY, "--limit", "1", "--max-new-tokens", "6", "--repetitions", "1")


def bench(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def row(drafter, rule="match", temperature=0.0, batch=1, speedup=1.0, tau=1.0, peer=None):
    settings = {"drafter": drafter, "rule": rule, "temperature": temperature, "batch": batch}
    return {"label": drafter, "peer": peer, **settings, "speedup": speedup, "tau": tau}


# ---- published numbers


def test_efficiency_is_what_the_papers_figures_give():
    found = {
        (row["preset"], row["method"], row["model"]): efficiency(row["speedup"], row["tau"])
        for name in PRESETS
        for row in published(name)
        if row["temperature"] is not None and row["task"] in (None, "mean")
        if efficiency(row["speedup"], row["tau"])
    }
    model = "Llama-3.1-8B"
    assert round(found["fasteagle-table1", "FastEagle", model], 2) == 0.82
    assert round(found["fasteagle-table1", "EAGLE-3", model], 2) == 0.67
    assert round(found["mars-table1", "MARS", model], 2) == 0.61
    assert efficiency([1.67, 2.24], 3) is efficiency(2.0, None) is efficiency(None, 2.0) is None


def test_every_published_row_belongs_to_a_preset_and_has_plain_values():
    for name in PRESETS:
        assert published(name), name
        for each in published(name):
            assert each["paper"] and each["method"] and each["preset"] == name
            speeds = each["speedup"] if isinstance(each["speedup"], list) else [each["speedup"]]
            assert all(speed is None or 0.5 < speed < 6 for speed in speeds)
            assert each["tau"] is None or 1 < each["tau"] < 9
            assert each["temperature"] in (None, 0, 1) and each["batch"] in (None, 1, 2, 56)


@pytest.mark.parametrize("name", PRESETS)
def test_every_contender_meets_its_published_row_and_its_exact_rule(name):
    preset = PRESETS[name]
    for model in ("smollm2-135m", TINY):
        pairs, methods = preset.contenders(model), {row["method"] for row in published(name)}
        assert pairs[0] == ("none", "match") and len(pairs) == len(set(pairs)) > 2
        entries = preset.entries(model)
        assert {entry.method for entry in entries} - {""} <= methods
        assert any(entry.method for entry in entries)
        if preset.quality:
            assert {exact_contender(*pair) for pair in pairs} <= set(pairs)
    assert preset.temperatures and set(preset.temperatures) <= {0.0, 1.0}


# ---- side by side


def test_published_and_measured_stand_side_by_side():
    entries = PRESETS["fasteagle-table1"].shipped
    theirs = next(entry.drafter for entry in entries if entry.method == "FastEagle")
    rows = [row("none"), row(theirs, speedup=1.5, tau=3.0), row("fasteagle", speedup=0.9, tau=1.2)]
    rows += [row("control", speedup=speed) for speed in (1.02, 0.97, 1.0)]
    rows += [row("none", peer="llama.cpp"), row(theirs, temperature=1.0, speedup=1.2, tau=2.0)]
    found = side_by_side("fasteagle-table1", "smollm2-135m", rows)
    cells = [(r["method"], r["published"] and r["published"]["speedup"], r["measured"]) for r in found["rows"]]
    cells = [(method, speed, ours and (ours["speedup"], ours["efficiency"])) for method, speed, ours in cells]
    assert cells == [
        ("EAGLE-3", 3.94, None),
        ("FastEagle", 4.74, (1.5, 0.5)),
        ("FastEagle", 4.73, None),
        ("EAGLE-3", 2.95, None),
        ("FastEagle", 3.8, (1.2, 0.6)),
        ("", None, (0.9, 0.75)),
    ]
    assert (found["least"]["drafter"], found["least"]["speedup"]) == ("fasteagle", 0.9)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(preset_table(found))
    text = " ".join(capture.get().split())
    assert "FastEagle │ Llama-3.1-8B │ mean │ 0 │ 1 │ 4.74x │ 5.79 │ 0.82 │ fasteagle,top_k=10" in text
    assert "Least speedup" in text and "0.90x, fasteagle at temperature 0, batch 1" in text
    assert "in a second engine: 0.97x to 1.02x" in text


def test_a_published_batch_meets_that_batch_alone():
    theirs = PRESETS["fasteagle-table3"].shipped[0].drafter
    rows = [row(theirs, batch=batch, speedup=speed) for batch, speed in ((1, 1.3), (2, 1.2), (56, 0.7))]
    found = side_by_side("fasteagle-table3", "smollm2-135m", rows)["rows"]
    pairs = [(r["published"] and r["published"]["batch"], r["measured"]["batch"]) for r in found]
    assert pairs == [(2, 2), (56, 56), (None, 1)]


def test_a_range_is_shown_as_one():
    found = side_by_side("glide-cost", "smollm2-135m", [])
    console = Console(width=200)
    with console.capture() as capture:
        console.print(preset_table(found))
    assert "1.67-2.24x" in capture.get() and found["least"] is None


# ---- the command


@pytest.mark.parametrize("name", wide(PRESETS, 2))
def test_every_preset_runs_on_random_weights(name, tmp_path):
    path = tmp_path / "out.json"
    narrow = ("--batch", "1,2") if name == "fasteagle-table3" else ()
    result = bench(*SMALL, "--preset", name, *narrow, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert f"{name}: {PRESETS[name].about}" in " ".join(result.stdout.split())
    data = json.loads(path.read_text())
    measured = [each["measured"] for each in data["preset"]["rows"] if each["measured"]]
    ours = [each for each in data["runs"] if each["drafter"] not in ("none", "control")]
    assert len(measured) == len(ours) and all(each["efficiency"] > 0 for each in measured if each["tau"])
    beside = [each for each in data["preset"]["rows"] if each["published"] and each["measured"]]
    assert beside
    assert {each["temperature"] for each in ours} == set(PRESETS[name].temperatures)
    control = [each for each in data["runs"] if each["drafter"] == "control"]
    assert bool(control) == any(entry.never_slower for entry in PRESETS[name].random)
    assert all(each["tau"] == 1 for each in control)
    quality = "agreement" in result.stdout.partition(f"{name}: ")[2]
    assert quality == PRESETS[name].quality


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--preset", "table-9"), "preset: expected one of fasteagle-table1,"),
        (("--preset", "glide-cost", "--drafters", "none"), "preset: has drafters and rules"),
        (("--preset", "glide-cost", "--kernels"), "preset: has drafters and rules"),
    ],
)
def test_presets_that_cannot_be_measured_are_refused_in_one_line(arguments, says):
    result = bench(*SMALL, *arguments)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {says}") and result.stderr.count("\n") == 1
    with pytest.raises(ValueError, match="preset: expected"):
        named("")


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("name", wide(PRESETS, 2))
def test_every_contender_of_a_preset_opens_on_the_models_at_hand(smollm2_path, name):
    model = load_model(str(smollm2_path))
    for drafter, rule in PRESETS[name].contenders("smollm2-135m"):
        open_contender(model, drafter, rule=rule, max_batch_size=1)
