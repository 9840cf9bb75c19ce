"""What clients send: the part of OpenAI's API that is done right here. Everything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, WithJsonSchema

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


def Only(*values):
    """Other values are refused with a sentence of their own; the OpenAPI document names those that are possible."""
    return WithJsonSchema({"enum": list(values)})


class Strict(BaseModel):
    """A number is no text, and an unknown name is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str  # JSON


class Call(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # What OpenAI's client writes into the answers that it sends back; empty in ours.
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


class Function(Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class TemplateOptions(Strict):
    enable_thinking: bool | None = None


class Sampled(Strict):
    """What both endpoints take. The second half is not in OpenAI's API."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    user: str | None = None

    top_k: int | None = Field(None, ge=0)
    min_p: Number | None = Field(None, ge=0, le=1)
    repetition_penalty: Number | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None  # Lark


class ChatRequest(Sampled):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, Only(None, "auto", "none")] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None
    logprobs: Annotated[bool | None, Only(None, False)] = None
    top_logprobs: Annotated[int | None, Only(None)] = None
    metadata: dict[str, str] | None = None
    store: Annotated[bool | None, Only(None, False)] = None
    chat_template_kwargs: TemplateOptions | None = None


class CompletionRequest(Sampled):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int | None, Only(None)] = None
    echo: Annotated[bool | None, Only(None, False)] = None
    best_of: Annotated[int | None, Only(None, 1)] = None
    suffix: Annotated[str | None, Only(None, "")] = None
