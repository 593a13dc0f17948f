"""README's service is run as it stands."""

import re
from ast import literal_eval
from pathlib import Path

import pytest

from tests.engine.exposition import parsed

README = Path(__file__).resolve().parents[2] / "README.md"

pytestmark = pytest.mark.docs


@pytest.mark.model
def test_the_service_of_the_readme_answers_and_counts(capsys):
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "AsyncEngine" in block
    )
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    answers, metrics = capsys.readouterr().out.split("\n", 1)
    assert len(literal_eval(answers)) == 3 and all(literal_eval(answers))
    finished = parsed(metrics.rstrip("\n") + "\n")["specengine_requests_finished_total"].samples
    assert sum(finished.values()) == 3
