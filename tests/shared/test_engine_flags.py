"""What engines are told on their command line does not change what replies are sampled from, or it is known."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tuneloop.shared import engine_flags
from tuneloop.shared.engine_flags import FLAGS, HOLDING_PARSERS, holds_tools, problems_of, sounds_like_sampling


@pytest.mark.parametrize(
    "arguments",
    [
        ["--logprobs-mode", "raw_logprobs"],
        ["--logprobs_mode=raw_logits"],
        ["--logprobs", "raw_logprobs"],  # vLLM takes the beginning of a name for it
        ["--generation-config", "auto"],
        ["--override-generation-config", '{"top_p": 0.5}'],
        ["--override-generation-config.top_p", "0.5"],
        ["--logits-processors", "mine:Mine"],
        ["--watermark-config", "{}"],
        ["-dc", "{}"],
        ["--quantization", "fp8"],
        ["-q=awq"],
        ["--quantization-config", "{}"],
        ["--lora-target-modules", "q_proj"],
        ["--config", "engine.yaml"],
        ["--enable-trace-replay"],
        ["--speculative-config", '{"method": "ngram", "rejection_sample_method": "synthetic"}'],
        ["-sc.rejection_sample_method", "synthetic"],
        ["--typical-sampling-threshold", "0.5"],  # no vLLM has it
        ["--default-top-k", "3"],
    ],
)
def test_what_makes_replies_of_another_distribution_is_refused(arguments: list[str]) -> None:
    [problem] = problems_of(["--max-num-seqs", "64", *arguments, "--enforce-eager"])
    assert problem.startswith("--")
    assert len(problem.split()) > 5


@pytest.mark.parametrize(
    ("arguments", "drafts"),
    [
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'], True),
        (["-sc.method", "ngram"], True),
        (["--spec-method=ngram", "--spec-tokens", "3"], True),
        (["--per-request-spec-decode-metrics", "--max-num-seqs", "64"], False),
    ],
)
def test_drafts_are_refused_on_a_cpu_where_vllm_accepts_them_at_another_temperature(
    arguments: list[str], drafts: bool
) -> None:
    assert engine_flags.drafts(arguments) is drafts
    assert list(problems_of(arguments)) == []
    assert [each.split(":")[0] for each in problems_of(arguments, on_cpu=True)] == ["speculative decoding"] * drafts


@pytest.mark.parametrize(
    ("arguments", "parser", "held"),
    [
        ([], "hermes", False),
        (["--tool-strict-level", "auto"], "hermes", False),
        (["--tool-strict-level", "parameter"], "hermes", True),
        (["--tool_strict_level=function"], "hermes", True),
        (["--tool-strict", "function"], "hermes", True),
        (["--tool-parser-plugin", "mine.py"], "mine", True),
        ([], "glm47", True),
        (["--tool-call-parser", "mistral"], "hermes", True),
        (["--tool-call-parser", "hermes"], "mistral", False),
        ([], None, False),
    ],
)
def test_engines_that_hold_calls_to_a_grammar_are_known(arguments: list[str], parser: str | None, held: bool) -> None:
    assert holds_tools(arguments, parser) is held


def _vllm(module: str) -> str:
    """A module of vLLM, which is read and not imported: that takes long."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / module).read_text()


def _flags_of_vllm() -> Iterator[str]:
    yield from re.findall(r'"(--[a-z][a-z0-9-]+)"', _vllm("engine/arg_utils.py"))
    for node in ast.walk(ast.parse(_vllm("entrypoints/launchers/cli_args.py"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"--{node.target.id.replace('_', '-')}"


def test_every_argument_of_vllms_that_sounds_like_sampling_is_decided_about() -> None:
    found = set(_flags_of_vllm())
    assert len(found) > 150
    assert "--tool-strict-level" in found
    assert {each for each in found if sounds_like_sampling(each)} - FLAGS.keys() == set()


def test_every_parser_that_holds_calls_unasked_is_known() -> None:
    """Of those whose class says so; Mistral's and Cohere's do it in their code."""
    folder = Path(find_spec("vllm").origin).parent / "tool_parsers"  # type: ignore[union-attr, arg-type]
    strict = {each.stem for each in folder.glob("*_parser.py") if "default_tool_strict_level = " in each.read_text()}
    table = _vllm("tool_parsers/__init__.py")
    names = {name for name, module in re.findall(r'"(\w+)": \(\s*"(\w+)",', table) if module in strict}
    assert names
    assert names <= HOLDING_PARSERS


def test_what_an_engine_says_of_its_arguments_names_our_settings() -> None:
    said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    option = "explorer.rollout_model"
    assert engine_flags.name_settings(said) == (
        f'"auto" tool choice requires {option}.enable_auto_tool_choice and {option}.tool_call_parser to be set'
    )
    other = "set --tool-call-parser-plugin, or --x"
    assert engine_flags.name_settings(other) == other


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trust-request-chat-template"],
        ["--trust-remote-code"],
        ["--allowed-local-media-path", "/"],
        ["--allowed-media-domains", "x"],
        ["--load-format", "pt"],
        ["--load-format=auto"],
        ["--host", "0.0.0.0"],
        ["--port=80"],
        ["--uds", "/tmp/x"],
    ],
)
def test_arguments_that_run_what_others_wrote_or_open_an_engine_are_refused(arguments: list[str]) -> None:
    assert len(list(problems_of(arguments))) == 1


def test_a_model_that_is_not_there_is_told_without_folders_of_ours() -> None:
    said = "The model `x` does not exist. Valid aliases: /data/models/own."
    told = "The model `x` does not exist. GET /v1/models lists those that do."
    assert engine_flags.name_settings(said) == told
