"""The page in a real browser: it shows the engine's texts and sends requests only to its own server."""

import json
import re

import httpx
import pytest

from specengine import SamplingParams
from tests.server.browsers import MISSING, SIZES, ask, browser, opened
from tests.server.servers import plain_engine, served, settled, total, until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the page's tests need {' and '.join(MISSING)}")

QUESTION = 'abc abc abc <img src="x" onerror="boom()">'
IDENTICAL = re.compile(r"\d+\.\d\dx the speed of plain decoding; the texts are identical")


@pytest.fixture(scope="module")
def chromium():
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def address():
    with served() as address:
        yield address


def said(question: str, tokens: int, **params) -> str:
    chat = [{"role": "user", "content": question}]
    return plain_engine().generate(chat, SamplingParams(max_new_tokens=tokens, **params)).text


def shown(page, answer: int = 0) -> str:
    return page.locator(".text").nth(answer).evaluate("element => element.textContent")


def figure(page, name: str, answer: int = 0) -> float:
    cell = page.locator("article").nth(answer).locator(".figures div", has=page.get_by_text(name, exact=True))
    return float(cell.locator("b").inner_text())


@pytest.mark.parametrize("size", SIZES)
def test_an_answer_is_shown_by_who_proposed_it_and_fits_the_screen(chromium, address, size):
    with opened(chromium, address, size) as page:
        page.fill("#tokens", "60")
        ask(page, QUESTION)
        page.wait_for_selector("#send:not([disabled])")
        assert shown(page) == said(QUESTION, 60, seed=1)
        assert page.locator(".question").inner_text() == QUESTION and page.locator("main img").count() == 0
        owners = set(page.locator(".text span").evaluate_all("spans => spans.map(span => span.title)"))
        assert {"prompt_lookup", "bonus"} <= owners <= {"prompt_lookup", "bonus", "root"}
        colours = page.locator(".text span").evaluate_all(
            "spans => spans.map(span => span.title + getComputedStyle(span).backgroundColor)"
        )
        assert len(set(colours)) == len(owners) == len({each.split("rgb")[1] for each in set(colours)})
        cycles = figure(page, "cycles")
        assert figure(page, "tokens") == 60 and figure(page, "tau") == pytest.approx(60 / cycles, abs=0.01)
        assert figure(page, "tokens/s") > 0
        depths = [int(each.split("/")[1]) for each in page.locator(".depths span").all_inner_texts() if "/" in each]
        assert 0 < len(depths) <= 8 and depths == sorted(depths, reverse=True) and depths[0] <= cycles
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "it scrolls sideways"
        for control in ("#drafter", "#rule", "#temperature", "#seed", "#compare", "#question", "#send", "#stop"):
            box = page.locator(control).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= SIZES[size][0] and box["height"] >= 16, control


def test_plain_decoding_says_the_same_beside_it(chromium, address):
    with opened(chromium, address) as page:
        page.check("#compare")
        page.fill("#tokens", "40")
        page.fill("#temperature", "0.9")
        page.fill("#seed", "7")
        ask(page, QUESTION)
        page.wait_for_selector(".verdict:not([hidden])")
        assert IDENTICAL.fullmatch(page.locator(".verdict").inner_text())
        assert shown(page, 0) == shown(page, 1) == said(QUESTION, 40, temperature=0.9, seed=7)
        assert figure(page, "tau", 1) == 1 and figure(page, "cycles", 1) == 40
        left, right = (page.locator("article").nth(i).bounding_box() for i in range(2))
        assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"], "not side by side"
        page.set_viewport_size(dict(zip(("width", "height"), SIZES["phone"], strict=True)))
        left, right = (page.locator("article").nth(i).bounding_box() for i in range(2))
        assert left["x"] == right["x"] and left["y"] + left["height"] <= right["y"]


def test_the_switches_decide_what_is_asked_for_and_the_conversation_goes_on(chromium, address):
    with opened(chromium, address) as page:
        bodies = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
        page.fill("#tokens", "30")
        ask(page, "one")
        page.wait_for_selector("#send:not([disabled])")
        page.select_option("#drafter", "none")
        page.select_option("#rule", "rejection")
        ask(page, "two")
        page.wait_for_selector("#send:not([disabled])")
        first = shown(page, 0)
        page.click("#forget")
        assert page.locator("article").count() == 0
        ask(page, "three")
        page.wait_for_selector("#send:not([disabled])")
    chosen = [(body["speculation"]["drafter"], body["speculation"]["rule"]) for body in bodies]
    assert chosen == [("prompt_lookup,adaptive=false", "match"), ("none", "rejection"), ("none", "rejection")]
    assert [[message["content"] for message in body["messages"]] for body in bodies] == [
        ["one"],
        ["one", first, "two"],
        ["three"],
    ]


