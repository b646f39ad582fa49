"""What an app says of replies of its client library, run in that library's environment: `say.py URL MODEL KIND`.

Prints the id of each reply as its feedback named it.
"""

import asyncio
import sys
from functools import reduce
from operator import add
from typing import Any

from tuneloop.runner import Feedback, reply_id

ASKED = [{"role": "user", "content": "3+4="}]


def openai(url: str, model: str) -> list[Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = list(client.chat.completions.create(model=model, messages=ASKED, stream=True))
    return [
        client.chat.completions.create(model=model, messages=ASKED),
        stream[0],
        client.responses.create(model=model, input="3+4="),
    ]


def anthropic(url: str, model: str) -> list[Any]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    asked = {"model": model, "messages": ASKED, "max_tokens": 12}
    first = next(iter(client.messages.create(**asked, stream=True)))
    return [client.messages.create(**asked), first]


def langchain(url: str, model: str) -> list[Any]:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    of = {"base_url": f"{url}/v1", "api_key": "none", "model": model}
    chat = ChatOpenAI(**of)
    streams = reduce(add, ChatOpenAI(**of, include_response_headers=True).stream("3+4="))
    try:
        reply_id(reduce(add, chat.stream("3+4=")))
    except ValueError:
        pass
    else:
        raise AssertionError("LangChain keeps the id of a stream after all")
    return [chat.invoke("3+4="), streams, chat.generate([[HumanMessage("3+4=")]]).generations[0][0]]


def agentscope1(url: str, model: str) -> list[Any]:
    from agentscope.model import OpenAIChatModel

    chat = OpenAIChatModel(model, api_key="none", stream=False, client_kwargs={"base_url": f"{url}/v1"})
    return [asyncio.run(chat(ASKED))]


def litellm(url: str, model: str) -> list[Any]:
    import litellm

    return [litellm.completion(model=f"openai/{model}", messages=ASKED, base_url=f"{url}/v1", api_key="none")]


def main(url: str, model: str, kind: str) -> None:
    """Say it."""
    replies = {"openai": openai, "anthropic": anthropic, "langchain": langchain, "agentscope1": agentscope1}
    with Feedback(url) as feedback:
        for reply in (replies | {"litellm": litellm})[kind](url, model):
            feedback.thumbs_up(reply)
            print(reply_id(reply))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
