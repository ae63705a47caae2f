"""Responses of OpenAI's Responses API, whole or as events of a stream.

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from conversation.tool_calls import CallPiece
from server.api_responses import ApiResponse, Choice, Usage
from server.loop import Event, Job
from server.responses_input import ResponsesRequest, name_functions


class ResponseObject(ApiResponse):
    """The response to a request of the Responses API.

    output: its items so far: reasoning, a message, function calls. The last one is `open` while it grows.
    """

    end_of_stream = ""  # no [DONE]: the last event says that it is the last

    def __init__(self, request: ResponsesRequest, jobs: list[Job]):
        super().__init__(request, jobs)
        self.output: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self.logprobs: list[dict] = []  # of tokens whose text is still to come
        self.status, self.sequence_number = "in_progress", 0
        self.functions = {name: (x, tool) for name, x, tool in name_functions(request.asked["tools"])}
        sampling, asked = request.requests[0].sampling, request.asked
        self.head = dict(
            id=f"resp_{secrets.token_hex(12)}", object="response", created_at=int(time.time()),
            model=request.served.names[0], background=False, store=False, previous_response_id=None,
            instructions=asked.get("instructions"), max_output_tokens=asked.get("max_output_tokens"),
            temperature=float(sampling.temperature or 0),
            top_p=1.0 if sampling.top_p is None else float(sampling.top_p),
            tools=asked["tools"], tool_choice=asked.get("tool_choice", "auto"),
            parallel_tool_calls=asked.get("parallel_tool_calls", True),
            text={"format": {"type": "text"}} | asked.get("text", {}),
            reasoning={"effort": None, "summary": None} | asked.get("reasoning", {}),
            truncation=asked.get("truncation", "disabled"), top_logprobs=asked.get("top_logprobs", 0),
            metadata=asked.get("metadata", {}), user=asked.get("user"),
        )  # fmt: skip

    def add(self, job: Job, event: Event) -> Choice:
        self.chunks(job, event)
        return self.choices[job]

    def first_chunks(self) -> Iterator[dict]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.whole())

    def chunks(self, job: Job, event: Event) -> list[dict]:
        """Add an event of the answer: -> the events of the stream that report it."""
        choice, before = super().add(job, event), self.choices[job].scored
        if event.finish_reason in ("error", "timeout", "cancelled"):
            return []
        choice.scored, events = choice.used, []
        if event.reasoning:
            events += self._add_text("reasoning", event.reasoning)
        else:
            self.logprobs += self.token_entries(choice, before, choice.used) or []
        if event.text:
            events += self._add_text("message", event.text)
        for piece in event.calls:
            events += self._add_call(piece)
        if event.finish_reason:
            if not self.output:  # an empty answer is an empty text
                events += self._begin("message")
            self.status = "incomplete" if event.finish_reason == "length" else "completed"
            events += self._finish(self.status)
        return events

    def last_chunks(self) -> Iterator[dict]:
        yield self._event(f"response.{self.status}", response=self.whole())

    def failed_chunks(self, message: str, status: int) -> Iterator[dict]:
        """The last event of an answer that ends with an error. status: HTTP's, had the stream not begun."""
        code = "invalid_prompt" if status < 500 else "server_error"
        self.status = "failed"
        error = dict(code=code, message=message)
        yield self._event("response.failed", response=self.whole() | dict(error=error))

    def whole(self) -> dict:
        """The whole response, with what there is of the answer so far."""
        reason = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        ended = self.status in ("completed", "incomplete")
        return self.head | dict(
            status=self.status, error=None, incomplete_details=reason, output=list(self.output),
            usage=usage_as_json(self.usage()) if ended else None,
        )  # fmt: skip

    def _event(self, kind: str, **fields) -> dict:
        self.sequence_number += 1
        return dict(type=kind, sequence_number=self.sequence_number - 1) | fields

    def _item_event(self, kind: str, **fields) -> dict:
        """An event of the last item."""
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _begin(self, kind: str, **fields) -> list[dict]:
        """Begin an item of the output, after the end of the one before it."""
        events = self._finish("completed")
        new = {
            "message": dict(id=f"msg_{secrets.token_hex(12)}", role="assistant", content=[]),
            "reasoning": dict(id=f"rs_{secrets.token_hex(12)}", summary=[], content=[]),
            "function_call": dict(id=f"fc_{secrets.token_hex(12)}", arguments=""),
        }[kind]
        self.open = dict(type=kind, status="in_progress") | new | fields
        self.output.append(self.open)
        index = len(self.output) - 1
        copy = self.open | ({"content": []} if "content" in self.open else {})
        events.append(self._event("response.output_item.added", output_index=index, item=copy))
        if kind != "function_call":
            part = {"message": dict(type="output_text", text="", annotations=[], logprobs=[]),
                    "reasoning": dict(type="reasoning_text", text="")}[kind]  # fmt: skip
            self.open["content"].append(part)
            added = self._item_event("response.content_part.added", content_index=0, part=dict(part))
            events.append(added)
        return events

    def _add_text(self, kind: str, text: str) -> list[dict]:
        """Add to the text of an item of this kind, whose content has one part."""
        events = [] if self.open and self.open["type"] == kind else self._begin(kind)
        part = self.open["content"][0]
        part["text"] += text
        fields = dict(content_index=0, delta=text)
        if kind == "message":
            fields["logprobs"], self.logprobs = self.logprobs, []
            part["logprobs"] += fields["logprobs"]
        return [*events, self._item_event(f"response.{part['type']}.delta", **fields)]

    def _add_call(self, piece: CallPiece) -> list[dict]:
        events = []
        if piece.id is not None:
            namespace, function = self.functions[piece.name]
            known = dict(name=function["name"]) | (dict(namespace=namespace) if namespace else {})
            events += self._begin("function_call", call_id=piece.id, **known)
        if piece.arguments:
            self.open["arguments"] += piece.arguments
            delta = piece.arguments
            events.append(self._item_event("response.function_call_arguments.delta", delta=delta))
        return events

    def _finish(self, status: str) -> list[dict]:
        """End the open item, if there is one, with this status."""
        item, self.open = self.open, None
        if item is None:
            return []
        item["status"], events = status, []
        if item["type"] == "function_call":
            fields = dict(name=item["name"], arguments=item["arguments"])
            events.append(self._item_event("response.function_call_arguments.done", **fields))
        else:
            (part,) = item["content"]
            fields = dict(content_index=0, text=part["text"])
            if item["type"] == "message":
                fields["logprobs"] = part["logprobs"]
            events.append(self._item_event(f"response.{part['type']}.done", **fields))
            events.append(self._item_event("response.content_part.done", content_index=0, part=part))
        index = len(self.output) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=dict(item))]


def usage_as_json(usage: Usage) -> dict:
    return dict(
        input_tokens=usage.prompt, output_tokens=usage.answer, total_tokens=usage.prompt + usage.answer,
        input_tokens_details=dict(cached_tokens=usage.cached, cache_write_tokens=0),
        output_tokens_details=dict(reasoning_tokens=usage.reasoning),
    )  # fmt: skip
