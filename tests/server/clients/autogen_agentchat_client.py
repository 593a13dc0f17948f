"""AutoGen 0.7: an agent with a tool, and a team of two, whose messages carry names."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(base_url: str) -> None:
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
        "structured_output": True,
    }
    client = OpenAIChatCompletionClient(
        model="smollm2-135m", base_url=base_url, api_key="none", model_info=info, max_tokens=24, temperature=0.0
    )
    alone = AssistantAgent("calculator", client, tools=[add])
    result = await alone.run(task="What is 2 and 3?")
    assert result.messages[-1].source == "calculator", result
    first, second = (AssistantAgent(name, client, system_message=f"You are {name}.") for name in ("ada", "bob"))
    team = RoundRobinGroupChat([first, second], termination_condition=MaxMessageTermination(4))
    result = await team.run(task="Say hello.")
    assert [message.source for message in result.messages] == ["user", "ada", "bob", "ada"], result
    streamed = [event async for event in AssistantAgent("eve", client, model_client_stream=True).run_stream(task="Hi")]
    assert streamed[-1].messages[-1].content
    await client.close()


asyncio.run(main(f"{sys.argv[1]}/v1"))
