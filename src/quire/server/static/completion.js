// One answer of POST /v1/chat/completions, streamed: its text, reasoning, tool calls, why it ended and how long it took.

/** An Error with what the server said of it: `code` is the API's error code, `status` HTTP's. */
export class Refused extends Error {
  constructor(message, { code = null, status = 0 } = {}) {
    super(message);
    Object.assign(this, { code, status });
  }
}

/** Ask, and call `grown(ids)` whenever more has come: the answer's id, and that of the request. Fills `answer`, which keeps what came before an error. */
export async function complete(asked, answer, signal, grown) {
  const began = performance.now();
  const response = await send(asked, signal);
  const request = response.headers.get("x-request-id");
  for await (const data of events(response.body)) {
    if (data.error) throw new Refused(data.error.message, data.error);
    take(data, answer, (performance.now() - began) / 1e3);
    grown({ answer: data.id, request });
  }
  answer.seconds = (performance.now() - began) / 1e3;
  if (!answer.finish) throw new Refused("The connection ended before the answer did.");
}

async function send(asked, signal) {
  const body = JSON.stringify({ ...asked, stream: true, stream_options: { include_usage: true } });
  const headers = { "content-type": "application/json" };
  let response;
  try {
    response = await fetch("v1/chat/completions", { method: "POST", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(said?.error?.message ?? `The server answered with status ${response.status}.`, {
    code: said?.error?.code,
    status: response.status,
  });
}

function take(data, answer, now) {
  if (data.usage) answer.tokens = data.usage.completion_tokens;
  const choice = data.choices?.[0];
  if (!choice) return;
  const { content, tool_calls: calls } = choice.delta;
  const reasoning = choice.delta.reasoning ?? choice.delta.reasoning_content;
  if (content || reasoning || calls) answer.first ??= now;
  if (reasoning) {
    answer.reasoning += reasoning;
    answer.thought = now - answer.first;
  }
  if (content) answer.content += content;
  for (const call of calls ?? []) {
    const known = (answer.tool_calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= call.id ?? "";
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  answer.finish = choice.finish_reason ?? answer.finish;
}

/** The JSON of each event of a stream, to its end. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

/** A connection that breaks ends the stream, which then lacks its last event: browsers have words of their own for it. */
function lost(error) {
  if (error.name === "AbortError") throw error;
  return { done: true };
}
