import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema";
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

const client = (url) => new Anthropic({ baseURL: url, apiKey: "none" });
const said = (content) => [{ role: "user", content }];

main({
  async chat(url) {
    const made = await client(url).messages.create({ model: MODEL, messages: said(BOAT), max_tokens: 30 });
    assert.ok(made.content[0].text);
    const counted = await client(url).messages.countTokens({ model: MODEL, messages: said(BOAT) });
    assert.equal(
      counted.input_tokens,
      made.usage.input_tokens + made.usage.cache_read_input_tokens + made.usage.cache_creation_input_tokens,
    );
  },
  async stream(url) {
    const asked = { model: MODEL, messages: said(BOAT), max_tokens: 30, temperature: 0 };
    const whole = (await client(url).messages.create(asked)).content[0].text;
    const stream = client(url).messages.stream(asked);
    let text = "";
    stream.on("text", (piece) => (text += piece));
    assert.equal((await stream.finalMessage()).content[0].text, whole);
    assert.equal(text, whole);
  },
  async tools(url) {
    const tool = {
      type: "custom",
      name: "weather",
      description: "Tells the weather of a city.",
      input_schema: PARAMETERS,
      parse: (x) => x,
      run: weather,
    };
    const final = await client(url).beta.messages.toolRunner({
      model: MODEL,
      messages: said(ASK),
      max_tokens: 500,
      tools: [tool],
    });
    checkLoop(final.content.at(-1).text);
  },
  async structured(url) {
    const made = await client(url).messages.parse({
      model: MODEL,
      messages: said(PERSON),
      max_tokens: 500,
      temperature: 0,
      frequency_penalty: 0.5,
      output_config: { format: jsonSchemaOutputFormat(PERSON_SCHEMA) },
    });
    checkPerson(made.parsed_output);
  },
  async cancel(url) {
    const pieces = await client(url).messages.create({
      model: MODEL,
      messages: said(ON_AND_ON),
      max_tokens: 30000,
      stream: true,
    });
    await first(5, pieces);
    pieces.controller.abort();
  },
});
