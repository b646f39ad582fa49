"""What users import, if they like: rewards made of components, and an LLM as a judge. Knows no service of ours."""

from tuneloop.runner.composite import Component, Composite, Score
from tuneloop.runner.endpoint import Endpoint
from tuneloop.runner.errors import JudgeAway, JudgeError, JudgeFailed
from tuneloop.runner.judge import Judge, Preference, Verdict
from tuneloop.runner.reply import Reply, ToolCall, ToolResult
from tuneloop.runner.rubric import Example, Rubric

__all__ = [
    "Component",
    "Composite",
    "Endpoint",
    "Example",
    "Judge",
    "JudgeAway",
    "JudgeError",
    "JudgeFailed",
    "Preference",
    "Reply",
    "Rubric",
    "Score",
    "ToolCall",
    "ToolResult",
    "Verdict",
]
