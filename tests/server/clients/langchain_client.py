"""LangChain 1.5 (langchain-openai 1.7): named agents with tools, structured answers, an overflow that is recognised."""

import sys

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    population: int


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return "sunny"


base_url = f"{sys.argv[1]}/v1"
model = ChatOpenAI(model="smollm2-135m", base_url=base_url, api_key="none", max_tokens=40, temperature=0.0)
agent = create_agent(model, [weather], name="guide", system_prompt="Be short.")
state = agent.invoke({"messages": [HumanMessage("What is the weather in Rome?", name="ada")]})
again = agent.invoke({"messages": [*state["messages"], HumanMessage("And in Paris?", name="ada")]})
assert again["messages"][-1].content or again["messages"][-1].tool_calls, again
for method in ("json_schema", "function_calling"):
    found = model.bind(max_tokens=200).with_structured_output(City, method=method).invoke("Rome has 2800000 people.")
    assert isinstance(found, City), found
call = model.bind_tools([weather], tool_choice="weather").invoke("Weather in Rome?").tool_calls
assert call[0]["name"] == "weather" and set(call[0]["args"]) == {"city"}, call
assert "".join(part.text for part in model.stream("Say hello."))
try:
    model.invoke("word " * 20000)
    raise SystemExit("an overflow went through")
except Exception as error:
    assert type(error).__name__ == "OpenAIContextOverflowError", (type(error), error)
