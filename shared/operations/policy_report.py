"""The policies, a line each, and what administrators do with them: for the command line, the admin API and the page."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from tuneloop.shared.errors import EnvironmentRefused, PolicyRefused, VersionRefused
from tuneloop.shared.experience import PolicyState, VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.ledger.versions.versions import Version
from tuneloop.shared.operations.version_report import require_version
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings

_READ = 500


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in the list. Times are seconds since 1970; `reward` is the newest replies' mean."""

    name: str
    tenant: str
    state: PolicyState
    parent: int
    served: int
    newest: int
    steps: int
    trained_on: int
    waiting: int
    reward: float | None
    interval: tuple[float, float] | None
    last_step_at: float | None
    options: dict[str, Any]


class PolicyDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that is to be made. `parent`: the number of a version, or the name of a policy, whose champion it is."""

    name: str
    tenant: str = ""
    parent: int | str = 0
    options: dict[str, Any] = {}


def list_policies(ledger: Ledger, tenant: str | None = None) -> list[PolicyRow]:
    return report_policies(ledger, ledger.policies.all(tenant))


def report_policies(ledger: Ledger, policies: Iterable[Policy]) -> list[PolicyRow]:
    lines: dict[int, list[Version]] = defaultdict(list)
    for version in ledger.versions.all():
        lines[version.policy].append(version)
    waiting = ledger.policies.waiting()
    return [_row(ledger, each, lines[each.id], waiting.get(each.id, 0)) for each in policies]


def _row(ledger: Ledger, policy: Policy, line: list[Version], waiting: int) -> PolicyRow:
    served = next(each.version for each in line if each.state is VersionState.CHAMPION)
    trained = [each for each in line if each.consumed]
    rewards = ledger.reward_history.newest(served, among=_READ)
    return PolicyRow(
        name=policy.name,
        tenant=policy.tenant,
        state=policy.state,
        parent=policy.parent,
        served=served,
        newest=line[-1].version,
        steps=line[-1].step,
        trained_on=sum(each.consumed for each in line),
        waiting=waiting,
        reward=rewards.mean if rewards.replies else None,
        interval=rewards.interval,
        last_step_at=trained[-1].created_at if trained else None,
        options=policy.settings,
    )


def create_policy(settings: Settings, ledger: Ledger, draft: PolicyDraft, *, by: str) -> Policy:
    """A new policy. Raises PolicyRefused, or VersionRefused for a parent that there is not."""
    require_adapters(settings)
    if draft.name in {settings.served_model_name, *settings.model.aliases}:
        raise PolicyRefused(f"{draft.name}: the model itself has this name")
    settings_of_policy(settings, draft.options)
    parent = draft.parent
    if isinstance(parent, str):
        parent = ledger.versions.of(ledger.policies.find(parent, draft.tenant or None).id).champion().version
    elif parent:
        require_version(ledger, parent)
    return ledger.policies.create(draft.name, tenant=draft.tenant, parent=parent, settings=draft.options, by=by)


def require_adapters(settings: Settings) -> None:
    """Raise PolicyRefused where all weights are trained: an engine has one set of these."""
    if not settings.model.lora.rank:
        raise PolicyRefused("all weights are trained, and an engine has one set of these: set model.lora.rank")


def make_configured(settings: Settings, ledger: Ledger) -> None:
    """Make the configured policies, and give them their options. Raises EnvironmentRefused."""
    there = {(one.tenant, one.name): one for one in ledger.policies.all()}
    for name, each in settings.policies.items():
        try:
            _make(settings, ledger, name, there.get((each.tenant, name)))
        except (PolicyRefused, VersionRefused) as error:
            raise EnvironmentRefused(f"policies.{name}: {error}") from None


def _make(settings: Settings, ledger: Ledger, name: str, policy: Policy | None) -> None:
    wanted = settings.policies[name]
    if policy is None:
        draft = PolicyDraft(name=name, tenant=wanted.tenant, parent=wanted.parent, options=wanted.options)
        create_policy(settings, ledger, draft, by="settings")
        return
    settings_of_policy(settings, wanted.options)
    if isinstance(wanted.parent, int) and wanted.parent != policy.parent:
        raise PolicyRefused(f"it began with version {policy.parent}; keep that parent, or give it another name")
    if wanted.options != policy.settings:
        ledger.policies.set_options(policy.id, wanted.options)
