import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ASK,
  BOAT,
  MODEL,
  ON_AND_ON,
  PARAMETERS,
  PERSON,
  checkLoop,
  checkPerson,
  first,
  main,
  weather,
} from "./cells.mjs";

const client = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const said = (content) => [{ role: "user", content }];
const Person = z.object({ name: z.string().max(20), age: z.int() });

main({
  async chat(url) {
    const made = await client(url).chat.completions.create({ model: MODEL, messages: said(BOAT), max_tokens: 30 });
    assert.ok(made.choices[0].message.content);
    const answer = await client(url).responses.create({ model: MODEL, input: BOAT, max_output_tokens: 30 });
    assert.ok(answer.output_text);
    assert.equal((await client(url).models.list()).data[0].id, MODEL);
  },
  async stream(url) {
    const asked = { model: MODEL, messages: said(BOAT), max_tokens: 30, temperature: 0 };
    const whole = (await client(url).chat.completions.create(asked)).choices[0].message.content;
    const runner = client(url).chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
    let text = "";
    runner.on("content", (piece) => (text += piece));
    assert.equal((await runner.finalChatCompletion()).choices[0].message.content, whole);
    assert.equal(text, whole);
    assert.ok((await runner.totalUsage()).completion_tokens > 0);
    text = "";
    const events = await client(url).responses.create({
      model: MODEL,
      input: BOAT,
      max_output_tokens: 30,
      stream: true,
    });
    for await (const event of events) if (event.type === "response.output_text.delta") text += event.delta;
    assert.ok(text);
  },
  async tools(url) {
    const tool = {
      type: "function",
      function: {
        name: "weather",
        description: "Tells the weather of a city.",
        parameters: PARAMETERS,
        parse: JSON.parse,
        function: weather,
      },
    };
    const runner = client(url).chat.completions.runTools({
      model: MODEL,
      messages: said(ASK),
      tools: [tool],
      stream: true,
    });
    checkLoop(await runner.finalContent());
  },
  async structured(url) {
    const made = await client(url).chat.completions.parse({
      model: MODEL,
      messages: said(PERSON),
      temperature: 0,
      frequency_penalty: 0.5,
      response_format: zodResponseFormat(Person, "person"),
    });
    checkPerson(made.choices[0].message.parsed);
    const answer = await client(url).responses.parse({
      model: MODEL,
      input: PERSON,
      temperature: 0,
      text: { format: zodTextFormat(Person, "person") },
    });
    checkPerson(answer.output_parsed);
  },
  async cancel(url) {
    const pieces = await client(url).chat.completions.create({ model: MODEL, messages: said(ON_AND_ON), stream: true });
    await first(5, pieces);
    pieces.controller.abort();
  },
});
