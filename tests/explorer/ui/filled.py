"""A ledger as it is after some days: exchanges of several people over several versions, with rewards."""

import json
import random
from typing import Any, NamedTuple

from sqlalchemy import Engine, text

from tests.doubles.engine import MODEL
from tests.explorer.checkpoints import publish
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.evaluation.scores import Figure
from tuneloop.shared.experience import (
    DEFAULT_TENANT,
    Evaluator,
    Exchange,
    Experience,
    Feedback,
    Kind,
    pack_ids,
    pack_logprobs,
    steady_clock,
)
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import Alarm, BatchRules, Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.tensorboard import Curves

VERSIONS, REPLIES, HOUR = 6, 48, 3600.0

#: What a client may write to do harm on a page: markup, a terminal's escapes, marks that reorder text, halves.
HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\x1b[31mred\u202eback\u2066\u200b\"'&"

_QUESTIONS = (
    ("Where is my parcel {n}?", "Your parcel {n} left the depot this morning and should reach you tomorrow by noon."),
    ("Can I return the blue jacket? Order {n}.", "Yes: returns are free within 30 days. A label for {n} is coming."),
    ("Please change the address of order {n}.", "Order {n} has not been packed yet, so I have changed its address."),
    ("What does the warranty cover?", "The warranty covers faults in material and workmanship for two years."),
    ("Do you ship to Iceland?", "We do. Shipping to Iceland takes four to six working days and costs 14 €."),
    ("The app logs me out all the time.", "That happens when cookies are blocked. Which browser do you use?"),
)  # fmt: skip
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up_order",
            "description": "The state of an order.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    }
]


class Scale(NamedTuple):
    """The size of a ledger: replies, seconds and people of each version; `batch` rows are trained, each adds `gain`."""

    replies: int = REPLIES
    seconds: float = HOUR
    people: int = 30
    batch: int = 32
    gain: float = 0.1
    hostile: bool = True
    well: bool = False


#: As much as the tests need.
SMALL = Scale()


