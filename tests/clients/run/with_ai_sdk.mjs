// Vercel's AI SDK, through each of its three providers.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
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

const models = (url) => [
  createOpenAICompatible({ name: "quire", baseURL: `${url}/v1`, supportsStructuredOutputs: true })(MODEL),
  createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(MODEL),
  createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat(MODEL),
  createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(MODEL),
];

main({
  async chat(url) {
    for (const model of models(url)) assert.ok((await generateText({ model, prompt: BOAT, maxOutputTokens: 30 })).text);
  },
  async stream(url) {
    for (const model of models(url)) {
      const asked = { model, prompt: BOAT, maxOutputTokens: 30, temperature: 0 };
      let text = "";
      for await (const piece of streamText(asked).textStream) text += piece;
      assert.equal(text, (await generateText(asked)).text);
    }
  },
  async tools(url) {
    const tools = {
      weather: tool({
        description: "Tells the weather of a city.",
        inputSchema: jsonSchema(PARAMETERS),
        execute: weather,
      }),
    };
    for (const model of models(url)) {
      checkLoop((await generateText({ model, prompt: ASK, tools, stopWhen: stepCountIs(5) })).text);
    }
  },
  async structured(url) {
    for (const model of models(url)) {
      const output = Output.object({ schema: jsonSchema(PERSON_SCHEMA) });
      checkPerson(
        (
          await generateText({
            model,
            prompt: PERSON,
            temperature: 0,
            frequencyPenalty: 0.5,
            maxOutputTokens: 400,
            output,
          })
        ).output,
      );
    }
  },
  async cancel(url) {
    const leave = new AbortController();
    const { textStream } = streamText({ model: models(url)[0], prompt: ON_AND_ON, abortSignal: leave.signal });
    await first(5, textStream);
    leave.abort();
  },
});
