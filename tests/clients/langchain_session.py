"""What an application does with LangChain's client; runs in LangChain's environment, prints its findings as JSON."""

import asyncio
import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city and the country that it lies in."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


@tool
def weather(city: str) -> str:
    """Say the weather of a city."""
    return f"sunny in {city}"


async def several(chat: ChatOpenAI) -> dict[str, object]:
    answers = await asyncio.gather(*(chat.ainvoke(QUESTION) for _ in range(4)))
    streamed = "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)])
    return {"async": [answer.content for answer in answers], "async_stream": streamed}


def main() -> None:
    url, model = sys.argv[1:]
    options = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "temperature": 0.0, "timeout": 120}
    chat = ChatOpenAI(**options, max_tokens=16, stream_usage=True)
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    chunks = list(chat.stream(QUESTION))
    found: dict[str, object] = {
        "invoke": answer.content,
        "usage": answer.usage_metadata,
        "model": answer.response_metadata["model_name"],
        "plain": chat.invoke(QUESTION).content,
        "stream": "".join(str(chunk.content) for chunk in chunks),
        "num_chunks": len(chunks),
        "stream_usage": next(chunk.usage_metadata for chunk in chunks if chunk.usage_metadata),
        "batch": [message.content for message in chat.batch([QUESTION, QUESTION])],
        "completion": OpenAI(**options, max_tokens=8).invoke("Once upon a time"),
    }
    found |= asyncio.run(several(chat))
    longer = ChatOpenAI(**options, max_tokens=96)
    for method in ("json_schema", "function_calling"):
        city = longer.with_structured_output(City, method=method).invoke("Name a city and its country.")
        found[method] = city.model_dump()
    calling = longer.bind_tools([weather], tool_choice="weather")
    call = calling.invoke("What is the weather in Paris?")
    assert isinstance(call, AIMessage)
    found["tool"] = call.tool_calls[0]["name"]
    result = ToolMessage(weather.invoke(call.tool_calls[0]["args"]), tool_call_id=call.tool_calls[0]["id"])
    found["after_tool"] = longer.invoke([HumanMessage("What is the weather in Paris?"), call, result]).content
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