class Filler:
    """Writes into the ledger of an experiment, as of earlier times."""

    def __init__(self, settings: Settings, engine: Engine, scale: Scale = SMALL, seed: int = 7) -> None:
        self._random = random.Random(seed)
        self._scale = scale
        self._settings = settings
        self._signer = ReplyIdSigner(load_key(settings.job_dir / KEY))
        self.now = steady_clock() - (VERSIONS + 1) * scale.seconds
        self.ledger = Ledger(engine, rule=settings.reward, clock=lambda: self.now)
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE versions SET created_at = {self.now}, served_at = {self.now}"))

    def exchange(self, version: int, **but: Any) -> Exchange:
        """An exchange at a time of its own, and a little later than the one before."""
        self.now += self._scale.seconds / (self._scale.replies + 8)
        number = self._random.randrange(10_000, 99_999)
        question, answer = self._random.choice(_QUESTIONS)
        request = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You answer customers of a small shop. Be brief and exact."},
                {"role": "user", "content": question.format(n=number)},
            ],
            "tools": _TOOLS,
            "temperature": 0.8,
        }
        text = but.pop("text", None) or answer.format(n=number)
        if version < 3:
            text = f"Hello! Thank you for your message. {text} Is there anything else?"
        others = but.pop("others", ())
        fields: dict[str, Any] = {
            "msg_id": self._signer.mint(DEFAULT_TENANT, 1 + len(others)),
            "tenant": DEFAULT_TENANT,
            "endpoint": "/v1/chat/completions",
            "request": json.dumps(request).encode(),
            "received_at": self.now,
            "latency_s": self._random.uniform(0.3, 1.6),
            "user": f"customer-{self._random.randrange(self._scale.people)}",
            "task_id": f"support/{self._random.choice(('parcels', 'returns', 'app'))}",
            "engine": 0,
            "experiences": tuple(self._reply(version, choice, each) for choice, each in enumerate([text, *others])),
        }
        return Exchange(**fields | but)

    def _reply(self, version: int, choice: int, text: str) -> Experience:
        ids = list(text.encode())
        return Experience(
            choice=choice,
            prompt_ids=pack_ids(list(range(40))),
            completion_ids=pack_ids(ids),
            logprobs=pack_logprobs([-(abs(self._random.gauss(0, 0.6)) ** 2) for _ in ids]),
            version_min=version,
            version_max=version,
            temperature=0.8,
            finish_reason="stop",
            text=text,
        )

    def say(self, about: Exchange, **but: Any) -> Feedback:
        """Feedback about an exchange."""
        fields: dict[str, Any] = {
            "event_id": f"filled-{self._random.random()}",
            "call_id": "filled",
            "tenant": DEFAULT_TENANT,
            "msg_id": about.msg_id,
            "choice": None,
            "received_at": about.received_at + 20,
            "source": "shop",
        }
        return Feedback(**fields | but)

    def serve(self, version: int) -> list[Exchange]:
        """The exchanges of a version's time, most of them rewarded: the higher the version, the better."""
        exchanges = [self.exchange(version) for _ in range(self._scale.replies - 1)]
        exchanges.append(self.exchange(version, others=["I cannot tell. Please ask again later."]))
        good = 0.3 + self._scale.gain * version
        rated = [each for each in exchanges if self._random.random() < 0.8]
        events = [
            self.say(each, value=float(self._random.random() < good), choice=0 if self._scale.well else None)
            for each in rated
        ]
        comment = self.say(
            exchanges[0], kind=Kind.COMMENT, metric="comment", text="Friendly, but it did not look the order up."
        )
        self.ledger.recording.record([*exchanges, *events, comment])
        return exchanges

    def train(self, version: int) -> None:
        """A version, trained on what is rewarded, and served."""
        ledger, store = self.ledger, CheckpointStore(self._settings.job_dir)
        ledger.recording.commit(DEFAULT_TENANT)
        epoch = ledger.training.take_epoch("trainer")
        samples = ledger.training.lease(epoch, self._scale.batch, BatchRules())
        ids = [each.id for each in samples]
        made = ledger.training.register(
            epoch, ids, step=version * (10 if self._scale.well else 1), publish=lambda number: publish(store, number)
        )
        assert made == version
        value = 0.35 + 0.08 * version
        figures = [Figure(metric="score", slice="", value=value, deviation=0.3, samples=64)]
        ledger.evaluations.record(version, Evaluator.ENGINE, figures)
        self.now += self._scale.seconds / 90
        ledger.versions.promote(version, reason=f"it earns more: {value:.2f} against {value - 0.08:.2f}")

    def fill(self, *, hostile: bool = True) -> None:
        """All of it."""
        for version in range(VERSIONS):
            self.serve(version)
            self.train(version + 1)
        self.serve(VERSIONS)
        if hostile:
            self.plant()
        curves = Curves(self._settings.tensorboard_dir / "trainer")
        for step in range(1, 61):
            noise = self._random.gauss(0, 0.03)
            values = {
                "critic/rewards/mean": 0.3 + 0.01 * step + noise,
                "actor/pg_loss": 0.4 / step**0.5 + noise / 3,
                "actor/kl_loss": 0.0004 * step + abs(noise) / 50,
                "actor/entropy": 1.2 - 0.008 * step,
                "response_length/mean": 210 + 40 * noise,
                "mismatch_kl/mean": 2e-6 + abs(noise) / 1e5,
                "actor/lr": 1e-6,
                "off_policy/outside": 0.0,
            }
            curves.add(step, values)
        if self._scale.well:
            self.now = steady_clock()
            self.ledger.training.extend(VERSIONS)
        else:
            alarm = Alarm(
                name="reply_length", reason="replies are 1.6 times as long as at the start", step=6, version=6
            )
            self.ledger.alarms.raise_alarm(alarm)

    def plant(self) -> Exchange:
        """An exchange that tries to do harm in every field that a client fills."""
        request = {
            "model": HOSTILE,
            HOSTILE: HOSTILE,
            "messages": [
                {"role": HOSTILE, "content": HOSTILE, "name": HOSTILE},
                {"role": "user", "content": [{"type": "text", "text": HOSTILE}, {"type": HOSTILE}]},
            ],
            "tools": [{"type": "function", "function": {"name": HOSTILE, "description": HOSTILE}}],
            "metadata": {HOSTILE: HOSTILE},
        }
        calls = json.dumps([{"function": {"name": HOSTILE, "arguments": HOSTILE}}]).encode()
        planted = self.exchange(VERSIONS, text=HOSTILE)
        [reply] = planted.experiences
        fields = {name: getattr(reply, name) for name in reply.__struct_fields__} | {
            "tool_calls": calls,
            "finish_reason": "<b>stop",
            "unsampled": HOSTILE,
        }
        fields |= {"completion_ids": pack_ids([1, 2]), "logprobs": pack_logprobs([-0.1, -3.0])}
        names = {"user": HOSTILE, "task_id": HOSTILE, "run_id": HOSTILE}
        known = {name: getattr(planted, name) for name in planted.__struct_fields__}
        said = Exchange(
            **known | names | {"request": json.dumps(request).encode(), "experiences": (Experience(**fields),)}
        )
        events = [
            self.say(said, value=1.0, metric=HOSTILE, source=HOSTILE),
            self.say(said, kind=Kind.COMMENT, metric="comment", text=HOSTILE),
            self.say(said, kind=Kind.DEMONSTRATION, metric="demonstration", text=HOSTILE),
        ]
        self.ledger.recording.record([said, *events])
        return said
