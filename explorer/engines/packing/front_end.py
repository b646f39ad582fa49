"""In the API servers of an engine: marked log-probabilities are kept in an array, and never decoded."""

from array import array
from base64 import b64encode
from collections.abc import Callable
from typing import Any, NamedTuple

from tuneloop.explorer.engines.packing.patching import (
    MARK,
    MASK,
    UnknownVllm,
    find,
    is_marked,
    mask_width,
    method,
    require_fields,
)
from tuneloop.explorer.engines.packing.wire import HEADER, MASK_HEADER, MOST_KEPT, PACKED

#: What vLLM writes for whatever is less, for -inf is not JSON.
_LEAST = -9999.0

#: What makes vLLM return others than the sampled tokens', or sample them elsewhere.
_OTHERWISE = ("logprob_token_ids", "use_beam_search")

#: A stream's log-probabilities are sent when so many tokens were, or its last: to write them takes a third of the time
#: that a piece takes.
_AT_ONCE = 32

_OPENAI = "vllm.entrypoints.openai"


def install() -> None:
    """Change the API servers. Raises UnknownVllm, and changes nothing then."""
    changes = [*_output_changes(), *_chat_changes(), *_text_changes()]
    for owner, name, replacement in changes:
        setattr(owner, name, replacement)


_Change = tuple[Any, str, Any]


class Arrived(NamedTuple):
    """Log-probabilities of some tokens; how many ids were left of the vocabulary at each, and all of these."""

    numbers: "array[float]" = array("f")
    counts: "array[int]" = array("i")
    ids: "array[int]" = array("i")

    def part(self, start: int, end: int | None) -> "Arrived":
        if not self.counts:
            return Arrived(self.numbers[start:end])
        counts, before = self.counts[start:end], sum(self.counts[:start])
        return Arrived(self.numbers[start:end], counts, self.ids[before : before + sum(counts)])


class ReplyLogprobs:
    """The log-probabilities of a reply so far; all outputs of a stream have this one. `masked`: with tokens left."""

    def __init__(self, *, streamed: bool, masked: bool) -> None:
        self.so_far = Arrived(array("f"), array("i"), array("i"))
        self.masked = masked
        self.finished = False
        self._streamed = streamed
        self._sent = self._tokens_sent = 0

    def __getitem__(self, tokens: slice) -> "ReplyLogprobs":
        """VLLM takes those of an output's tokens: `due` gets their number."""
        return self

    def extend(self, other: "ReplyLogprobs") -> None:
        """VLLM puts together what a client has not taken: it is all here."""

    def add(self, arrived: Arrived) -> None:
        self.so_far.numbers.extend(arrived.numbers)
        if self.masked:
            self.so_far.counts.extend(arrived.counts or array("i", bytes(4 * len(arrived.numbers))))
            self.so_far.ids.extend(arrived.ids)

    def due(self, tokens: int) -> Arrived | None:
        """What to send with so many tokens, of a stream so many more; None if it follows with later ones."""
        if not self._streamed:
            return self.so_far.part(0, tokens)
        self._tokens_sent += tokens
        if self._tokens_sent - self._sent < (1 if self.finished else _AT_ONCE):
            return None
        start, self._sent = self._sent, self._tokens_sent
        return self.so_far.part(start, self._sent)


def _output_changes() -> list[_Change]:
    keeper = find("vllm.v1.engine.logprobs", "LogprobsProcessor")
    make = method(keeper, "from_new_request", "tokenizer", "request")
    update = method(keeper, "update_from_output", "output")
    require_fields(keeper, "logprobs", "cumulative_logprob")
    state = find("vllm.v1.engine.output_processor", "RequestState")
    conclude = method(state, "_new_completion_output", "token_ids", "finish_reason", "stop_reason")
    delta = find("vllm.sampling_params", "RequestOutputKind").DELTA
    processor = find("vllm.v1.engine.output_processor", "OutputProcessor")
    process = method(processor, "process_outputs", "engine_core_outputs")
    require_fields(find("vllm.v1.engine", "EngineCoreOutput"), "new_token_ids", "new_logprobs", "kv_transfer_params")

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        made = make(cls, tokenizer, request)
        if is_marked(request.sampling_params):
            streamed, width = request.sampling_params.output_kind == delta, mask_width(request.sampling_params)
            made.logprobs = ReplyLogprobs(streamed=streamed, masked=width > 1)
            made.cumulative_logprob, made.arrived = None, Arrived()
            if width > 1:  # the core has yet to get it; clients may not ask for as many
                request.sampling_params.logprobs = width
        return made

    def update_from_output(self: Any, output: Any) -> None:
        reply = self.logprobs
        if isinstance(reply, ReplyLogprobs):
            if output.new_logprobs is not None:  # from a core that packs nothing
                reply.masked = False
                reply.add(Arrived(array("f", output.new_logprobs.logprobs[:, 0].tolist())))
                output.new_logprobs = None
            # A stop string may have cut the tokens that came.
            reply.add(self.arrived.part(0, len(output.new_token_ids)))
            self.arrived = Arrived()
        update(self, output)

    def process_outputs(self: Any, engine_core_outputs: Any, *more: Any, **named: Any) -> Any:
        self.arriving = _distribute(engine_core_outputs, self.request_states, getattr(self, "arriving", Arrived()))
        return process(self, engine_core_outputs, *more, **named)

    def new_completion_output(self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any) -> Any:
        reply = self.logprobs_processor.logprobs
        if isinstance(reply, ReplyLogprobs):
            reply.finished = finish_reason is not None
        return conclude(self, token_ids, finish_reason, stop_reason)

    return [
        (keeper, "from_new_request", classmethod(from_new_request)),
        (keeper, "update_from_output", update_from_output),
        (processor, "process_outputs", process_outputs),
        (state, "_new_completion_output", new_completion_output),
    ]


