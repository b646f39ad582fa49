"""Checks vLLM's `explorer.rollout_model.engine_args`: they may change much, but not the policy.

The trainer recomputes log softmax(logits / temperature). An argument that changes the distribution of every reply is
refused. An argument that holds tool calls to a grammar marks the replies that it affects (docs/explain.md).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class FlagEffect(Enum):
    HARMLESS = "harmless"  # the same distribution, or only the prompt, whose ids are recorded
    REFUSED = "refused"
    HOLDS_TOOLS = "holds tools"  # replies to requests with tools are marked
    GRAMMAR = "grammar"  # how a grammar is enforced where a request asks for one: those replies are marked anyway


class FlagRule(NamedTuple):
    """One argument: its effect, the values (a pattern) that have none, and for a refusal what to write instead."""

    effect: FlagEffect
    neutral: str | None = None
    instead: str = ""
    drafts: bool = False


_REQUESTS = "clients ask for it, and their replies are marked"
_OF_A_REPLY = f"replies would be samples of another distribution than the policy's; {_REQUESTS}"

#: Of the arguments of vLLM 0.26 to 0.33, those that touch sampling or its log-probabilities, or sound as if they did.
FLAGS: Mapping[str, FlagRule] = {
    "--tool-strict-level": FlagRule(FlagEffect.HOLDS_TOOLS, "auto"),
    "--tool-parser-plugin": FlagRule(FlagEffect.HOLDS_TOOLS, ""),  # what a parser of one's own does is unknown
    "--logprobs-mode": FlagRule(
        FlagEffect.REFUSED, "processed_logprobs", "log-probabilities must be those that are sampled from"
    ),
    "--generation-config": FlagRule(
        FlagEffect.REFUSED, "vllm", "a model's own top_p, top_k or penalties would apply to every reply; leave it out"
    ),
    "--override-generation-config": FlagRule(
        FlagEffect.REFUSED, None, f"write model.temperature; whatever else is sampled by, {_REQUESTS}"
    ),
    "--logits-processors": FlagRule(FlagEffect.REFUSED, None, _OF_A_REPLY),
    "--watermark-config": FlagRule(FlagEffect.REFUSED, None, _OF_A_REPLY),
    **dict.fromkeys(
        ("--quantization", "--quantization-config", "--lora-target-modules"),
        FlagRule(FlagEffect.REFUSED, None, "engines would have other weights than the trainer; leave it out"),
    ),
    "--diffusion-config": FlagRule(FlagEffect.REFUSED, None, "replies must be sampled token by token"),
    "--enable-trace-replay": FlagRule(FlagEffect.REFUSED, None, "a reply's tokens could be given instead of sampled"),
    "--config": FlagRule(FlagEffect.REFUSED, None, "write its arguments here, where they are checked"),
    # Drafts are accepted by the policy's own probabilities, unless they are accepted at rates that were made up.
    "--speculative-config": FlagRule(
        FlagEffect.REFUSED,
        r"(?s)(?!.*synthetic).*",
        "synthetic acceptance does not sample from the policy",
        drafts=True,
    ),
    "--structured-outputs-config": FlagRule(
        FlagEffect.GRAMMAR, r'(\{\s*"backend":\s*"(auto|xgrammar)"\s*\}|backend (auto|xgrammar))'
    ),
    "--guided-decoding-backend": FlagRule(FlagEffect.GRAMMAR, "auto|xgrammar"),
    # `--watermark` is of the KV cache. A thinking_token_budget of `--reasoning-config` forces tokens, and is marked.
    **dict.fromkeys(("--spec-method", "--spec-model", "--spec-tokens"), FlagRule(FlagEffect.HARMLESS, drafts=True)),
    **dict.fromkeys(
        (
            *("--per-request-spec-decode-metrics", "--reasoning-config", "--return-sampling-mask", "--use-fp64-gumbel"),
            *("--enable-batch-sharded-sampling", "--max-logprobs", "--sparse-indexer-topk-backend", "--watermark"),
            *("--enable-mamba-cache-stochastic-rounding", "--kv-cache-metrics-sample", "--limit-mm-per-prompt"),
        ),
        FlagRule(FlagEffect.HARMLESS),
    ),
    # These touch no sampling, but run what others wrote, or open the engine to them.
    "--load-format": FlagRule(
        FlagEffect.REFUSED, "safetensors|fastsafetensors|runai_streamer|dummy", "other formats are unpickled"
    ),
    "--trust-request-chat-template": FlagRule(
        FlagEffect.REFUSED, None, "a chat template is a program, and clients would bring theirs; leave it out"
    ),
    "--trust-remote-code": FlagRule(FlagEffect.REFUSED, None, "write model.trust_remote_code"),
    "--allowed-media-domains": FlagRule(FlagEffect.REFUSED, None, "clients send files as data: URLs; leave it out"),
    "--allowed-local-media-path": FlagRule(
        FlagEffect.REFUSED, None, "clients would read files of this machine; leave it out"
    ),
    "--host": FlagRule(FlagEffect.REFUSED, None, "engines are reached by a Unix socket only; leave it out"),
    "--port": FlagRule(FlagEffect.REFUSED, None, "engines are reached by a Unix socket only; leave it out"),
    "--api-server-count": FlagRule(FlagEffect.REFUSED, None, "write explorer.rollout_model.api_servers"),
    "--uds": FlagRule(FlagEffect.REFUSED, None, "where an engine listens is chosen for it; leave it out"),
}

_SHORT: Mapping[str, str] = {"-sc": "--speculative-config", "-dc": "--diffusion-config", "-q": "--quantization"}

#: Of vLLM 0.32: vllm-project/vllm#55005.
_DRAFTS_ON_CPU = (
    "speculative decoding: on a CPU vLLM accepts drafts at any temperature but the request's, so that replies would be "
    "samples of another distribution than the policy's; leave it out"
)

#: Parsers that hold calls to a grammar without being asked to.
HOLDING_PARSERS = frozenset({"glm45", "glm47", "mistral", "cohere_command3", "cohere_command4"})

#: In the name of an argument that is not in the table, they say that it touches sampling.
_SUSPICIOUS = re.compile(
    r"sampl|logit|logprob|temperature|top-?[kp]\b|min-p\b|penalt|strict-level|watermark|guided|structured|grammar"
    r"|generation-config|gumbel|stochastic|trace-replay|greedy|beam|speculat|(^|-)spec-|diffusion"
)


def sounds_like_sampling(name: str) -> bool:
    """Whether an argument's name says that it touches what replies are sampled from; `--no-…` turns off what does."""
    return not name.startswith("--no-") and _SUSPICIOUS.search(name) is not None


