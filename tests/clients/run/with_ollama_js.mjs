import assert from "node:assert/strict";
import { Ollama } from "ollama";
import {
  ASK,
  BOAT,
  MODEL,
  ON_AND_ON,
  PARAMETERS,
  PERSON,
  PERSON_SCHEMA,
  checkLoop,
  checkPerson,
  first,
  main,
  weather,
} from "./cells.mjs";

const client = (url) => new Ollama({ host: url });
const said = (content) => [{ role: "user", content }];
const few = { num_predict: 30, temperature: 0 };

main({
  async chat(url) {
    const made = await client(url).chat({ model: MODEL, messages: said(BOAT), options: few });
    assert.ok(made.message.content);
    assert.ok((await client(url).list()).models.length);
    assert.ok((await client(url).generate({ model: MODEL, prompt: BOAT, options: few })).response);
  },
  async stream(url) {
    const whole = (await client(url).chat({ model: MODEL, messages: said(BOAT), options: few })).message.content;
    let text = "";
    for await (const piece of await client(url).chat({
      model: MODEL,
      messages: said(BOAT),
      options: few,
      stream: true,
    }))
      text += piece.message.content;
    assert.equal(text, whole);
  },
  async tools(url) {
    const tool = {
      type: "function",
      function: { name: "weather", description: "Tells the weather of a city.", parameters: PARAMETERS },
    };
    const talk = said(ASK);
    let message;
    do {
      ({ message } = await client(url).chat({ model: MODEL, messages: talk, tools: [tool] }));
      talk.push(message);
      for (const call of message.tool_calls ?? [])
        talk.push({ role: "tool", tool_name: "weather", content: weather(call.function.arguments) });
    } while (message.tool_calls?.length);
    checkLoop(message.content);
  },
  async structured(url) {
    const made = await client(url).chat({
      model: MODEL,
      messages: said(PERSON),
      format: PERSON_SCHEMA,
      options: { temperature: 0 },
    });
    checkPerson(JSON.parse(made.message.content));
  },
  async cancel(url) {
    const one = client(url);
    const pieces = await one.chat({ model: MODEL, messages: said(ON_AND_ON), stream: true });
    await first(5, pieces).finally(() => one.abort());
  },
});
