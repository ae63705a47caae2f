// What the page asks of the server. Addresses are relative to the page's: no request goes anywhere else.

export async function request(path, options) {
  const response = await fetch(new URL(path, location), options);  // without a password in the page's URL
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw Error(said.error?.message ?? `${response.status} ${response.statusText}`);
}

async function* events(asked, signal) {
  const headers = { "content-type": "application/json" }, body = JSON.stringify(asked);
  const response = await request("v1/chat/completions", { method: "POST", headers, body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw Error(event.error.message);
      yield event;
    }
  }
  throw Error("the answer broke off");
}

// Ask for an answer, {content, reasoning, calls, note, error}, and call `grown` whenever it has grown.
export async function fill(answer, asked, signal, grown) {
  const start = performance.now();
  let first, last, reason;
  try {
    for await (const { choices: [choice], usage } of events(asked, signal)) {
      const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice?.delta ?? {};
      answer.content += content ?? "";
      answer.reasoning += reasoning ?? "";
      for (const call of calls ?? []) {
        const whole = answer.calls[call.index ?? 0] ??= { name: "", arguments: "" };
        whole.name += call.function?.name ?? "";
        whole.arguments += call.function?.arguments ?? "";
      }
      if (content || reasoning || calls?.length) {
        last = performance.now();
        first ??= last;
        grown();
      }
      reason = choice?.finish_reason ?? reason;
      if (usage) answer.note = describe(usage.completion_tokens, first - start, last - first, reason);
    }
  } catch (e) {
    if (signal.aborted) answer.note = "Stopped";
    else answer.error = e instanceof TypeError ? `no answer from the server: ${e.message}` : e.message;
  }
}

function describe(tokens, wait, rest, reason) {  // wait, rest: until the first token and after it, in ms
  const parts = [tokens === 1 ? "1 token" : `${tokens} tokens`];
  if (rest > 0) parts.push(`${((tokens - 1) / rest * 1000).toFixed(1)} per second`);
  if (wait > 0) parts.push(`the first after ${(wait / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push("cut off at the limit");
  return parts.join(", ");
}