def _distribute(outputs: Any, states: dict[str, Any], arriving: Arrived) -> Arrived:
    """Give each marked request what has arrived for it; the rest is for outputs that follow, in another portion."""
    at = 0
    for output in outputs:
        beside = output.kv_transfer_params
        if beside is not None and MARK in beside:
            numbers, kept = array("f", beside.pop(MARK)), array("i", beside.pop(MASK, b""))
            arriving, at = Arrived(numbers, kept[: len(numbers)], kept[len(numbers) :]), 0
            output.kv_transfer_params = beside or None
        if at < len(arriving.numbers):
            end = at + len(output.new_token_ids)
            state = states.get(output.request_id)
            keeper = state and state.logprobs_processor
            if keeper and isinstance(keeper.logprobs, ReplyLogprobs):
                keeper.arrived = arriving.part(at, end)
            at = end
    return arriving.part(at, None) if at else arriving


def _chat_changes() -> list[_Change]:
    protocol, serving = f"{_OPENAI}.chat_completion.protocol", f"{_OPENAI}.chat_completion.serving"
    require_fields(find(protocol, "ChatCompletionRequest"), "logprobs", "top_logprobs", "vllm_xargs")
    chat, reply = find(serving, "OpenAIServingChat"), find(protocol, "ChatCompletionLogProbs")
    create = method(chat, "create_chat_completion", "request", "raw_request")
    tell = method(chat, "_create_chat_logprobs", "token_ids", "top_logprobs")
    _require_room(reply, "content")

    def packable(request: Any) -> bool:
        return request.logprobs is True and not request.top_logprobs

    return [
        (chat, "create_chat_completion", _marking(create, packable)),
        (chat, "_create_chat_logprobs", _telling(tell, reply, {"content": None}, later=None)),
    ]


def _text_changes() -> list[_Change]:
    protocol, serving = f"{_OPENAI}.completion.protocol", f"{_OPENAI}.completion.serving"
    require_fields(find(protocol, "CompletionRequest"), "logprobs", "echo", "vllm_xargs")
    completion, reply = find(serving, "OpenAIServingCompletion"), find(protocol, "CompletionLogProbs")
    create = method(completion, "create_completion", "request", "raw_request")
    tell = method(completion, "_create_completion_logprobs", "token_ids", "top_logprobs")
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    _require_room(reply, *names)

    def packable(request: Any) -> bool:
        return request.logprobs == 0 and not request.echo

    empty: dict[str, Any] = {name: [] for name in names}
    later = reply.model_construct(**empty)
    return [
        (completion, "create_completion", _marking(create, packable)),
        (completion, "_create_completion_logprobs", _telling(tell, reply, empty, later=later)),
    ]


def _require_room(reply: Any, *names: str) -> None:
    require_fields(reply, *names)
    if reply.model_config.get("extra") != "allow":
        raise UnknownVllm(f"{reply.__qualname__} has no room for other fields")


def _marking(create: Callable[..., Any], packable: Callable[[Any], bool]) -> Callable[..., Any]:
    """Mark the requests that ask for packed log-probabilities, and can have them."""

    async def marking(self: Any, request: Any, raw_request: Any = None) -> Any:
        asked = raw_request is not None and raw_request.headers.get(HEADER) == PACKED
        if asked and packable(request) and not any(getattr(request, name, None) for name in _OTHERWISE):
            width = 1
            if MASK_HEADER in raw_request.headers:
                # Equal logits are all left by `top_k`: with some room for these it is cheaper than the most.
                most = 4 * request.top_k if (request.top_k or 0) > 0 else MOST_KEPT
                width = min(most, MOST_KEPT, self.model_config.get_vocab_size())
            request.vllm_xargs = {**(request.vllm_xargs or {}), MARK: width}
        return await create(self, request, raw_request)

    return marking


def _telling(tell: Callable[..., Any], reply: Any, empty: dict[str, Any], *, later: Any) -> Callable[..., Any]:
    """Write what is in an array as one string; `later` where it follows with later tokens."""

    def telling(self: Any, token_ids: Any, top_logprobs: Any, *more: Any, **named: Any) -> Any:
        if not isinstance(top_logprobs, ReplyLogprobs):
            return tell(self, token_ids, top_logprobs, *more, **named)
        due = top_logprobs.due(len(token_ids))
        if due is None:
            return later
        numbers = due.numbers
        if numbers and min(numbers) < _LEAST:
            numbers = array("f", [max(each, _LEAST) for each in numbers])
        told: dict[str, array[Any]] = {"packed": numbers}
        if top_logprobs.masked:
            told |= {"kept": due.counts, "kept_ids": due.ids}
        encoded = {name: b64encode(each.tobytes()).decode() for name, each in told.items()}
        return reply.model_construct(**empty, **encoded)

    return telling
