"""A model of the OpenAI Agents SDK that says what it was told to, and knows what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agents import ModelResponse, Usage
from agents.models.interface import Model
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)
from openai.types.responses.response_usage import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)


def said(text: str) -> ResponseOutputMessage:
    part = ResponseOutputText(text=text, type="output_text", annotations=[])
    return ResponseOutputMessage(
        id="m", content=[part], role="assistant", status="completed", type="message"
    )


def call(name: str, arguments: str = "{}", call_id: str = "c1") -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        id="f", call_id=call_id, name=name, arguments=arguments, type="function_call"
    )


class ScriptedModel(Model):
    """Answers with one list of outputs after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.inputs: list[list[Any]] = []

    def _next(self, asked: Any) -> list[Any]:
        self.inputs.append([asked] if isinstance(asked, str) else list(asked))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, list) else [said(answer)]

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        asked = options["input"] if "input" in options else args[1]
        usage = Usage(
            requests=1, input_tokens=100, output_tokens=20, total_tokens=120,
            input_tokens_details=InputTokensDetails(cached_tokens=60, cache_write_tokens=0),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=5),
        )  # fmt: skip
        return ModelResponse(output=self._next(asked), usage=usage, response_id="r")

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        asked = options["input"] if "input" in options else args[1]
        usage = ResponseUsage(
            input_tokens=100, output_tokens=20, total_tokens=120,
            input_tokens_details=InputTokensDetails(cached_tokens=60, cache_write_tokens=0),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=5),
        )  # fmt: skip
        response = Response(
            id="r", created_at=0, model="scripted", object="response", output=self._next(asked),
            tool_choice="none", tools=[], parallel_tool_calls=False, usage=usage,
        )  # fmt: skip
        yield ResponseCompletedEvent(
            response=response, type="response.completed", sequence_number=0
        )