def test_a_schema_is_sent_and_forced_tokens_have_a_colour_of_their_own(chromium, address):
    """The answer is made up, as a tiny model with a schema takes long to find an end."""
    tokens = [{"text": '{"a": ', "by": "grammar"}, {"text": "1", "by": "prompt_lookup"}, {"text": "}", "by": "bonus"}]
    delta = {"index": 0, "delta": {"content": '{"a": 1}'}, "speculation": {"tokens": tokens, "cycles": []}}
    stream = f"data: {json.dumps({'choices': [delta]})}\n\ndata: [DONE]\n\n"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with opened(chromium, address) as page:
        bodies = []

        def answer(route) -> None:
            bodies.append(route.request.post_data_json)
            route.fulfill(status=200, content_type="text/event-stream", body=stream)

        page.route("**/v1/chat/completions", answer)
        page.fill("#schema", json.dumps(schema))
        ask(page, "one")
        page.wait_for_selector("#send:not([disabled])")
        colours = page.locator(".text span").evaluate_all(
            "spans => spans.map(span => [span.title, getComputedStyle(span).backgroundColor])"
        )
        assert [title for title, _ in colours] == ["grammar", "prompt_lookup", "bonus"]
        assert len({colour for _, colour in colours}) == 3
        assert page.locator(".key span").first.inner_text() == "grammar 33 %"
        page.fill("#schema", "{")
        ask(page, "two")
        page.wait_for_selector(".verdict.error")
        assert page.locator(".verdict.error").inner_text().startswith("JSON schema: ")
        page.fill("#schema", "")
        ask(page, "three")
        page.wait_for_selector("#send:not([disabled])")
    first, last = bodies
    assert first["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert "response_format" not in last
    assert [message["content"] for message in last["messages"]] == ["one", '{"a": 1}', "three"]


def test_an_answer_can_be_stopped(chromium, slow):
    with served() as address:
        with opened(chromium, address) as page:
            page.fill("#tokens", "400")
            ask(page, QUESTION)
            page.wait_for_selector(".text span")
            assert total(address, "requests_running") == 1
            page.click("#stop")
            page.wait_for_selector(".verdict:not([hidden])")
            assert page.locator(".verdict").inner_text() == "stopped" and shown(page)
            until(lambda: total(address, "requests_running") == 0)
        settled(address)


def test_what_is_forgotten_while_it_speaks_is_not_said_again(chromium, slow):
    with served() as address, opened(chromium, address) as page:
        bodies = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
        page.fill("#tokens", "400")
        ask(page, "one")
        page.wait_for_selector(".text span", state="attached")
        page.click("#forget")
        page.fill("#tokens", "2")
        ask(page, "two")
        page.wait_for_selector(".text span", state="attached")
        assert [message["content"] for message in bodies[-1]["messages"]] == ["two"]


def test_what_goes_wrong_is_said(chromium, address):
    context = chromium.new_context()
    page = context.new_page()  # the browser logs a refused request as an error, on which `opened` fails
    page.goto(address)
    page.fill("#tokens", "9999")
    ask(page, "hello")
    page.wait_for_selector(".verdict.error")
    assert "max_tokens: 9999 new tokens and a prompt of" in page.locator(".verdict").inner_text()
    context.close()


def test_a_key_is_asked_for_and_used(chromium):
    with served(api_key="secret-1") as address:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#lock:not([hidden])")
        assert "needs an API key" in page.locator("#about").inner_text() and page.locator("#send").is_disabled()
        page.fill("#api-key", "secret-1")
        page.press("#api-key", "Tab")
        page.fill("#tokens", "5")
        ask(page, "hello")
        page.wait_for_selector("#send:not([disabled])")
        assert shown(page) == said("hello", 5, seed=1)
        context.close()


def test_the_page_may_load_nothing(address):
    response = httpx.get(address)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r'(?:src|href)=(?!"data:)', response.text) and "url(" not in response.text
    assert not re.search(r"https?://", response.text)
