"""Lists, compares, promotes, rolls back and pins the versions of a service."""

from collections.abc import Mapping
from typing import Any

import httpx

from tuneloop.runner.collection.figures import AB, ABTest
from tuneloop.runner.http_client import header_of_key
from tuneloop.runner.logs.request_logs import ask_service

_TIMEOUT_S = 30.0
_ROUNDING = 1e-9


class VersionsClient:
    """The admin API of a service: `url` is the service's, without /v1; `admin_key` is its `explorer.admin_key`.

    `by` names the person in each decision. Methods raise ServiceRefused with the service's message, `status` and
    `code`; none retries.
    """

    def __init__(self, url: str, admin_key: str, *, by: str | None = None) -> None:
        self._by = by
        self._admin = f"{url.rstrip('/')}/admin"
        self._url = f"{self._admin}/versions"
        self._client = httpx.Client(headers=header_of_key(admin_key, "admin_key"), timeout=_TIMEOUT_S)

    def list_versions(self) -> list[dict[str, Any]]:
        """All versions, newest first: version, state, pinned, replies, mean_reward and so on."""
        found: list[dict[str, Any]] = self._ask("GET", "")["data"]
        return found

    def show(self, version: int) -> dict[str, Any]:
        return self._ask("GET", f"/{version}")

    def events(self, version: int | None = None, *, last: int = 20) -> list[dict[str, Any]]:
        """Events of one version or of all, oldest first."""
        query = {"last": last} | ({} if version is None else {"version": version})
        found: list[dict[str, Any]] = self._ask("GET", "/events", params=query)["data"]
        return found

    def compare(self, a: int, b: int) -> dict[str, Any]:
        """Two versions side by side: `difference` is how much more `b` earned, with its `interval`."""
        return self._ask("GET", "/compare", params={"a": a, "b": b})

    def champion(self) -> int:
        return self._in_state("champion") or 0

    def canary(self) -> int | None:
        return self._in_state("canary")

    def canary_share(self, version: int | None = None) -> float | None:
        """The traffic share of a version's current or last canary, or None."""
        tried = self.canary() if version is None else version
        if tried is None:
            return None
        shares = [each["details"].get("share") for each in self.events(tried, last=1000)]
        return next((float(share) for share in reversed(shares) if share is not None), None)

    def promote(self, version: int, *, reason: str | None = None, expect: int | None = None) -> dict[str, Any]:
        """Make it the champion, older ones too. `expect` is the champion that you saw."""
        return self._decide(f"/{version}/promote", reason, expect)

    def roll_back(self, version: int | None = None, *, reason: str, expect: int | None = None) -> dict[str, Any]:
        """Never serve that version again; by default the canary, otherwise the champion."""
        return self._decide("/rollback" if version is None else f"/{version}/rollback", reason, expect)

    def reject(self, version: int, *, reason: str, expect: int | None = None) -> dict[str, Any]:
        """Never serve a candidate."""
        return self._decide(f"/{version}/reject", reason, expect)

    def pin(self, version: int, *, reason: str | None = None, expect: int | None = None) -> dict[str, Any]:
        """Make it the champion, and stop promotions and canaries."""
        return self._decide(f"/{version}/pin", reason, expect)

    def unpin(self, *, reason: str | None = None, expect: int | None = None) -> dict[str, Any]:
        """Allow promotions again."""
        return self._decide("/unpin", reason, expect)

    def list_policies(self) -> list[dict[str, Any]]:
        """All policies, oldest first: name, tenant, state, served, waiting, reward and so on."""
        found: list[dict[str, Any]] = ask_service(self._client, "GET", f"{self._admin}/policies")["data"]
        return found

    def create_policy(self, name: str, *, parent: int | str = 0, **more: Any) -> dict[str, Any]:
        """Create a policy from a version or from another policy's champion; `more` may have `tenant` and `options`."""
        draft = {"name": name, "parent": parent, **more}
        return ask_service(self._client, "POST", f"{self._admin}/policies", json=draft)

    def change_policy(self, name: str, action: str, **more: str) -> dict[str, Any]:
        """`pause`, `resume` or `delete` a policy, or `promote` its champion `into` another one."""
        return ask_service(self._client, "POST", f"{self._admin}/policies/{name}/{action}", json=more)

    def create_ab_test(
        self, version_a: int | str, version_b: int | str, *, traffic_ratio: Mapping[AB, float] | None = None
    ) -> ABTest:
        """A test of two versions or policies; `traffic_ratio` is such as {"a": 0.7, "b": 0.3}. Raises ValueError."""
        ratio = traffic_ratio or {"a": 0.5, "b": 0.5}
        if abs(sum(ratio.values()) - 1) > _ROUNDING or "b" not in ratio:
            raise ValueError(f"traffic_ratio: {dict(ratio)} must be shares of a and b that add up to 1")
        known = {each["name"] for each in self.list_policies()}
        for version in (version_a, version_b):
            if isinstance(version, int) and (name := f"version-{version}") not in known:
                self.create_policy(name, parent=version)
                self.change_policy(name, "pause")
        a, b = (each if isinstance(each, str) else f"version-{each}" for each in (version_a, version_b))
        return ABTest(model="", a=a, b=b, share_b=ratio["b"])

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "VersionsClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _in_state(self, state: str) -> int | None:
        return next((int(each["version"]) for each in self.list_versions() if each["state"] == state), None)

    def _decide(self, path: str, reason: str | None, expect: int | None) -> dict[str, Any]:
        decision = {"reason": reason, "expect": expect, "by": self._by}
        return self._ask("POST", path, json={name: value for name, value in decision.items() if value is not None})

    def _ask(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        return ask_service(self._client, method, self._url + path, **how)
