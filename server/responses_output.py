"""Responses of OpenAI's Responses API, whole or as events of a stream, built from chunks of the chat API.

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from server.api_responses import ApiResponse
from server.loop import Event, Job
from server.responses_input import ResponsesRequest


class ResponseObject:
    """The response to a request of the Responses API.

    output: its items so far: reasoning, a message, function calls. The last one is `open` while it grows.
    """

    end_of_stream = ""  # no [DONE]: the last event says that it is the last

    def __init__(self, request: ResponsesRequest, jobs: list[Job]):
        self.asked, self.chat = request.asked, ApiResponse(request, jobs)
        self.output: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self.logprobs: list[dict] = []  # of tokens whose text is still to come
        self.status, self.sequence_number = "in_progress", 0
        sampling, asked = request.requests[0].sampling, self.asked
        self.head = dict(
            id=f"resp_{secrets.token_hex(12)}", object="response", created_at=int(time.time()),
            model=request.served.names[0], background=False, store=False, previous_response_id=None,
            instructions=asked.get("instructions"), max_output_tokens=asked.get("max_output_tokens"),
            temperature=float(sampling.temperature or 0),
            top_p=1.0 if sampling.top_p is None else float(sampling.top_p),
            tools=asked.get("tools", []), tool_choice=asked.get("tool_choice", "auto"),
            parallel_tool_calls=asked.get("parallel_tool_calls", True),
            text={"format": {"type": "text"}} | asked.get("text", {}),
            reasoning={"effort": None, "summary": None} | asked.get("reasoning", {}),
            truncation=asked.get("truncation", "disabled"), top_logprobs=asked.get("top_logprobs", 0),
            metadata=asked.get("metadata", {}), user=asked.get("user"),
        )  # fmt: skip

    @property
    def choices(self):
        return self.chat.choices

    def usage(self) -> dict:
        """The usage in the terms of the chat API."""
        return self.chat.usage()

    def add(self, job: Job, event: Event) -> None:
        self.chunks(job, event)

    def whole(self) -> dict:
        """The whole response, when the answer has ended."""
        return self._response()

    def first_chunks(self) -> Iterator[dict]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response())

    def chunks(self, job: Job, event: Event) -> list[dict]:
        """Add an event of the answer: -> the events of the stream that report it."""
        if event.finish_reason in ("error", "timeout", "cancelled"):
            self.chat.add(job, event)
            return []
        choice = self.chat.chunk(job, event)["choices"][0]
        delta, reason = choice["delta"], choice["finish_reason"]
        added = (choice["logprobs"] or {}).get("content", [])
        self.logprobs += [] if delta.get("reasoning_content") else added
        events = []
        if text := delta.get("reasoning_content"):
            events += self._add_text("reasoning", text)
        if text := delta.get("content"):
            events += self._add_text("message", text)
        for call in delta.get("tool_calls", ()):
            events += self._add_call(call)
        if reason:
            if not self.output:  # an empty answer is an empty text
                events += self._begin("message")
            cut = reason == "length"
            self.status = "incomplete" if cut else "completed"
            events += self._finish(self.status)
        return events

    def last_chunks(self) -> Iterator[dict]:
        yield self._event(f"response.{self.status}", response=self._response())

    def failed_chunks(self, message: str, status: int) -> Iterator[dict]:
        """The last event of an answer that ends with an error. status: HTTP's, had the stream not begun."""
        code = "invalid_prompt" if status < 500 else "server_error"
        self.status = "failed"
        error = dict(code=code, message=message)
        yield self._event("response.failed", response=self._response() | dict(error=error))

    def _response(self) -> dict:
        reason = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        ended = self.status in ("completed", "incomplete")
        return self.head | dict(
            status=self.status, error=None, incomplete_details=reason, output=list(self.output),
            usage=self._own_usage() if ended else None,
        )  # fmt: skip

    def _own_usage(self) -> dict:
        usage = self.chat.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return dict(
            input_tokens=usage["prompt_tokens"],
            input_tokens_details=dict(cached_tokens=cached, cache_write_tokens=0),
            output_tokens=usage["completion_tokens"],
            output_tokens_details=dict(reasoning_tokens=reasoning),
            total_tokens=usage["total_tokens"],
        )

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

    def _add_call(self, call: dict) -> list[dict]:
        """Add a chunk of a function call. Only the first chunk of a call has its id and name."""
        events, function = [], call["function"]
        if "id" in call:
            events += self._begin("function_call", call_id=call["id"], name=function["name"])
        if arguments := function.get("arguments"):
            self.open["arguments"] += arguments
            events.append(self._item_event("response.function_call_arguments.delta", delta=arguments))
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
