"""Random requests, valid and malformed, get an answer or a clear error of their own.

SPECENGINE_RANDOM_REQUESTS=100000 tries as many.
"""

import asyncio
import json
import os
import re
import time

import httpx
import pytest

from specengine.server.app import make_app
from specengine.server.engine_pool import EnginePool
from specengine.server.settings import Settings
from tests.server.requests import random_request
from tests.server.servers import SETTINGS
from tests.server.tools import model_of

COUNT = int(os.environ.get("SPECENGINE_RANDOM_REQUESTS", "300"))
AT_ONCE = 8
SECONDS = 5  # of a request among others


@pytest.mark.parametrize(("name", "lenient"), [("hermes", False), ("thinking", True)])
def test_random_requests_get_an_answer_or_a_clear_error(name, lenient):
    asyncio.run(ask_all(name, lenient, range(COUNT // 2) if lenient else range(COUNT // 2, COUNT)))


async def ask_all(name: str, lenient: bool, seeds: range) -> None:
    settings = Settings(**SETTINGS | {"max_new_tokens": 4, "deadline": 60.0, "ignore_unknown_fields": lenient})
    pool = EnginePool(model_of(name), settings)
    app = httpx.ASGITransport(make_app(pool, settings))  # raises what the application raises
    statuses: list[int] = []
    async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:

        async def ask(seed: int) -> None:
            path, body = random_request(seed)
            began = time.monotonic()
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            problem = violation(response, time.monotonic() - began)
            assert problem is None, f"request {seed}: {problem}: {path} {body[:2000]!r} {response.text[:500]}"
            statuses.append(response.status_code)

        for first in range(seeds.start, seeds.stop, AT_ONCE):
            await asyncio.gather(*map(ask, range(first, min(first + AT_ONCE, seeds.stop))))
    await pool.close()
    assert min(statuses.count(200), statuses.count(400)) > len(statuses) / 10, "the requests are all of one kind"


def violation(response: httpx.Response, seconds: float) -> str | None:
    """How a response breaks the contract; None: it does not."""
    if seconds > SECONDS:
        return f"took {seconds:.1f} s"
    if response.status_code == 200:
        if not response.headers["content-type"].startswith("text/event-stream"):
            return None if response.json()["choices"] else "no choices"
        *chunks, end = response.text.split("\n\n")[:-1]
        errors = [chunk for chunk in chunks if "error" in json.loads(chunk.removeprefix("data: "))]
        return f"an error in a stream: {errors[0]}" if errors or end != "data: [DONE]" else None
    if response.status_code not in (400, 404):
        return f"status {response.status_code}"
    error = response.json()["error"]
    if not error["message"] or len(error["message"]) > 600:
        return "an error without a message, or a long one"
    if not re.match(re.escape(error["param"] or "body") + r"\W", error["message"]):
        return "an error that does not begin with its field"
    return None


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, {"choices": [{}]}, None),
        (200, {"choices": []}, "no choices"),
        (500, {}, "status 500"),
        (400, {"error": {"message": "n: expected 5", "param": "n"}}, None),
        (400, {"error": {"message": "no", "param": "n"}}, "an error that does not"),
        (400, {"error": {"message": "", "param": "n"}}, "an error without a message"),
    ],
)
def test_a_wrong_response_is_a_violation(status, body, found):
    problem = violation(httpx.Response(status, json=body), 0.1)
    assert problem is None if found is None else problem.startswith(found)
