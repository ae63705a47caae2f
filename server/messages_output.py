"""Responses of Anthropic's Messages API, whole or as the events of a stream, and its errors.

Source: https://docs.claude.com/en/api/messages-streaming, and the types of the package anthropic.
"""

import json
import secrets
from collections.abc import Iterator

from server.api_requests import ApiRequest
from server.api_responses import ApiResponse, Usage
from server.loop import Event, Job

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {  # by HTTP status; other statuses below 500 are of invalid requests
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class MessageResponse(ApiResponse):
    """The response to a request of the Messages API.

    index, kind: the number and the type of the block that grows in a stream; None: no block is open.
    """

    end_of_stream = ""  # no [DONE]: the last event says that it is the last

    def __init__(self, request: ApiRequest, jobs: list[Job]):
        super().__init__(request, jobs)
        (self.choice,) = self.choices.values()
        self.index, self.kind = -1, None
        model = request.served.names[0]
        self.head = dict(id=f"msg_{secrets.token_hex(12)}", type="message", role="assistant", model=model)

    def whole(self) -> dict:
        """The whole response. A call that the limit has cut is left out."""
        stream, content = self.choice.job.stream, []
        if stream.reasoning:
            content.append(dict(type="thinking", thinking=stream.reasoning, signature=self.head["id"]))
        if self.choice.text:
            content.append(dict(type="text", text=self.choice.text))
        for call in stream.tool_calls:
            if call.complete:
                own = dict(id=call.id, name=call.name, input=json.loads(call.arguments))
                content.append(dict(type="tool_use") | own)
        return self.head | dict(content=content, usage=usage_as_json(self.usage())) | self._ending()

    def first_chunks(self) -> Iterator[dict]:
        begun = dict(content=[], usage=usage_as_json(self.usage()), stop_reason=None, stop_sequence=None)
        yield dict(type="message_start", message=self.head | begun)

    def chunks(self, job: Job, event: Event) -> list[dict]:
        """Add an event of the answer: -> the events of the stream that report it."""
        self.add(job, event)
        events = []
        if event.reasoning:
            events += self._begin("thinking", thinking="", signature="")
            events.append(self._delta("thinking_delta", thinking=event.reasoning))
        if event.text:
            events += self._begin("text", text="")
            events.append(self._delta("text_delta", text=event.text))
        for piece in event.calls:
            if piece.id is not None:
                events += self._end() + self._begin("tool_use", id=piece.id, name=piece.name, input={})
            if piece.arguments:
                events.append(self._delta("input_json_delta", partial_json=piece.arguments))
        return events + (self._end() if event.finish_reason else [])

    def last_chunks(self) -> Iterator[dict]:
        yield dict(type="message_delta", delta=self._ending(), usage=usage_as_json(self.usage()))
        yield dict(type="message_stop")

    def failed_chunks(self, message: str, status: int) -> Iterator[dict]:
        """The last event of an answer that ends with an error. status: HTTP's, had the stream not begun."""
        yield error_as_json(message, status)

    def _ending(self) -> dict:
        stop = self.choice.job.stream.stop_string
        reason = "stop_sequence" if stop else STOP_REASONS[self.choice.finish_reason]
        return dict(stop_reason=reason, stop_sequence=stop)

    def _begin(self, kind: str, **fields) -> list[dict]:
        """Begin a block of this type, after the end of the one before it, unless one is open."""
        if self.kind == kind:
            return []
        events = self._end()
        self.index, self.kind = self.index + 1, kind
        block = dict(type=kind) | fields
        return [*events, dict(type="content_block_start", index=self.index, content_block=block)]

    def _delta(self, kind: str, **fields) -> dict:
        return dict(type="content_block_delta", index=self.index, delta=dict(type=kind) | fields)

    def _end(self) -> list[dict]:
        """End the open block, if there is one. Clients send back only thinking that has a signature."""
        kind, self.kind = self.kind, None
        if kind is None:
            return []
        signed = [self._delta("signature_delta", signature=self.head["id"])] if kind == "thinking" else []
        return [*signed, dict(type="content_block_stop", index=self.index)]


def usage_as_json(usage: Usage) -> dict:
    """The tokens of the prompt that were in the cache are not among the input_tokens."""
    return dict(
        input_tokens=usage.prompt - usage.cached, cache_read_input_tokens=usage.cached,
        cache_creation_input_tokens=0, output_tokens=usage.answer,
        output_tokens_details=dict(thinking_tokens=usage.reasoning),
    )  # fmt: skip


def error_as_json(message: str, status: int) -> dict:
    """status: HTTP's."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return dict(type="error", error=dict(type=kind, message=message))
