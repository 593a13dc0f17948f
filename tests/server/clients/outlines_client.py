"""outlines 1.3: JSON, choices, regexes and grammars, as it asks vLLM and SGLang for them."""

import re
import sys
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=10**8)


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
for make, grammar in (
    (outlines.from_vllm, 'start: "in " /[0-9]{4}/'),
    (outlines.from_sglang, 'root ::= "in " [0-9]{4}'),
):
    model = make(client, "smollm2-135m")
    options = {"max_tokens": 60, "temperature": 0}
    assert City.model_validate_json(model("Describe Paris.", City, **options))
    assert model("Is water wet?", Literal["yes", "no"], **options) in ("yes", "no")
    assert re.fullmatch("in [0-9]{4}", model("When did the war end?", Regex("in [0-9]{4}"), **options))
    assert re.fullmatch("in [0-9]{4}", model("When did the war end?", CFG(grammar), **options))
    assert int(model("How old is the universe?", int, **options)) is not None
    assert "".join(model.stream("Is water wet?", Literal["yes", "no"], **options)) in ("yes", "no")
    assert model("Name a city.", **options)
