"""The pages and the picture of speed show the figures of the recorded runs."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def script():
    """bench/readme_table.py, which imports a program beside it."""
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "bench" / "readme_table.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        spec.loader.exec_module(module)
    return module


def figures(svg: str) -> list[list[str]]:
    """Tokens per second, speedup and tau of each bar of the picture."""
    return [list(found) for found in re.findall(r">([\d.]+)/s, ([\d.]+)x, tau ([\d.]+)<", svg)]


def test_the_picture_of_speed_shows_the_figures_of_its_run(script):
    picture = script.speed_picture
    data = json.loads(picture.RESULT.read_text(encoding="utf-8"))
    rows = {row["label"]: row for row in data["runs"]}
    shown = figures(picture.PICTURE.read_text(encoding="utf-8"))
    assert shown == [
        [f"{rows[name]['tokens_per_second']:.1f}", f"{rows[name]['speedup']:.2f}", f"{rows[name]['tau']:.2f}"]
        for name in picture.LABELS
    ]
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.picture(data), "run: python bench/readme_table.py"


def test_a_picture_of_another_run_is_another_picture(script):
    picture = script.speed_picture
    data = json.loads(picture.RESULT.read_text(encoding="utf-8"))
    next(row for row in data["runs"] if row["label"] == "auto")["speedup"] = 9.0
    assert ["9.00" in each for each in figures(picture.picture(data))] == [False, False, False, True]


def test_tables_agree_with_the_recorded_runs(script):
    for page in script.PAGES:
        text = page.read_text(encoding="utf-8")
        assert script.rewritten(text) == text, f"{page.name}: run python bench/readme_table.py"


def test_a_changed_figure_is_put_right(script):
    text = PAGE.read_text(encoding="utf-8")
    wrong = text.replace("| 1.00x |", "| 9.00x |")
    assert wrong != text and script.rewritten(wrong) == text


@pytest.mark.parametrize("key", ["tokens_per_second", "speedup", "tau", "identical"])
def test_a_table_that_disagrees_with_its_results_is_found(script, tmp_path, monkeypatch, key):
    """The other way round: the page stays, a result changes."""
    text = PAGE.read_text(encoding="utf-8")
    names = [found["file"] for found in script.BLOCK.finditer(text)]
    (tmp_path / "results").mkdir()
    for name in names:
        data = json.loads((ROOT / "bench" / name).read_text(encoding="utf-8"))
        if name == names[0]:
            row = data["runs"][1]
            row[key] = "0/1" if key == "identical" else row[key] * 2
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setattr(script, "HERE", tmp_path)
    assert script.rewritten(text) != text


def test_the_index_lists_every_result(script):
    text = (ROOT / "bench/results/README.md").read_text(encoding="utf-8")
    assert script.indexed(text) == text, "run: python bench/readme_table.py"
    for file in (ROOT / "bench/results").glob("*.json"):
        assert f"| [`{file.name}`]" in text


def test_a_result_that_comes_changes_or_cannot_be_told_shows_in_the_index(script, tmp_path):
    empty = "<!-- bench index -->\n<!-- bench end -->"
    run = {"peer": None, "drafter": "none", "rule": "match", "temperature": 0.8, "batch": 1}
    data = {"model": "x/m", "dtype": "int8", "device": "cpu", "questions": 3, "commit": "a" * 40}
    data["runs"] = [run, {**run, "peer": "llama.cpp"}, {**run, "batch": 4}]
    (tmp_path / "one.json").write_text(json.dumps(data))
    line = (
        "| [`one.json`](one.json) | m (int8, cpu), 2 contenders (1 of them peers), 3 questions, temperature 0.8; batch "
    )
    first = script.indexed(empty, tmp_path)
    assert line + "1, 4 | aaaaaaaaaaaa |" in first
    data["runs"][2]["batch"] = 5
    (tmp_path / "one.json").write_text(json.dumps({**data, "preset": {"name": "glide-cost"}}))
    second = script.indexed(first, tmp_path)
    assert second != first and "| glide-cost: m (int8, cpu)" in second and "batch 1, 5 |" in second
    (tmp_path / "two.json").write_text('{"perplexity": [], "model": "m"}')
    assert "two.json) | perplexity of m in every dtype | not recorded |" in script.indexed(second, tmp_path)
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(ValueError, match=r"odd\.json: neither runs nor"):
        script.indexed(second, tmp_path)
    with pytest.raises(ValueError, match="no index"):
        script.indexed("# nothing")


def test_the_table_may_come_from_another_file(script):
    text = script.with_file(PAGE.read_text(encoding="utf-8"), "results/other.json")
    assert "<!-- bench: results/other.json -->" in text
    with pytest.raises(FileNotFoundError, match=r"other\.json"):
        script.rewritten(text)


def test_a_page_without_a_table_is_refused(script):
    with pytest.raises(ValueError, match="no table"):
        script.rewritten("# nothing")


def test_prefill_and_rows_are_shown_where_they_were_measured(script):
    prefill = [{"peer": None, "drafter": "none", "tokens": 9, "seconds": 0.01}]
    prefill.append({"peer": "llama.cpp", "drafter": "none", "tokens": 9, "seconds": 0.02})
    rows = [{"rows": 1, "ms": 3.0, "ratio": 1.0}, {"rows": 8, "ms": 4.5, "ratio": 1.5}]
    told = script._prefills({"prefill": prefill})[0]
    assert "first token of a prompt of 9 tokens, in ms: `none` 10, llama.cpp 20." in told
    assert script._rows({"rows": rows})[0] == "A pass of one row takes 3.00 ms. Relative to it: 8 rows 1.50x."
    assert script._prefills({}) == script._rows({"rows": []}) == []


def test_peers_have_rows_without_phases(script):
    row = {
        "peer": "llama.cpp:Q8_0+prompt_lookup",
        "drafter": "prompt_lookup",
        "batch": 1,
        "tokens_per_second": 50.0,
        "speedup": 0.5,
        "tau": 1.25,
        "ms_per_cycle": None,
        "identical": "3/4",
    }
    assert script._row(row) == "| llama.cpp:Q8_0, prompt_lookup | 50.0 | 0.50x | 1.25 |  | 3/4 |"


def test_acceptance_has_a_table_of_its_own_at_every_temperature(script):
    row = {"peer": None, "drafter": "none", "batch": 1, "tokens_per_second": 50.0, "speedup": 1.0, "tau": 1.0}
    row |= {"ms_per_cycle": None, "identical": "3/3", "level_acceptance": []}
    drafted = {**row, "drafter": "eagle3:runs/a", "label": "eagle3:a", "level_acceptance": [0.5, None, *[0.25] * 7]}
    data = {"questions_file": "built-in", "dtype": "auto", "model": "m", "questions": 3, "max_new_tokens": 9}
    data |= {"machine": {"cores": 2, "instruction_set": "avx2", "cpu": "x"}}
    data["runs"] = [{**each, "temperature": temperature} for temperature in (0.0, 0.8) for each in (row, drafted)]
    lines = script._lines(data, "results/x.json")
    assert lines[0].endswith("9 new tokens, greedy:") and "The same, temperature 0.8:" in lines
    assert lines.count("| `none` | 50.0 | 1.00x | 1.00 |  | 3/3 |") == 2
    assert lines.count("| `eagle3:a` | 0.50 |  | 0.25 | 0.25 | 0.25 | 0.25 |") == 2
    assert not any(line.startswith("| `none` | 0") for line in lines)