def problems_of(arguments: Sequence[str], *, on_cpu: bool = False) -> Iterator[str]:
    for name, value in _pairs(arguments):
        rule = _rule_of(name)
        if rule is None:
            if sounds_like_sampling(name):
                yield f"{name} is not known, and sounds as if it changed what replies are sampled from. Leave it out"
        elif rule.effect is FlagEffect.REFUSED and not _is_neutral(rule, value):
            yield f"{' '.join(filter(None, (name, value)))}: {rule.instead}"
    if on_cpu and drafts(arguments):
        yield _DRAFTS_ON_CPU


def drafts(arguments: Sequence[str]) -> bool:
    return any((rule := _rule_of(name)) is not None and rule.drafts for name, _ in _pairs(arguments))


def thinks(arguments: Sequence[str], parser: str | None) -> bool:
    names = {name for name, _ in _pairs(arguments)}
    return parser is not None or not names.isdisjoint(("--reasoning-parser", "--reasoning-config"))


def holds_tools(arguments: Sequence[str], parser: str | None) -> bool:
    """Whether engines with these arguments and this tool parser may hold calls to a grammar unasked."""
    pairs = list(_pairs(arguments))
    parser = next((value for name, value in reversed(pairs) if name == "--tool-call-parser"), parser)
    rules = ((rule, value) for name, value in pairs if (rule := _rule_of(name)))
    held = any(rule.effect is FlagEffect.HOLDS_TOOLS and not _is_neutral(rule, value) for rule, value in rules)
    return held or parser in HOLDING_PARSERS


def rebuilds_grammars(arguments: Sequence[str]) -> bool:
    rules = ((rule, value) for name, value in _pairs(arguments) if (rule := _rule_of(name)))
    return all(rule.effect is not FlagEffect.GRAMMAR or _is_neutral(rule, value) for rule, value in rules)


#: The settings that we give to engines under other names. Options of `engine_args` keep vLLM's.
_SETTINGS = {
    "--enable-auto-tool-choice": "explorer.rollout_model.enable_auto_tool_choice",
    "--tool-call-parser": "explorer.rollout_model.tool_call_parser",
    "--reasoning-parser": "explorer.rollout_model.reasoning_parser",
    "--max-model-len": "model.max_model_len",
    "--served-model-name": "model.served_model_name",
    "--trust-remote-code": "model.trust_remote_code",
    "--gpu-memory-utilization": "explorer.rollout_model.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "explorer.rollout_model.kv_cache_memory_bytes",
}
_LISTED = "GET /v1/models lists those that do."
_SETTING = re.compile(rf"(?<![\w-])(?:{'|'.join(_SETTINGS)})(?![\w-])")


def name_settings(sentence: str) -> str:
    """An engine's sentence with our settings in place of the arguments of vLLM that they become.

    >>> name_settings('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')[28:]
    'explorer.rollout_model.enable_auto_tool_choice and explorer.rollout_model.tool_call_parser to be set'
    """
    said, aliases, _ = sentence.partition(" Valid aliases: ")  # which may be folders of ours
    return _SETTING.sub(lambda flag: _SETTINGS[flag[0]], f"{said} {_LISTED}" if aliases else sentence)


def gates_renderer(release: str | None) -> bool:
    """Whether the renderer of a vLLM, such as `vllm 0.32.0`, answers only with --enable-scale-out."""
    found = re.search(r" (\d+)\.(\d+)", release or "")
    return found is not None and tuple(map(int, found.groups())) >= (0, 32)


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each argument by its long name, as vLLM reads it, with its value: `--a b`, `--a=b`, `--a.key b`, `--A_B`."""
    for at, argument in enumerate(arguments):
        if re.match(r"--?[A-Za-z]", argument):
            written, _, value = argument.partition("=")
            name, _, key = written.partition(".")
            follows = arguments[at + 1] if at + 1 < len(arguments) and not arguments[at + 1].startswith("--") else ""
            yield _SHORT.get(name, name.replace("_", "-")), " ".join(filter(None, (key, value or follows)))


def _rule_of(name: str) -> FlagRule | None:
    """The rule of an argument; vLLM takes the beginning of a name for the name."""
    if name in FLAGS:
        return FLAGS[name]
    near = [flag for flag in FLAGS if flag.startswith(name) and len(name) > len("--x")]
    return FLAGS[near[0]] if len(near) == 1 else None


def _is_neutral(rule: FlagRule, value: str) -> bool:
    return rule.neutral is not None and re.fullmatch(rule.neutral, value) is not None
