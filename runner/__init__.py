"""What users import, if they like: rewards made of components, and an LLM as a judge. Knows no service of ours."""

from runner.asking import Endpoint
from runner.composite import Component, Composite, Score
from runner.errors import JudgeAway, JudgeError, JudgeFailed
from runner.judge import Judge, Preference, Verdict
from runner.reply import Reply, ToolCall, ToolResult
from runner.rubric import Example, Rubric

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
