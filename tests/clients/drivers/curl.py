"""curl, called as from a shell."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve import ASKED, HURRY_S, TOOLS, refusal, serve

#: What reads a stream, and goes when it has seen enough.
READERS = {"end": "cat", "done": r"sed '/\[DONE\]/q'", "middle": 'sed \'/"content":"[^"]/q\''}


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._asked = {"model": model, "messages": ASKED, "max_tokens": 12}

    def _curl(self, *options: str, **but: Any) -> list[str]:
        json_ = ["-H", "Content-Type: application/json", "-d", json.dumps(self._asked | but)]
        return ["curl", "-sS", self._url, *json_, *options]

    def _ask(self, **but: Any) -> Any:
        # With --fail-with-body, curl 7 would print every error before the reply.
        done = subprocess.run(self._curl("--fail", "--retry", "5", **but), capture_output=True, check=True)
        return json.loads(done.stdout)

    def whole(self) -> dict[str, Any]:
        reply = self._ask()
        return {"id": reply["id"], "text": reply["choices"][0]["message"]["content"]}

    def streamed(self) -> dict[str, Any]:
        pieces = self._pieces("end")
        return {"id": pieces[-1]["id"], "text": "".join(_delta(each).get("content") or "" for each in pieces)}

    def called(self) -> dict[str, Any]:
        reply = self._ask(tools=TOOLS)
        [call] = reply["choices"][0]["message"]["tool_calls"]
        return {"id": reply["id"], **call["function"]}

    def called_in_stream(self) -> dict[str, Any]:
        pieces = self._pieces("end", tools=TOOLS)
        functions = [call["function"] for each in pieces for call in _delta(each).get("tool_calls") or ()]
        said = {key: "".join(each.get(key) or "" for each in functions) for key in ("name", "arguments")}
        return {"id": pieces[-1]["id"], **said}

    def unknown_model(self) -> dict[str, Any]:
        try:
            told = ("--fail-with-body", "-w", "%{stderr}%header{x-request-id}")
            subprocess.run(self._curl(*told, model="nope"), capture_output=True, check=True)
        except subprocess.CalledProcessError as error:
            request_id = error.stderr.decode().split()[-1]
            return refusal(error, request_id) | {"message": json.loads(error.stdout)["error"]["message"]}
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        done = subprocess.run(self._curl("--max-time", str(HURRY_S)), capture_output=True, check=False)
        return {"kind": f"exit {done.returncode}"}

    def streams(self, count: int, until: str) -> list[str]:
        with ThreadPoolExecutor(4) as pool:
            return [pieces[-1]["id"] for pieces in pool.map(self._pieces, [until] * count)]

    def _pieces(self, until: str, **but: Any) -> list[Any]:
        """What is read of a stream. When the reader has gone, curl ends at the next that it hears."""
        command = self._curl("-N", **but, stream=True)
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as curl,
            subprocess.Popen(READERS[until], shell=True, stdin=curl.stdout, stdout=subprocess.PIPE) as reader,
        ):
            curl.stdout.close()
            said = reader.communicate()[0].decode()
            curl.terminate()
        return [json.loads(line[6:]) for line in said.splitlines() if line and line != "data: [DONE]"]


def _delta(piece: dict[str, Any]) -> dict[str, Any]:
    return piece["choices"][0]["delta"]


serve(Client(*sys.argv[1:]))
