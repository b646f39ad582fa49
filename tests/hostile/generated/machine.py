"""Clients who chat, leave, judge, commit, list, read, continue and delete in any order: a state machine."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.doubles.engine import CHAT, MODEL
from tests.hostile.generated.traffic import MESSAGES, RESPONSES, TEXT, Path, Reply, Traffic

_PATHS: tuple[Path, ...] = (CHAT, TEXT, RESPONSES, MESSAGES)
_paths = st.sampled_from(_PATHS)
_kinds = st.tuples(_paths, st.booleans())
_values = st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0])
_sources = st.sampled_from(["", "ann", "bob"])
_index = st.integers(0, 1 << 16)
_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_tasks = (f"task-{number}" for number in itertools.count())


class Clients(RuleBasedStateMachine):
    """One task's clients. What they have been told is compared with the database when they are done.

    Where there are keys, all clients of a task bring one of them, and others' holders look for their replies.
    """

    traffic: ClassVar[Traffic]
    keys: ClassVar[Sequence[str]] = ()
    _begun = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        if self.keys:
            self.traffic.bearer = self.keys[next(self._begun) % len(self.keys)]
        self.replies: list[Reply] = []
        self.task_id, self.run_id = next(_tasks), "0"

    @property
    def labels(self) -> tuple[str, str]:
        return self.task_id, self.run_id

    def living(self, *paths: Path) -> list[Reply]:
        return [each for each in self.replies if not each.deleted and each.path in (paths or _PATHS)]

    def one(self, index: int, *paths: Path) -> Reply | None:
        found = self.living(*paths)
        return found[index % len(found)] if found else None

    @initialize(path=_paths)
    def begin(self, path: Path) -> None:
        self.replies.append(self.traffic.ask(path, stream=False, labels=self.labels))

    @rule(path=_paths, stream=st.booleans())
    def ask(self, path: Path, stream: bool) -> None:
        self.replies.append(self.traffic.ask(path, stream=stream, labels=self.labels))

    @rule(kinds=st.lists(_kinds, min_size=2, max_size=8))
    def ask_at_once(self, kinds: list[tuple[Path, bool]]) -> None:
        self.replies += self.traffic.ask_at_once(kinds, self.labels)

    @rule(paths=st.lists(_paths, min_size=1, max_size=6), times=st.integers(1, 10))
    def pipeline(self, paths: list[Path], times: int) -> None:
        self.replies += self.traffic.pipeline(paths * times, self.labels)

    @rule(path=_paths, after_bytes=st.integers(0, 3000), reset=st.booleans())
    def leave(self, path: Path, after_bytes: int, reset: bool) -> None:
        self.traffic.leave(path, after_bytes=after_bytes, reset=reset, labels=self.labels)

    @rule(index=_index, stream=st.booleans())
    def go_on(self, index: int, stream: bool) -> None:
        if (before := self.one(index, RESPONSES)) and len(before.names) < 10:
            self.replies.append(self.traffic.ask(RESPONSES, stream=stream, after=before, labels=self.labels))

    @rule(index=_index, value=_values, source=_sources, boolean=st.booleans())
    def judge(self, index: int, value: float, source: str, boolean: bool) -> None:
        if (reply := self.one(index)) is None:
            return
        said: Any = value > 0 if boolean else value
        worth = float(said)
        body = {"msg_ids": [reply.msg_id], "value": said} | ({"source": source} if source else {})
        answer = self.traffic.send("POST", "/feedback", json=body)
        assert answer.status_code == 200, answer.text
        again = reply.rewards.get(source) == (boolean, worth)
        outcome = answer.json()["outcomes"][reply.msg_id]
        assert outcome in ({"duplicate", "pending"} if again else {"accepted", "pending"}), (body, answer.text)
        reply.events += not again
        reply.rewards[source] = (boolean, worth)

    @rule(count=st.integers(1, 5), value=_values)
    def judge_several(self, count: int, value: float) -> None:
        replies = self.living()[-count:]
        if not replies:
            return
        entries = [{"msg_ids": [each.msg_id], "reward": value, "source": "list"} for each in replies]
        answer = self.traffic.send("POST", "/feedback", json={"feedback": entries})
        assert answer.status_code == 200, answer.text
        for each in replies:
            each.events += each.rewards.get("list") != (False, value)
            each.rewards["list"] = (False, value)

    @rule(index=_index, comment=st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=20))
    def remark(self, index: int, comment: str) -> None:
        if reply := self.one(index):
            body = {"msg_ids": [reply.msg_id, "unknown"], "comment": comment, "idempotency_key": f"{comment}-{index}"}
            answer = self.traffic.send("POST", "/feedback", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["outcomes"]["unknown"] == "unknown"

    @rule(ids=st.lists(st.text(max_size=30), min_size=1, max_size=3))
    def judge_nothing(self, ids: list[str]) -> None:
        assert self.traffic.send("POST", "/feedback", json={"msg_ids": ids, "reward": 1}).status_code in {400, 404}

    @rule(all_of_it=st.booleans())
    def commit(self, all_of_it: bool) -> None:
        answer = self.traffic.send("POST", "/commit", json={} if all_of_it else {"task_id": self.task_id})
        assert answer.status_code in {200, 503}

    @rule(order=st.sampled_from(["asc", "desc"]), limit=st.integers(1, 100))
    def list(self, order: str, limit: int) -> None:
        query = {"metadata[tuneloop_task_id]": self.task_id, "order": order, "limit": limit}
        answer = self.traffic.send("GET", CHAT, params=query)
        assert answer.status_code == 200, answer.text
        known = {each.msg_id: each for each in self.replies if each.path == CHAT}
        for each in answer.json()["data"]:
            if (reply := known.get(each["id"])) is not None:  # others' clients have left
                assert not reply.deleted
                assert text_of_stored(each) == reply.text
        if limit == 100 and not answer.json()["has_more"]:
            listed = {each["id"] for each in answer.json()["data"]}
            assert {each.msg_id for each in self.living(CHAT)} <= listed

    @rule(index=_index)
    def read(self, index: int) -> None:
        if reply := self.one(index, CHAT, RESPONSES):
            answer = self.traffic.send("GET", f"{reply.path}/{reply.msg_id}")
            assert answer.status_code == 200, answer.text
            assert reply.text in answer.text

    @rule(index=_index)
    def read_what_is_deleted(self, index: int) -> None:
        if gone := [each for each in self.replies if each.deleted]:
            assert self.traffic.send("GET", f"{CHAT}/{gone[index % len(gone)].msg_id}").status_code == 404

    @rule(index=_index, value=st.text(max_size=20))
    def change_metadata(self, index: int, value: str) -> None:
        if reply := self.one(index, CHAT):
            pairs = {"tuneloop_task_id": self.task_id, "note": value}
            answer = self.traffic.send("POST", f"{CHAT}/{reply.msg_id}", json={"metadata": pairs})
            assert answer.status_code in {200, 400}, answer.text

    @rule(index=_index)
    def delete(self, index: int) -> None:
        if reply := self.one(index, CHAT):
            assert self.traffic.send("DELETE", f"{CHAT}/{reply.msg_id}").status_code == 200
            reply.deleted = True

    @rule(
        call=st.sampled_from(
            [
                ("GET", "/admin/versions", {}),
                ("GET", "/admin/versions/0", {}),
                ("GET", "/admin/versions/events", {}),
                ("GET", "/admin/versions/77", {}),
                ("POST", "/admin/versions/0/pin", {"reason": "a test"}),
                ("POST", "/admin/versions/unpin", {"reason": "a test"}),
                ("POST", "/admin/versions/rollback", {"reason": "a test"}),
                ("POST", "/admin/versions/0/reject", {"reason": "a test"}),
            ]
        ),
        key=st.booleans(),
    )
    def administrate(self, call: tuple[str, str, dict[str, str]], key: bool) -> None:
        method, path, body = call
        answer = self.traffic.send(method, path, admin=key, **({"json": body} if method == "POST" else {}))
        assert answer.status_code in ({200, 400, 404, 409} if key else {401, 403})

    @rule(path=st.sampled_from(["/health", "/health/ready", "/v1/models", "/metrics", "/training", "/ping"]))
    def look(self, path: str) -> None:
        assert self.traffic.send("GET", path).status_code == (403 if self.keys and path == "/metrics" else 200)

    @precondition(lambda self: self.keys)
    @rule(index=_index, how=st.sampled_from(["read", "judge", "delete", "change", "go on", "list", "commit"]))
    def intrude(self, index: int, how: str) -> None:
        """Another tenant's client finds nothing of a reply, whatever it does, and changes nothing."""
        if (reply := self.one(index, CHAT, RESPONSES)) is None:
            return
        path, own = f"{reply.path}/{reply.msg_id}", self.traffic.bearer
        rated = {"msg_ids": [reply.msg_id], "reward": -1.0}
        continued = {"model": MODEL, "input": "go on", "previous_response_id": reply.msg_id}
        calls: dict[str, tuple[str, str, dict[str, Any]]] = {
            "read": ("GET", path, {}),
            "judge": ("POST", "/feedback", {"json": rated}),
            "delete": ("DELETE", f"{CHAT}/{reply.msg_id}", {}),
            "change": ("POST", f"{CHAT}/{reply.msg_id}", {"json": {"metadata": {"note": "another's"}}}),
            "go on": ("POST", RESPONSES, {"json": continued}),
            "list": ("GET", CHAT, {"params": {"metadata[tuneloop_task_id]": self.task_id}}),
            "commit": ("POST", "/commit", {"json": {"task_id": self.task_id}}),
        }
        method, path, what = calls[how]
        self.traffic.bearer = next(each for each in self.keys if each != own)
        try:
            answer = self.traffic.send(method, path, **what)
        finally:
            self.traffic.bearer = own
        if how in {"list", "commit"}:
            assert answer.status_code in {200, 503}, answer.text
            assert answer.status_code == 503 or (not answer.json().get("data") and not answer.json().get("committed"))
        else:
            assert answer.status_code == 404, (how, answer.text)
        assert reply.text not in answer.text

    @rule(text=st.text(max_size=20))
    def tokenize(self, text: str) -> None:
        answer = self.traffic.send("POST", "/tokenize", json={"model": MODEL, "prompt": text})
        assert answer.json()["count"] == len(text.encode())

    @rule(path=st.sampled_from([*_PATHS, "/feedback", "/commit", "/tokenize"]), body=_junk)
    def send_junk(self, path: str, body: Any) -> None:
        if path == "/commit" and (body is None or isinstance(body, dict)):
            return  # that may be a commit
        self.traffic.send("POST", path, json=body)

    @precondition(lambda self: len(self.replies) > 200)
    @invariant()
    def forget(self) -> None:
        """Keep an example from growing for ever."""
        self.check()
        self.replies.clear()

    def teardown(self) -> None:
        self.check()

    def check(self) -> None:
        """Compare what clients were told with what the database has."""
        while self.traffic.send("POST", "/commit", json={"task_id": self.task_id}).status_code != 200:
            pass
        bed = self.traffic.bed
        where = "msg_id IN (" + ",".join(f"'{each.msg_id}'" for each in self.replies) + ")"
        rows = bed.rows(f"SELECT msg_id, reward, state FROM experiences WHERE {where}")
        found = {row[0]: row for row in rows}
        assert Counter(row[0] for row in rows) == Counter(each.msg_id for each in self.living())
        assert sorted(row[0] for row in bed.rows(f"SELECT msg_id FROM exchanges WHERE {where}")) == sorted(found)
        counted = f"SELECT msg_id, count(*) FROM feedback WHERE {where} AND metric = 'reward' GROUP BY msg_id"
        events = dict(tuple(row) for row in bed.rows(counted))
        for each in self.living():
            values = [worth for _, worth in each.rewards.values()]
            reward, state = found[each.msg_id][1:]
            assert state == ("committed" if values else "recorded"), each
            assert min(values) <= reward <= max(values) if values else reward is None, each
            assert events.get(each.msg_id, 0) == each.events, each


def text_of_stored(stored: dict[str, Any]) -> str:
    return str(stored["choices"][0]["message"]["content"])
