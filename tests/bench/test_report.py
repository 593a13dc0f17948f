"""`specengine report`: results are read or refused, and a page runs no code from them."""

import json
import os
import re
from base64 import b64decode
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from specengine.bench.__main__ import app as bench_app
from specengine.bench.report import html_report
from specengine.bench.report.html_report import PICTURES, write_report
from specengine.bench.report.plot import picture
from specengine.bench.report.reading import read_results
from specengine.cli.main import app
from tests.bench.results import result

TINY = "random:tiny-llama"
EVIL = "<script>alert('x')</script>\"'&$\\frac{1}$\u0000\ud800"


def written(tmp_path, data, name="a.json"):
    path = tmp_path / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


class Page(HTMLParser):
    """Collects tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


# ---- reading


def test_older_results_get_defaults_and_labels(tmp_path):
    run = {"drafter": "none", "batch": 1, "temperature": 0, "tokens_per_second": 5, "speedup": 1, "peer": "llama.cpp"}
    found = read_results(written(tmp_path, {"model": "m", "questions": 1, "max_new_tokens": 2, "runs": [run], "x": 1}))
    (row,) = found["runs"]
    assert (
        row["label"] == "llama.cpp" and row["tau"] is None and row["level_acceptance"] == [] and row["rule"] == "match"
    )
    assert found["rows"] == [] and found["example"]["tokens"] == {} and "x" not in found and found["preset"] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"runs": []}, r"\.runs: expected a list of runs, got '\[\]'"),
        ({"runs": [3]}, r"runs\[0\]: expected an object, got '3'"),
        ({"runs": [{"drafter": "none"}]}, r"runs\[0\]: expected results of .*'batch' is missing"),
        ({"model": 5}, r"\.model: expected a text, got '5'"),
        ({"questions": "many"}, r"\.questions: expected a number of questions"),
        ({"rows": [{"rows": 1}]}, r"rows\[0\]: .*'ms' is missing"),
        ({"machine": []}, r"\.machine: expected an object"),
        ({"example": {"tokens": {"a": [["text"]]}}}, r"example\.tokens: expected pairs"),
        ({"preset": {"rows": [{"published": {"tau": "x"}}]}}, r"preset\.rows\[0\]\.published\.tau: expected a number"),
    ],
)
def test_damaged_results_are_refused_by_place(tmp_path, change, says):
    with pytest.raises(ValueError, match=r"a\.json.*" + says):
        read_results(written(tmp_path, result(**change)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speedup", 0),
        ("speedup", "2"),
        ("speedup", True),
        ("tokens_per_second", float("nan")),
        ("tau", float("inf")),
        ("tau", 1e300),
        ("batch", 1.5),
        ("level_acceptance", [2.0]),
        ("ms_per_cycle", {"draft": 1.0}),
        ("by_class", {"x": {"speedup": -1}}),
        ("rule", None),
        ("label", "x" * 10_001),
    ],
)
def test_a_damaged_figure_is_refused_by_name(tmp_path, key, value):
    data = result()
    data["runs"][1][key] = value
    with pytest.raises(ValueError, match=rf"a\.json: runs\[1\]\.{key}: expected "):
        read_results(written(tmp_path, data))


@pytest.mark.parametrize("text", ["", "{", "[1]", '"runs"', '{"perplexity": []}', "[" * 100_000, '{"runs": 1}'])
def test_what_is_no_result_is_refused_by_file(tmp_path, text):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=r"a\.json: expected results of python -m specengine\.bench") as error:
        read_results(path)
    assert len(str(error.value)) < 400 or "is missing" in str(error.value)
    refused = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "out.html")])
    assert refused.exit_code == 2 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


def test_missing_and_huge_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        read_results(tmp_path / "none.json")
    monkeypatch.setattr("specengine.bench.report.reading.MOST_BYTES", 10)
    with pytest.raises(ValueError, match="at most"):
        read_results(written(tmp_path, result()))


# ---- the page


@pytest.mark.full
def test_a_report_holds_all_pictures_and_figures_and_needs_nothing_else(tmp_path):
    files = [written(tmp_path, result(), "one.json"), written(tmp_path, result(command="run it"), "two.json")]
    out, folder = tmp_path / "out.html", tmp_path / "pictures"
    done = CliRunner().invoke(app, ["report", *map(str, files), "--out", str(out), "--pictures", str(folder)])
    assert done.exit_code == 0, done.output
    page = Page(out.read_text(encoding="utf-8"))
    images = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    kinds = [kind for kind in PICTURES if kind != "rules"]
    assert len(images) == 2 * len(kinds) and all(src.startswith("data:image/png;base64,") for src in images)
    assert sorted(os.listdir(folder)) == sorted(f"{name}-{kind}.png" for name in ("one", "two") for kind in kinds)
    data = [b64decode(src.partition(",")[2]) for src in images]
    assert all(each.startswith(b"\x89PNG") for each in data)
    assert sorted(data) == sorted((folder / name).read_bytes() for name in os.listdir(folder))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    for part in ("one: tokens/s", "two: tokens/s", "eagle3:a", "200.0", "2.00x", "2.50", "7.0", "1024", "run it"):
        assert part in page.text


def test_nothing_of_a_file_becomes_part_of_the_page(tmp_path):
    data = json.loads(json.dumps(result(model=EVIL, command=EVIL, commit=EVIL, machine={"cpu": EVIL, "gpu": EVIL})))
    for run in data["runs"]:
        run |= {"drafter": EVIL, "label": EVIL, "rule": EVIL, "identical": EVIL, "peer": EVIL}
        run["by_class"] = {EVIL: {"speedup": 1.0}, f"{EVIL}2": {"speedup": 2.0}}
    data["runs"][0] |= {"drafter": "none", "peer": None}
    data["example"] = {"question": EVIL, "tokens": {EVIL: [[EVIL, EVIL], [EVIL, "target"]]}}
    side = {"model": EVIL, "task": EVIL, "label": EVIL, "note": EVIL, "speedup": [1.0, 2.0]}
    data["preset"] = {"name": EVIL, "about": EVIL, "rows": [{"method": EVIL, "published": side, "measured": side}]}
    out = tmp_path / "out.html"
    write_report([written(tmp_path, data, "<b>&.json")], out)
    text = out.read_text(encoding="utf-8")
    assert not re.search(r"<script|<b>", text) and text.count("&lt;script&gt;") > 5
    assert {tag for tag, _ in Page(text).tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "code"),
        *("table", "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption"),
    }
    assert "default-src 'none'" in text


@pytest.mark.full
def test_a_sweep_of_rules_shows_quality_against_speed(tmp_path):
    data = result()
    for run in data["runs"]:
        run |= {"family": "margin", "agreement": 0.5, "log_likelihood": -0.4}
    bars = {"tasks", "drafters", "cycle"}
    assert kinds_of(data, tmp_path, "few") & {"rules", *bars} == {"rules", *bars}
    data["runs"] += [{**data["runs"][1], "rule": f"margin:theta=0.{i}"} for i in range(1, 13)]
    assert kinds_of(data, tmp_path, "many") & {"rules", *bars} == {"rules"}


def kinds_of(data, tmp_path, folder):
    write_report([written(tmp_path, data)], tmp_path / "out.html", tmp_path / folder)
    return {name.partition("-")[2].removesuffix(".png") for name in os.listdir(tmp_path / folder)}


def test_a_failing_write_leaves_the_old_report(tmp_path, monkeypatch):
    path, out = written(tmp_path, result()), tmp_path / "out.html"
    out.write_text("old")

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_report([path], out)
    assert out.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["a.json", "out.html"]


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, result())
    paths = [tmp_path / "x" / "a.json", tmp_path / "y" / "a.json"]
    assert html_report._names(paths) == ["x/a", "y/a"]
    assert html_report._names([*paths[:1], *paths[:1]]) == ["x/a (1)", "x/a (2)"]


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_of_nothing_is_none(tmp_path, kind):
    run = {"drafter": "none", "batch": 1, "temperature": 0, "tokens_per_second": 5, "speedup": 1}
    bare = read_results(written(tmp_path, {"model": "m", "questions": 1, "max_new_tokens": 2, "runs": [run]}))
    assert (picture(PICTURES[kind][0], bare) is None) == (kind != "drafters")


@pytest.mark.full
def test_what_the_benchmark_writes_can_be_read(tmp_path):
    path, out = tmp_path / "run.json", tmp_path / "out.html"
    small = ("--model", TINY, "--limit", "2", "--max-new-tokens", "8", "--repetitions", "1", "--rows", "1,2")
    done = CliRunner().invoke(bench_app, [*small, "--preset", "glide-cost", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found, raw = read_results(path), json.loads(path.read_text())
    for ours, theirs in zip(found["runs"], raw["runs"], strict=True):
        assert all(ours[key] == theirs[key] for key in ours if key in theirs) and len(ours.keys() & theirs) > 15
    assert found["example"] == raw["example"] and len(found["example"]["tokens"]) == 2
    assert len(found["preset"]["rows"]) == len(raw["preset"]["rows"]) and "trace" not in json.dumps(raw)
    write_report([path], out)
    assert "GLIDE and CAPE" in out.read_text(encoding="utf-8")
