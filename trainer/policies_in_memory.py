"""The policies that a trainer has in memory, on one base model below their adapters."""

from pathlib import Path

import structlog
from transformers import PreTrainedModel

from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import EnvironmentRefused, LedgerError, PolicyRefused, SettingsError, TuneloopError
from tuneloop.shared.experience import PolicyState
from tuneloop.shared.ledger.ledger import Alarm, Ledger, Version
from tuneloop.shared.ledger.policies import DEFAULT, Policy
from tuneloop.shared.operations.diagnosis import Code
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints.resumption import find_state, require_weights
from tuneloop.trainer.policy_training import PolicyTraining, SharedParts

_log = structlog.get_logger()

#: So many policies are in memory at a time: of each an adapter of actor and critic, with their optimizers.
_MOST = 8


class PoliciesInMemory:
    """Those that trained last; the one that trains is the last of them.

    Of another, all that it has learnt is in its newest version, from which it goes on when its turn comes. A policy
    that cannot be trained is paused with an alarm, and the default policy trains.
    """

    def __init__(self, parts: SharedParts) -> None:
        self._parts, self._settings, self._ledger = parts, parts.settings, parts.ledger
        #: The base model below adapters, which policies share; None where all weights are trained.
        self._base: PreTrainedModel | None = None
        #: Policies in memory by their numbers, the one that trained last behind the others.
        self._in_memory: dict[int, PolicyTraining] = {}
        #: What each policy's settings are made of, and they.
        self._chosen: dict[int, tuple[Policy, Settings]] = {}
        self.enter(self._ledger.policies.get(DEFAULT))

    @property
    def now(self) -> PolicyTraining:
        """The one that trains."""
        return next(reversed(self._in_memory.values()))

    def all(self) -> list[PolicyTraining]:
        """Those in memory, the one that trains last."""
        return list(self._in_memory.values())

    @property
    def largest_batch(self) -> int:
        """The rows of the largest batch of a policy, as far as their settings are known."""
        sizes = [own.buffer.train_batch_size for _, own in self._chosen.values()]
        return max(self._settings.buffer.train_batch_size, *sizes, 0)

    def settings_of(self, policy: Policy) -> Settings | None:
        """A policy's settings; None if they are refused, and then it is paused."""
        if policy.id == DEFAULT:
            return self._settings
        known = self._chosen.get(policy.id)
        if known is None or known[0].settings != policy.settings:
            try:
                known = self._chosen[policy.id] = policy, settings_of_policy(self._settings, policy.settings)
            except PolicyRefused as error:
                self._refuse(policy, error)
                return None
        return known[1]

    def has_steps_left(self, policy: Policy) -> bool:
        """Whether its settings let a policy make another step."""
        chosen, there = self.settings_of(policy), self._in_memory.get(policy.id)
        if chosen is None:
            return False
        total = chosen.trainer.total_steps
        return (
            total is None
            or (there.learner.steps if there else self._ledger.versions.of(policy.id).newest().step) < total
        )

    def may_learn(self, policy: Policy) -> bool:
        """Whether a policy is to make another step now."""
        there = self._in_memory.get(policy.id)
        is_stopped = there is not None and there.is_stopped
        return policy.state is PolicyState.ACTIVE and not is_stopped and self.has_steps_left(policy)

    def enter(self, policy: Policy) -> bool:
        """Train a policy from now on, from its newest version; if it cannot be trained, the default policy."""
        there = self._in_memory.get(policy.id)
        if there is not None and there.policy.settings != policy.settings and self._is_on_disk(there):
            there = None
        try:
            if there is None:
                there = self._open(policy)
            else:
                there.come_back()
        except (PolicyRefused, SettingsError, EnvironmentRefused) as error:
            self._leave_out(policy, error)
            return False
        except LedgerError:
            if self._in_memory:
                self.now.come_back()
            raise
        self._in_memory.pop(policy.id, None)
        self._in_memory[policy.id] = there
        for each in list(self._in_memory.values())[:-_MOST]:
            if self._is_on_disk(each):
                del self._in_memory[each.policy.id]
        return True

    def forget(self, there: PolicyTraining) -> None:
        """Give up what a policy that was deleted has learnt since its newest version, and free its memory."""
        _log.info("policy_forgotten", policy=there.policy.name, steps=there.steps.count)
        is_now = there is self.now
        if is_now:
            there.steps.wait_for_publication(there.learner, there.curves)
            there.rows.release()
        self._parts.publisher.states.settle(there.curves, policy=there.policy.id)
        there.curves.close()
        del self._in_memory[there.policy.id]
        if is_now:
            self.enter(self._ledger.policies.get(DEFAULT))

    def renew(self, newest: Version) -> None:
        """Let the policy that trains go on from its newest registered version."""
        now = self.now
        try:
            state = _state_of(newest, now.ledger, self._parts.store)
            if self._base is None:
                self._parts.turns.take()
            else:  # It is below the learner's adapter, and stays.
                self._parts.turns.begin(now.learner)
            self._parts.publisher.states.settle(now.curves, policy=now.policy.id)
            now.curves.close()
            del now.learner  # A GPU has no room for two.
            now.resume(newest, state, self._base)
        except EnvironmentRefused as error:
            self._leave_out(now.policy, error)

    def _is_on_disk(self, there: PolicyTraining) -> bool:
        """Whether all that a policy has learnt is in its newest version, so that it need not be in memory."""
        written = self._parts.publisher.states.finish(there.learner, there.steps.parent, there.curves)
        if written:
            there.curves.close()
        return written

    def _open(self, policy: Policy) -> PolicyTraining:
        """What a policy is trained with, as of its newest version."""
        chosen = self.settings_of(policy)
        if chosen is None:
            raise PolicyRefused("its options are refused")
        if policy.id != DEFAULT and self._parts.ranks.size > 1:
            raise PolicyRefused("trainer.workers: one worker trains several policies, and there are more")
        if policy.id != DEFAULT and not (self._settings.model.lora.rank and chosen.model.lora.rank):
            raise PolicyRefused("model.lora.rank: is 0, and an engine holds one set of weights, but several adapters")
        opened = PolicyTraining(policy, chosen, self._parts)
        newest = opened.ledger.versions.newest()
        state = _state_of(newest, opened.ledger, self._parts.store)
        opened.resume(newest, state, self._base)
        if self._parts.ranks.size == 1 and self._base is None:
            self._base = opened.learner.actor.base()
        return opened

    def _leave_out(self, policy: Policy, error: TuneloopError) -> None:
        """Pause a policy that cannot be trained, and train the default policy."""
        if policy.id == DEFAULT:
            raise error
        self._refuse(policy, error)
        self._in_memory.pop(policy.id, None)
        self.enter(self._ledger.policies.get(DEFAULT))

    def _refuse(self, policy: Policy, error: TuneloopError) -> None:
        """Pause a policy that cannot be trained as it is; the others go on."""
        if policy.state is PolicyState.ACTIVE:
            reason = f"the policy {policy.name} is paused, for it cannot be trained: {error}"
            self._ledger.policies.pause(policy.id)
            self._ledger.alarms.raise_alarm(Alarm(Code.POLICY_REFUSED, reason, policy=policy.id))
            _log.error("policy_refused", policy=policy.name, reason=str(error))


def _state_of(newest: Version, ledger: Ledger, store: CheckpointStore) -> Path | None:
    """What a version is resumed with, whose weights are what they should be."""
    if newest.is_base:
        return None
    require_weights(newest, store)
    return find_state(newest, ledger.versions, store)
