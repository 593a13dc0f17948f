"""The pages of docs/ say what the code says: options and their defaults, files, links; and all of them can be found."""

import dataclasses
import re

import pytest

from specengine import Engine, SamplingParams
from specengine.drafters import drafter_kind, drafter_names
from specengine.rules import RULES
from specengine.train.objectives.registry import OBJECTIVES, objective_class
from tests.docs.pages import PAGES, README, ROOT, Page

DOCS = ROOT / "docs"
DOC_PAGES = [Page(path) for path in PAGES]
# as on the command line; a page may have several names
PAGE = {"draft_model": "draft-model", "p_eagle": "p-eagle"} | dict.fromkeys(("domino", "dspark", "jetspec"), "dflash")
OPTION_PAGES = ("drafters", "rules")  # folders
LONGEST = 150  # columns
README_LINES = 140
ROOT_PAGES = [Page(ROOT / name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
ENGINE = set(Engine.__init__.__annotations__) | {field.name for field in dataclasses.fields(SamplingParams)}

ALL = [*ROOT_PAGES, *DOC_PAGES]

pages = pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)


def configs() -> dict[str, type]:
    """Page -> the dataclass whose options it lists."""
    drafters = {
        f"drafters/{PAGE.get(name, name)}": drafter_kind(name).config_type for name in drafter_names() if name != "none"
    }
    return drafters | {f"rules/{name}": rule for name, rule in RULES.items()}


def shown(default: object) -> str:
    """A default as a table has it."""
    if isinstance(default, bool):
        return str(default).lower()
    return "(empty)" if default == "" else f"{default:g}" if isinstance(default, float) else str(default)


def table_of(config: type) -> list[list[str]]:
    return [[f"`{field.name}`", shown(field.default)] for field in dataclasses.fields(config)]


def test_every_drafter_and_every_rule_has_a_page():
    found = {
        p.path.relative_to(DOCS).with_suffix("").as_posix() for p in DOC_PAGES if p.path.parent.name in OPTION_PAGES
    }
    assert found == set(configs())


@pytest.mark.parametrize("name, config", configs().items())
def test_a_page_lists_the_options_with_their_defaults(name, config):
    rows = Page(DOCS / f"{name}.md").rows("## Options")
    assert [row[:2] for row in rows] == table_of(config)
    assert all(len(row[2]) > 10 for row in rows), "an option without an explanation"


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_page_on_training_lists_the_options_of_every_drafter(name):
    rows = Page(DOCS / "training.md").rows(f"### {name}")
    assert [row[:2] for row in rows] == table_of(type(objective_class(name)[1]))


@pytest.mark.parametrize("name, config", configs().items())
def test_a_page_speaks_of_no_option_that_does_not_exist(name, config):
    known = {field.name for field in dataclasses.fields(config)} | ENGINE
    if name.startswith("rules/"):
        known.add("adaptive")  # what a seed fixes depends on it
    assert spoken(Page(DOCS / f"{name}.md")) <= known


def spoken(page: Page) -> set[str]:
    """The options that a page gives a value to."""
    return {match[1] for span in page.spans if (match := re.match(r"(\w+)=[^=]", span))}


@pages
def test_links_lead_somewhere(page):
    assert not dead_links(page)


def dead_links(page: Page) -> list[str]:
    def leads(target: str) -> bool:
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        return path.exists() and (not anchor or anchor in Page(path).anchors)

    return [target for target in page.links if not leads(target)]


@pages
def test_files_that_a_page_names_exist(page):
    assert not missing_files(page)


def missing_files(page: Page) -> list[str]:
    named = [span for span in page.spans if re.fullmatch(r"(csrc|specengine|tests|bench|recipes|docs)/[\w./-]+", span)]
    return [name for name in named if not (ROOT / name).exists() and name not in page.new_files]


@pages
def test_lines_are_short(page):
    long = [number for number, line in enumerate(page.text.splitlines(), start=1) if len(line) > LONGEST]
    assert not long, f"{page.name}: lines {long}"


def test_every_page_can_be_reached_from_the_index_and_the_index_from_the_readme():
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in Page(DOCS / "README.md").links}
    assert {page.path for page in DOC_PAGES if page.path != DOCS / "README.md"} <= linked
    assert any(target.startswith("docs") for target in Page(README).links)


def test_the_readme_is_short_and_has_the_commands_that_ci_reads():
    assert not readme_faults(Page(README).text)


def readme_faults(text: str) -> list[str]:
    """What is wrong with the README's length and its first commands."""
    lines = text.splitlines()
    faults = [f"{len(lines)} lines, more than {README_LINES}"] if len(lines) > README_LINES else []
    commands = ('pip install . && specengine generate "Name the capital of France."', "pip install '.[test]' && pytest")
    return faults + [f"lost: {command}" for command in commands if command not in lines]


def test_a_long_readme_and_one_without_its_test_command_are_noticed():
    text = Page(README).text
    assert readme_faults(text + "\n" * README_LINES) and readme_faults(text.replace("[test]' && pytest", "[test]'"))


def test_what_is_wrong_on_a_page_is_noticed(tmp_path):
    page = Page(tmp_path / "wrong.md")
    page.path.write_text(
        "# Wrong\n\n[here](wrong.md#wrong) [there](wrong.md#right) [nowhere](none.md) [web](https://example.org)\n\n"
        "`csrc/none.cpp` `csrc/bindings/module.cpp` `depth=7`\n\n"
        "## Options\n\n| option | default | meaning |\n|---|---|---|\n"
        "| `a` | (empty) | one \\| other |\n\n<!-- not run: too long -->\n```bash\n`depth=8`\n```\n"
    )
    assert dead_links(page) == ["wrong.md#right", "none.md"]
    assert missing_files(page) == ["csrc/none.cpp"]
    assert spoken(page) == {"depth"}
    assert page.rows("## Options") == [["`a`", "(empty)", "one \\| other"]]
    assert [(block.language, block.reason) for block in page.blocks] == [("bash", "too long")]
