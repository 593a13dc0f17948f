"""Replicas on Ray Serve return the engine's texts, and another replica takes over the requests of a failed one."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import httpx
import openai
import psutil
import pytest
from filelock import FileLock

from specengine import SamplingParams
from tests.docs.pages import ROOT, Page
from tests.server.servers import chat_folder, plain_engine, until
from tests.tensor_parallel.kills import ranks

pytestmark = [
    pytest.mark.full,  # two and a half minutes, most of them Ray's waiting
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (pip install 'specengine[ray]')"),
]
CLIENTS, TOKENS = 6, 60
STARTING = 180  # seconds until a replica runs; Ray watches the load for half a minute before it starts one
QUESTIONS = [f"question {i}" for i in range(12)]


def deploy(**more) -> None:
    from ray import serve

    from specengine.server.ray import app

    replicas = {"min_replicas": 1, "max_replicas": 2, "target_streams": 1, "cpus": 0.5}
    model = {"model": str(chat_folder()), "drafter": "prompt_lookup", "device": "cpu"}
    serve.run(app({**model, **replicas, **more}), route_prefix="/")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with FileLock(tmp_path_factory.getbasetemp().parent / "ray.lock"):  # a cluster at a time, of all workers
        yield from cluster()


def cluster():
    import ray
    from ray import serve

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            deploy()
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def replicas() -> list[psutil.Process]:
    """Returns the replica processes that this process's Ray has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("ServeReplica:default:specengine" in word for word in process.cmdline()):
                found.append(process)
    return found


def two(**more) -> list[psutil.Process]:
    """Deploys two replicas and waits until both run."""
    deploy(min_replicas=2, **more)
    until(lambda: len(replicas()) == 2, STARTING)
    return replicas()


def body(question: str) -> dict:
    asked = [{"role": "user", "content": question}]
    return {"model": "tiny", "messages": asked, "max_tokens": TOKENS, "seed": 1, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=1, ignore_eos=True)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = plain_engine().generate(asked, params)
    return dict(zip(QUESTIONS, (output.text for output in outputs), strict=True))


class Clients:
    """Clients that send one question after the other until they are stopped, and retry broken streams."""

    def __init__(self, address: str, expected: dict[str, str]) -> None:
        self._address, self._expected = address, expected
        self._stop = threading.Event()
        self.answers = self.broken = 0

    def __enter__(self):
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._work = [self._pool.submit(self._run, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_):
        self._stop.set()
        for each in self._work:
            each.result(120)
        self._pool.shutdown()

    def _run(self, number: int) -> None:
        with openai.OpenAI(base_url=f"{self._address}/v1", api_key="unused", max_retries=8) as client:
            while not self._stop.is_set():
                question = QUESTIONS[number % len(QUESTIONS)]
                number += CLIENTS - 1
                for _ in range(5):
                    try:
                        text = self._listen(client, question)
                        break
                    except (openai.APIError, httpx.HTTPError):  # a stream broke; the client retries
                        self.broken += 1
                else:
                    raise AssertionError("a request was lost")
                assert text == self._expected[question]
                self.answers += 1

    def _listen(self, client: openai.OpenAI, question: str) -> str:
        text, end = "", None
        for chunk in client.chat.completions.create(**body(question), stream=True):
            text, end = text + (chunk.choices[0].delta.content or ""), chunk.choices[0].finish_reason
        if end is None:
            raise httpx.RemoteProtocolError("the stream has no end")
        return text


def test_load_brings_a_second_replica_and_both_say_what_the_engine_says(address, expected):
    assert len(replicas()) == 1
    with Clients(address, expected) as clients:
        until(lambda: len(replicas()) == 2, STARTING)
        answered = clients.answers
        until(lambda: clients.answers >= answered + 200)
    assert clients.broken == 0


def test_requests_of_one_session_meet_where_their_beginning_is_known(address):
    """One of five sessions may change its replica: a router that waits too long for an answer of one takes another."""
    long, met = "a long beginning that all have in common, " * 8, []
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused") as client:
        for session in ("one", "two", "three", "four", "five"):
            known = []
            for i in range(4):
                asked = body(f"{session} {long} {i}") | {"max_tokens": 2}
                answer = client.chat.completions.create(**asked, extra_headers={"x-session-id": session})
                known.append(answer.usage.prompt_tokens_details.cached_tokens)
            met.append(known)
    assert sum(not known[0] and all(known[1:]) for known in met) >= 4, met


def test_a_killed_replica_is_replaced_and_its_requests_are_answered_by_others(address, expected):
    before = {each.pid for each in two()}
    with Clients(address, expected) as clients:
        until(lambda: clients.answers >= 5)
        psutil.Process(min(before)).kill()
        answered = clients.answers
        until(lambda: clients.answers >= answered + 20)
        until(lambda: len({each.pid for each in replicas()} - {min(before)}) == 2, STARTING)


def test_an_update_replaces_replicas_one_by_one_and_loses_nothing(address, expected):
    before = {each.pid for each in two()}
    with Clients(address, expected) as clients:
        until(lambda: clients.answers >= 5)
        deploy(min_replicas=2, max_new_tokens=100)
        answered = clients.answers
        until(lambda: clients.answers >= answered + 10)
    assert clients.broken == 0
    assert len(replicas()) == 2 and before.isdisjoint(each.pid for each in replicas())
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="accepts at most 100"),
    ):
        client.chat.completions.create(**body("hello") | {"max_tokens": 101})


def test_a_replica_that_is_not_well_is_replaced(address, expected):
    sick = two(tensor_parallel=2)[0]
    (rank,) = ranks(sick.pid)
    with Clients(address, expected) as clients:
        until(lambda: clients.answers >= 5)
        rank.kill()
        until(lambda: len({each.pid for each in replicas()} - {sick.pid}) == 2, STARTING)
        answered = clients.answers
        until(lambda: clients.answers >= answered + 10)


def test_the_page_lists_the_arguments():
    from specengine.server.ray import Arguments

    *own, _ = Page(ROOT / "docs/replicas.md").rows("## Arguments")
    told = [name.strip("` ") for row in own for name in row[0].split(",")]
    assert told == list(Arguments.model_fields)


def test_the_page_s_configurations_are_in_order():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from specengine.server.ray import app

    files = [yaml.safe_load(each.code) for each in Page(ROOT / "docs/replicas.md").blocks if each.language == "yaml"]
    for file in files:
        inner = file.get("spec")
        config = ServeDeploySchema.model_validate(yaml.safe_load(inner["serveConfigV2"]) if inner else file)
        (application,) = config.applications
        assert application.import_path == "specengine.server.ray:app"
        app(application.args)
    assert len(files) == 2


def test_arguments_are_checked_before_anything_starts():
    from specengine.server.ray import app

    with pytest.raises(ValueError, match="unknown 'max_stream'"):
        app({"max_stream": 3})
    with pytest.raises(ValueError, match="min_replicas"):
        app({"min_replicas": 0})
    with pytest.raises(ValueError, match="max_streams"):
        app({"max_streams": "0"})
