"""What a shadow process imports: agents, calculators and tools that are known by their names."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

from tuneloop.runner import ShadowResult, ShadowRun, ShadowTools

#: The tools of an app whose module is this one, and what they did in this process.
TOOLS = ShadowTools()
done: list[str] = []


@TOOLS.tool(read_only=True)
def find(what: str) -> str:
    done.append(f"find {what}")
    return f"{what} in {os.getpid()}"


@TOOLS.tool
def buy(what: str) -> str:
    done.append(f"buy {what}")
    if what == "gone":
        raise LookupError(what)
    return f"bought {what}"


@TOOLS.tool(name="later", read_only=True)
async def find_later(what: str) -> str:
    done.append(f"later {what}")
    return f"later {what}"


#: What production and shadow runs share: its connections are of the event loop that it is first used in.
CLIENTS: list[httpx.AsyncClient] = []


@TOOLS.tool(read_only=True)
async def fetch(url: str) -> int:
    return (await CLIENTS[-1].post(url, json={})).status_code


def fetching(run: ShadowRun) -> Any:
    async def act(url: str) -> int:
        return int(await run.tools["fetch"](f"{url}/shadow"))

    return act


def fetching_without_a_loop(run: ShadowRun) -> Any:
    return lambda url: asyncio.run(fetching(run)(url))


def is_found(result: ShadowResult) -> bool:
    return bool(result.result == 200)


@TOOLS.tool(read_only=True)
async def find_slowly(what: str) -> str:
    await asyncio.sleep(0.1)
    return what


def giving_up(run: ShadowRun) -> Any:
    async def act(seconds: float) -> str:
        try:
            return str(await asyncio.wait_for(run.tools["find_slowly"]("tea"), seconds))
        except TimeoutError:
            return "none"

    return act


def reading_input(run: ShadowRun) -> Any:
    return lambda: (sys.stdin.read(), subprocess.run(["cat"], check=True, capture_output=True).stdout)


def where(run: ShadowRun) -> Any:
    """Says the process that it runs in."""
    return lambda *args: (os.getpid(), args)


def which_member(result: ShadowResult) -> float:
    return float(result.run.run_id)


def is_elsewhere(result: ShadowResult) -> bool:
    """Whether the run was in another process than what asked for it: (its process, …)."""
    return bool(result.result[0] != result.call.args[0] and result.result[1] == result.call.args)


def using_tools(run: ShadowRun) -> Any:
    """Calls tools each way: bound to the run, by their names in this module, in a thread of its own, in a loop."""

    async def act(kept: str) -> list[Any]:
        said: list[Any] = [run.tools["find"]("tea"), find("coffee"), run.tools.call("buy", {"what": kept}), buy("tea")]
        thread = threading.Thread(target=lambda: said.append(buy("milk")))
        thread.start()
        thread.join()
        said += [await run.tools["later"]("x"), await find_later("y"), run.tools["delete"]("z"), len(run.tools)]
        try:
            buy("gone")
        except LookupError as error:
            said.append(repr(error))
        return said

    return act


def says_all(result: ShadowResult) -> float:
    """Keeps what was said and called where the test finds it."""
    outcomes = [f"{each.name} {each.outcome}" for each in result.tool_calls]
    with open(os.environ["TUNELOOP_TEST_SAID"], "a") as file:
        file.write(repr((result.result, outcomes, find("judged"), buy("judged"))) + "\n")
    return 1.0


def raising(run: ShadowRun) -> Any:
    def act(*args: Any) -> None:
        raise LookupError("no such thing")

    return act


def killing(run: ShadowRun) -> Any:
    """Ends its process in the first call, and answers in those after."""

    def act(file: str) -> int:
        if not os.path.exists(file):
            open(file, "w").close()
            os._exit(7)
        return os.getpid()

    return act


def computing(run: ShadowRun) -> Any:
    def act(seconds: float) -> int:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            sum(range(100))
        return 1

    return act


def never(run: ShadowRun) -> Any:
    return lambda *args: time.sleep(1000)


def one(result: ShadowResult) -> float:
    return 1.0


class Unreadable:
    """Can be written, and not read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("only here")


class UnreadableCalculator(Unreadable):
    def __call__(self, result: ShadowResult) -> float:
        return 1.0
