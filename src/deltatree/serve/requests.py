"""From a client's request to prompts and options, or to the sentence that says why not."""

from __future__ import annotations

import json

from deltatree.decode.options import GenerateOptions
from deltatree.serve.options import ServeOptions
from deltatree.serve.refusals import Refusal
from deltatree.serve.schemas import ChatRequest, CompletionRequest, JsonFormat, Message, Sampled, SchemaFormat


def check_supported(body: ChatRequest | CompletionRequest, config: ServeOptions) -> None:
    """Raises Refusal for another model, and for what is not done here."""
    if body.model != config.model_name:
        raise Refusal(
            404,
            f"model {body.model[:100]!r} is not served here; {config.model_name!r} is",
            param="model",
            code="model_not_found",
        )
    if body.logprobs not in (None, False) or getattr(body, "top_logprobs", None) is not None:
        raise Refusal(400, "log-probabilities are not available here; leave logprobs out", param="logprobs")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options needs stream=true", param="stream_options")
    for name, plain in (("echo", False), ("best_of", 1), ("suffix", ""), ("store", False)):
        if getattr(body, name, None) not in (None, plain):
            raise Refusal(400, f"{name} is not available here; leave it out", param=name)
    if (choice := getattr(body, "tool_choice", None)) not in (None, "auto", "none"):
        raise Refusal(
            400, f"tool_choice {str(choice)[:100]} is not available here; use 'auto' or 'none'", param="tool_choice"
        )


def options_of(body: Sampled, config: ServeOptions, *, room: int) -> GenerateOptions:
    """room: tokens that still fit into the context behind the prompt. Raises Refusal, OptionError."""
    asked = getattr(body, "max_completion_tokens", None) or body.max_tokens
    if asked is not None and asked > room:
        raise Refusal(
            400,
            f"max_tokens={asked} is more than the {max(room, 0)} tokens that the context has left behind this prompt; lower it",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if room < 1:
        raise Refusal(400, "the prompt fills the context; shorten it", code="context_length_exceeded")
    default = config.defaults
    shape = getattr(body, "response_format", None)
    schema = None
    if isinstance(shape, SchemaFormat):
        schema = shape.json_schema.schema_
    elif isinstance(shape, JsonFormat):
        schema = {"type": "object"}
    return GenerateOptions(
        max_new_tokens=min(default.max_new_tokens, room) if asked is None else asked,
        method=default.method,
        budget=default.budget,
        tree=default.tree,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias),
        bad_words=tuple(body.bad_words or ()),
        seed=body.seed,
        min_new_tokens=body.min_tokens or 0,
        stop=body.stop or (),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        json_schema=schema,
        grammar=body.grammar,
    )


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    for token in given or ():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise Refusal(400, f"logit_bias names token {token[:50]!r}; its keys are token ids", param="logit_bias")
    return {int(token): bias for token, bias in given.items()} if given else None


def messages_of(body: ChatRequest) -> list[dict]:
    """Messages as chat templates know them."""
    return [_message(message) for message in body.messages]


def _message(message: Message) -> dict:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _arguments(text: str) -> dict | str:
    """Templates walk through arguments, so they get the mapping; what is none stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def tools_of(body: ChatRequest) -> list[dict] | None:
    if not body.tools or body.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """A text, token ids, or a list of either."""
    prompt = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)
