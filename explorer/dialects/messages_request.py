"""The pydantic model of an Anthropic messages request: the fields that vLLM reads, and as lenient."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from tuneloop.shared.errors import RequestRefused

Json = dict[str, Any]


def _with_type(schema: Json) -> Json:
    return schema if "type" in schema else {**schema, "type": "object"}


class Tool(BaseModel):
    """A tool that the model may use."""

    name: str
    description: str | None = None
    input_schema: Annotated[Json, AfterValidator(_with_type)]
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolReference(BaseModel):
    """A tool by its name."""

    type: Literal["tool_reference"]
    name: str


class ToolDefinition(BaseModel):
    """A tool by value."""

    type: Literal["tool_definition"]
    definition: Tool


class Block(BaseModel):
    """One piece of a message's content; which of the fields mean something depends on its type."""

    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    source: Json | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: Json | None = None
    content: str | list[Json] | None = None
    thinking: str | None = None
    tool: Annotated[ToolReference | ToolDefinition, Field(discriminator="type")] | None = None

    @property
    def changes_tools(self) -> bool:
        """Whether it adds a tool to those of the request or takes one away."""
        return self.type in {"tool_addition", "tool_removal"}

    @model_validator(mode="after")
    def _names_its_tool(self) -> "Block":
        if self.changes_tools and self.tool is None:
            raise ValueError(f"tool is required for {self.type} blocks")
        if self.type == "tool_removal" and isinstance(self.tool, ToolDefinition):
            raise ValueError("tool_removal only accepts a tool_reference")
        return self


def _without_tool_changes(content: str | list[Block] | None) -> str | list[Block] | None:
    if isinstance(content, list) and (change := next((each for each in content if each.changes_tools), None)):
        raise ValueError(f'{change.type} blocks are only allowed in messages with role "system"')
    return content


class Turn(BaseModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        """Its content, unless that is a plain string."""
        return self.content if isinstance(self.content, list) else []

    @model_validator(mode="after")
    def _only_system_changes_tools(self) -> "Turn":
        if self.role != "system":
            _without_tool_changes(self.content)
        return self


class ToolChoice(BaseModel):
    """Whether the model must use a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_the_tool(self) -> "ToolChoice":
        if self.type == "tool" and not self.name:
            raise ValueError("name is required when type is 'tool'")
        return self


class OutputFormat(BaseModel):
    """The shape that the answer must have."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: Json | None = Field(default=None, alias="schema")


class OutputConfig(BaseModel):
    """The reasoning effort, and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingEnabled(BaseModel):
    """The model thinks first, within a budget."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1024)


class ThinkingUnbudgeted(BaseModel):
    """The model does not think, or decides for itself."""

    type: Literal["disabled", "adaptive"]


class MessagesRequest(BaseModel):
    """The body of a messages request. vLLM ignores all other fields."""

    model: str = Field(min_length=1)
    messages: list[Turn]
    max_tokens: int = Field(gt=0)
    metadata: Json | None = None
    output_config: OutputConfig | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingUnbudgeted, Field(discriminator="type")] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    system: Annotated[str | list[Block] | None, AfterValidator(_without_tool_changes)] = None
    temperature: float | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    top_k: int | None = None
    top_p: float | None = None

    # vLLM's own, which its chat completions have under the same names, and check.
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None

    @model_validator(mode="after")
    def _thinking_budget_below_max_tokens(self) -> "MessagesRequest":
        # With disaggregated serving the prefill engine is asked for one token; the decode engine is asked again.
        prefill_only = isinstance(self.kv_transfer_params, dict) and self.kv_transfer_params.get("do_remote_decode")
        budget = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else 0
        if budget >= self.max_tokens and not prefill_only:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self


def parse_messages_request(body: Json) -> MessagesRequest:
    """The request of a body. Raises RequestRefused with the first mistake for one that vLLM would not accept."""
    try:
        return MessagesRequest.model_validate(body)
    except ValidationError as error:
        # Of the forms of a union, the one whose validation got furthest is most likely the one that was intended.
        mistake = max(error.errors(), key=lambda each: len(each["loc"]))
        # The name of the form is not part of the path: "str", "list[...]".
        path = ".".join(str(part) for part in mistake["loc"] if part != "str" and "[" not in str(part))
        message = mistake["msg"].removeprefix("Value error, ")
        raise RequestRefused(
            f"{path}: {message}" if path else message, code="invalid_value", param=path or None
        ) from None
