"""The service of docs/service.md answers and counts."""

import re
from ast import literal_eval
from pathlib import Path

import pytest

from specengine import Engine, SamplingParams
from tests.engine.exposition import parsed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "service.md"

pytestmark = pytest.mark.docs


@pytest.mark.model
def test_the_service_of_the_page_answers_and_counts(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (code,) = (block for block in blocks if "AsyncEngine" in block)
    names = {"__name__": "snippet", "Engine": Engine, "params": SamplingParams(max_new_tokens=32)}
    exec(compile(code, PAGE.name, "exec"), names)
    answers, metrics = capsys.readouterr().out.split("\n", 1)
    assert len(literal_eval(answers)) == 3 and all(literal_eval(answers))
    finished = parsed(metrics.rstrip("\n") + "\n")["specengine_requests_finished_total"].samples
    assert sum(finished.values()) == 3
