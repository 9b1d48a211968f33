import assert from "node:assert/strict";
import { ChatOpenAI } from "@langchain/openai";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
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

const model = (url, more) =>
  new ChatOpenAI({ model: MODEL, apiKey: "none", temperature: 0, configuration: { baseURL: `${url}/v1` }, ...more });

main({
  async chat(url) {
    assert.ok((await model(url, { maxTokens: 30 }).invoke(BOAT)).text);
    assert.ok((await model(url, { maxTokens: 30, useResponsesApi: true }).invoke(BOAT)).text);
  },
  async stream(url) {
    const asked = model(url, { maxTokens: 30 });
    let text = "";
    for await (const piece of await asked.stream(BOAT)) text += piece.text;
    assert.equal(text, (await asked.invoke(BOAT)).text);
  },
  async tools(url) {
    const one = tool(weather, { name: "weather", description: "Tells the weather of a city.", schema: PARAMETERS });
    const bound = model(url).bindTools([one]);
    const talk = [new HumanMessage(ASK)];
    let made;
    do {
      talk.push((made = await bound.invoke(talk)));
      for (const call of made.tool_calls)
        talk.push(new ToolMessage({ content: await one.invoke(call.args), tool_call_id: call.id }));
    } while (made.tool_calls.length);
    checkLoop(made.text);
  },
  async structured(url) {
    for (const method of ["functionCalling", "jsonSchema"]) {
      checkPerson(
        await model(url, { frequencyPenalty: 0.5 })
          .withStructuredOutput(PERSON_SCHEMA, { method, name: "person" })
          .invoke(PERSON),
      );
    }
  },
  async cancel(url) {
    const leave = new AbortController();
    await first(5, await model(url).stream(ON_AND_ON, { signal: leave.signal }));
    leave.abort();
  },
});
