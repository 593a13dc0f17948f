"""Semantic Kernel 1.45: a chat service, an agent with a plugin, and its second turn."""

import asyncio
import sys
from typing import Annotated

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function


class Clock:
    @kernel_function(description="Tells the time of a city.")
    def time_of(self, city: Annotated[str, "the city"]) -> str:
        return "12:00"


async def main(base_url: str) -> None:
    service = OpenAIChatCompletion("smollm2-135m", async_client=AsyncOpenAI(base_url=base_url, api_key="none"))
    settings = OpenAIChatPromptExecutionSettings(max_tokens=24, temperature=0.0)
    for plugins in ([], [Clock()]):
        agent = ChatCompletionAgent(
            service=service,
            name="guide",
            instructions="Be short.",
            plugins=plugins,
            arguments=KernelArguments(settings),
        )
        thread = ChatHistoryAgentThread()
        for question in ("What time is it in Rome?", "And in Paris?"):
            response = await agent.get_response(question, thread=thread)
            assert response.message.name == "guide", response
        parts = [part async for part in agent.invoke_stream("Thank you.", thread=thread)]
        assert parts


asyncio.run(main(f"{sys.argv[1]}/v1"))
