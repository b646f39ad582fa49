"""Exports the runner's API: rewards made of components, LLM judges, feedback, shadow runs, and tune()."""

from tuneloop.runner.collection.figures import ABTest, ToolUseEvaluator
from tuneloop.runner.collection.preference_pairs import HumanPreferenceCollector
from tuneloop.runner.collection.run_records import DataCollector, RunRecord
from tuneloop.runner.collection.service_versions import VersionsClient
from tuneloop.runner.errors import (
    DatasetRefused,
    ExtraMissing,
    FeedbackAway,
    FeedbackError,
    FeedbackRefused,
    JudgeAway,
    JudgeError,
    JudgeFailed,
    LogRefused,
    OutboxFull,
    ServiceAway,
    ServiceRefused,
    TuneError,
    TuneFailed,
    TuneRefused,
)
from tuneloop.runner.feedback.feedback_client import AsyncFeedback, Feedback, FeedbackBatch, Receipt
from tuneloop.runner.feedback.feedback_outbox import RefusedEntry
from tuneloop.runner.feedback.verbs import WholeRun, reply_id
from tuneloop.runner.judging.endpoint import Endpoint
from tuneloop.runner.judging.judge import Judge, LLMJudge, Verdict
from tuneloop.runner.judging.rubric import Example, Rubric
from tuneloop.runner.models.bound_model import CallDefaults, ModelEndpoint, make_model
from tuneloop.runner.models.run import ModelCall, Run, RunCalls
from tuneloop.runner.rewards.components import reward_function
from tuneloop.runner.rewards.composite import Component, Composite, Score
from tuneloop.runner.rewards.reply import Reply, ToolCall, ToolResult
from tuneloop.runner.shadow.executor import ShadowResult, ShadowRun
from tuneloop.runner.shadow.production_calls import (
    EveryCall,
    ExplicitMarkingStrategy,
    ProductionCall,
    SamplingRateStrategy,
    TrainingContext,
)
from tuneloop.runner.shadow.tools import ShadowTools
from tuneloop.runner.shadow.training_runner import TrainingRunner
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.tuning.config import (
    AlgorithmConfig,
    JudgeOutput,
    JudgeType,
    TinkerConfig,
    TunerModelConfig,
    WorkflowOutput,
    WorkflowType,
    check_judge_function,
    check_workflow_function,
)
from tuneloop.runner.tuning.tune import main, tune
from tuneloop.runner.tuning.views import TuneResult

Algorithm, Dataset, TunerChatModel = AlgorithmConfig, DatasetConfig, TunerModelConfig  # names before AgentScope 1.0.13

_ELSEWHERE = dict.fromkeys(
    ("tune_prompt", "PromptTuneConfig"),
    "tuneloop tunes weights, not prompts: agentscope 1.x has it, in agentscope.tuner",
) | dict.fromkeys(
    ("model_selection", "select_model", "avg_time_judge", "avg_token_consumption_judge"),
    "tuneloop compares models on tasks with known answers, and versions on live traffic: docs/versions.md;"
    " agentscope 1.x has select_model, in agentscope.tuner.model_selection",
)


def __getattr__(name: str) -> object:
    """Name the place of AgentScope's other tuning functions. Raises ImportError, AttributeError for unknown names."""
    if name in _ELSEWHERE:
        raise ImportError(f"{name} is not here: {_ELSEWHERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ABTest",
    "Algorithm",
    "AlgorithmConfig",
    "AsyncFeedback",
    "CallDefaults",
    "Component",
    "Composite",
    "DataCollector",
    "Dataset",
    "DatasetConfig",
    "DatasetRefused",
    "Endpoint",
    "EveryCall",
    "Example",
    "ExplicitMarkingStrategy",
    "ExtraMissing",
    "Feedback",
    "FeedbackAway",
    "FeedbackBatch",
    "FeedbackError",
    "FeedbackRefused",
    "HumanPreferenceCollector",
    "Judge",
    "JudgeAway",
    "JudgeError",
    "JudgeFailed",
    "JudgeOutput",
    "JudgeType",
    "LLMJudge",
    "LogRefused",
    "ModelCall",
    "ModelEndpoint",
    "OutboxFull",
    "ProductionCall",
    "Receipt",
    "RefusedEntry",
    "Reply",
    "Rubric",
    "Run",
    "RunCalls",
    "RunRecord",
    "SamplingRateStrategy",
    "Score",
    "ServiceAway",
    "ServiceRefused",
    "ShadowResult",
    "ShadowRun",
    "ShadowTools",
    "TinkerConfig",
    "ToolCall",
    "ToolResult",
    "ToolUseEvaluator",
    "TrainingContext",
    "TrainingRunner",
    "TuneError",
    "TuneFailed",
    "TuneRefused",
    "TuneResult",
    "TunerChatModel",
    "TunerModelConfig",
    "Verdict",
    "VersionsClient",
    "WholeRun",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "main",
    "make_model",
    "reply_id",
    "reward_function",
    "tune",
]
