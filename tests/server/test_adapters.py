"""Adapters over HTTP: each is a model of its own name."""

import openai
import pytest

from specengine import Engine, SamplingParams
from specengine.server.settings import Settings
from tests.adapters.files import write_adapter
from tests.server.servers import ASK, HELLO, SETTINGS, chat, chat_model, served


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("adapters"), chat_model().config
    return {name: str(write_adapter(folder / name, config, seed=seed)) for seed, name in enumerate(("legal", "medic"))}


def said(adapters, name):
    params = SamplingParams(max_new_tokens=5, adapter=name)
    return Engine(chat_model(), drafter="none", adapters=adapters).generate(HELLO, params).text


def test_an_adapter_is_listed_and_chosen_by_its_name(adapters):
    with served(adapters=adapters) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        models = {model.id: model for model in client.models.list().data}
        assert list(models) == ["tiny", "legal", "medic"]
        assert models["legal"].parent == "tiny" and not hasattr(models["tiny"], "parent")
        assert client.models.retrieve("medic").id == "medic"
        texts = {}
        for name in models:
            own = None if name == "tiny" else name
            answer = client.chat.completions.create(model=name, messages=HELLO, max_tokens=5, temperature=0)
            texts[name] = answer.choices[0].message.content
            assert answer.model == name and texts[name] == said(adapters, own)
            stream = client.chat.completions.create(
                model=name, messages=HELLO, max_tokens=5, temperature=0, stream=True
            )
            chunks = list(stream)
            assert {chunk.model for chunk in chunks} == {name}
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == texts[name]
            plain = {"speculation": {"off": True}}  # another engine with the same adapters
            again = client.chat.completions.create(
                model=name, messages=HELLO, max_tokens=5, temperature=0, extra_body=plain
            )
            assert again.choices[0].message.content == texts[name]
        assert len(set(texts.values())) == 3
        refused = chat(address, {**ASK, "model": "lega"})
        assert refused.status_code == 404 and "'tiny', 'legal', 'medic'" in refused.json()["error"]["message"]


def test_faulty_adapters_stop_the_server_at_its_start(adapters, tmp_path):
    with pytest.raises(ValueError, match=r"^adapters: 'tiny' is the name of the model itself"):
        Settings(**SETTINGS, adapters={"tiny": adapters["legal"]})
    with (
        pytest.raises(FileNotFoundError, match=r"^adapters: x: .*adapter_config.json"),
        served(adapters={"x": str(tmp_path)}),
    ):
        pass
