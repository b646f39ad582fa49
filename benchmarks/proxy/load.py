"""What the proxies' benchmark is made of: an upstream that replays vLLM, a load, and what they cost in processes.

The bytes in `recorded/` are those of a real vLLM 0.32: a prompt of 1 000 tokens, 64 sampled ones, whole and streamed,
as a client asks for them and with the token ids and log-probabilities that recorders ask for. The replies of 512 tokens
are made of these: the same tokens, eight times over.
"""

import ctypes
import json
import os
import signal
import subprocess
import time
import urllib.request
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 1000
SHORT, LONG = 64, 512

_HERE = Path(__file__).parent
_RECORDED = _HERE / "recorded"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1
_READY_S = 120.0


def built(folder: Path, *, captured: bool = False, packed: bool = False, compiled: bool = False) -> None:
    """Compile the upstream and the load into the folder, unless they lie there `compiled`, and lay the tapes there.

    `captured` lets the upstream tell token ids and log-probabilities to all, asked or not; `packed` lets it tell these
    as an engine with our plugin does.
    """
    for name in () if compiled else ("replay", "load"):
        subprocess.run(["cc", "-O2", "-o", str(folder / name), str(_HERE / f"{name}.c")], check=True)
    for capture in ("plain", "captured"):
        recorded = "captured" if captured else capture
        whole = (_RECORDED / f"whole_{recorded}.json").read_bytes()
        stream = (_RECORDED / f"stream_{recorded}.sse").read_bytes()
        if packed:
            whole = _pack_logprobs(whole)
            stream = b"\n\n".join(
                b"data: " + _pack_logprobs(event[6:]) if event[6:].startswith(b"{") else event
                for event in stream.split(b"\n\n")
            )
        (folder / f"whole_{capture}_{SHORT}").write_bytes(whole)
        (folder / f"stream_{capture}_{SHORT}").write_bytes(stream)
        (folder / f"whole_{capture}_{LONG}").write_bytes(_longer_whole(whole))
        (folder / f"stream_{capture}_{LONG}").write_bytes(_longer_stream(stream))


def _pack_logprobs(reply: bytes) -> bytes:
    """A reply, or a piece of one, with its log-probabilities as one string."""
    parsed = json.loads(reply)
    for choice in parsed["choices"]:
        if told := choice.get("logprobs"):
            numbers = array("f", [each["logprob"] for each in told["content"]])
            choice["logprobs"] = {"content": None, "packed": b64encode(numbers.tobytes()).decode()}
    return json.dumps(parsed, separators=(",", ":"), ensure_ascii=False).encode()


def _longer_whole(whole: bytes) -> bytes:
    times = LONG // SHORT
    reply = json.loads(whole)
    choice = reply["choices"][0]
    choice["message"]["content"] *= times
    if choice["token_ids"]:
        choice["token_ids"] *= times
        told = choice["logprobs"]
        if "packed" in told:
            told["packed"] = b64encode(b64decode(told["packed"]) * times).decode()
        else:
            told["content"] *= times
    reply["usage"] |= {"completion_tokens": LONG, "total_tokens": PROMPT_TOKENS + LONG}
    return json.dumps(reply, separators=(",", ":"), ensure_ascii=False).encode()


def _longer_stream(stream: bytes) -> bytes:
    first, *tokens, last, usage, done, _ = stream.split(b"\n\n")
    many = (tokens * (LONG // len(tokens) + 1))[: LONG - 1]
    usage = usage.replace(b'"completion_tokens":64', b'"completion_tokens":512').replace(b"1064", b"1512")
    return b"".join(event + b"\n\n" for event in (first, *many, last, usage, done))


def request_body(folder: Path, *, model: str, tokens: int, stream: bool) -> Path:
    """The file with a chat request whose prompt has about 1 000 tokens, as clients send it."""
    prose = " ".join((_HERE.parents[1] / "docs" / "architecture.md").read_text().split())
    said = prose[: 4 * PROMPT_TOKENS]
    cut = len(said) // 4
    messages = [{"role": "system", "content": said[:cut]}, {"role": "user", "content": said[cut:]}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 1, "stream": stream}
    path = folder / f"body_{model.replace('/', '_').replace(':', '_')}_{tokens}_{'stream' if stream else 'whole'}.json"
    path.write_text(json.dumps(body))
    return path


def _end_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[int]:
    """The process id of a process group of its own, which is ended afterwards, and at the latest when we end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_end_with_us,
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(url: str, pid: int, log: Path) -> None:
    """Return when the URL answers 200. Raises RuntimeError with the end of the log if the process ends before."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if _state(pid) in {"Z", ""}:
            break
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{url} does not answer: {log.read_text()[-2000:]}")


def wait_for_file(path: Path, pid: int, log: Path) -> str:
    """What the process writes into the file when it is up. Raises RuntimeError if it ends before."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and _state(pid) not in {"Z", ""}:
        if path.exists() and (said := path.read_text()):
            return said
        time.sleep(0.2)
    raise RuntimeError(f"{path} has not come: {log.read_text()[-2000:]}")


def load(folder: Path, port: int, body: Path, path: str, arguments: Sequence[object]) -> dict[str, Any]:
    """Run the load to its end; what it says then."""
    lines = list(reports(folder, port, body, path, arguments))
    return lines[-1]


def loads(count: int, *load_of: Any) -> dict[str, Any]:
    """Run so many loads at once; what they counted in all, without times of requests."""
    with ThreadPoolExecutor(count) as pool:
        said = list(pool.map(lambda _: load(*load_of), range(count)))
    counted = {name: sum(each[name] for each in said) for name in ("requests", "failed", "events", "ended")}
    return counted | {"seconds": max(each["seconds"] for each in said)}


def reports(folder: Path, port: int, body: Path, path: str, arguments: Sequence[object]) -> Iterator[dict[str, Any]]:
    """Run the load, and yield each of its reports; the last one covers all."""
    command = [str(folder / "load"), "-p", str(port), "-b", str(body), "-u", path, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_end_with_us) as process:
        if process.stdout is None:
            raise RuntimeError("the load has no output")
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _tree(pids: Sequence[int]) -> list[list[str]]:
    """The /proc entries of these processes and their descendants."""
    found: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        found[int(entry)] = fields
        children.setdefault(int(fields[1]), []).append(int(entry))
    waiting, tree = list(pids), []
    while waiting:
        pid = waiting.pop()
        if pid in found:
            tree.append(found[pid])
            waiting += children.get(pid, [])
    return tree


def cpu_s(pids: Sequence[int]) -> float:
    """User and system time of the processes and their descendants, those that have ended included."""
    return sum(sum(map(int, fields[11:15])) for fields in _tree(pids)) / _TICKS_PER_S


def rss_mb(pids: Sequence[int]) -> float:
    """Resident memory of the processes and their descendants, in MB; shared pages count for each."""
    return sum(int(fields[21]) for fields in _tree(pids)) * _PAGE / 1e6
