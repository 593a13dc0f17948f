"""Strands 1.62: an agent without tools, one with a tool, a structured answer."""

import contextlib
import sys

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException


class City(BaseModel):
    name: str
    population: int


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return "sunny"


model = OpenAIModel(
    client_args={"base_url": f"{sys.argv[1]}/v1", "api_key": "none"},
    model_id="smollm2-135m",
    params={"max_tokens": 200, "temperature": 0.0},
)
answer = Agent(model=model, callback_handler=None)("Say hello.")
assert answer.message["content"][0]["text"], answer
agent = Agent(model=model, tools=[weather], callback_handler=None)
with contextlib.suppress(MaxTokensReachedException):  # of a small model that repeats itself
    agent("What is the weather in Rome?")
assert agent.messages[-1]["content"], agent.messages
found = Agent(model=model, callback_handler=None).structured_output(City, "Rome has 2800000 people.")
assert isinstance(found, City), found
