// What every client of the npm registry does: `node with_CLIENT.mjs URL` prints a line of JSON for each of its functions.
// See cells.py, whose counterpart this is.
import assert from "node:assert/strict";

export const MODEL = "embedded";
export const BOAT = "Tell me about a boat.";
export const ASK = "What is the weather in Rome and in Paris?";
export const ON_AND_ON = "Count to a million.";
export const PERSON = "Tell me about Ann, who is 30 and lives in Ulm.";
const SAYS = "It is done.";
const CITIES = ["Rome", "Paris"];
const called = [];

export const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const PERSON_SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

export function weather({ city }) {
  called.push(city);
  return `It is sunny in ${city}.`;
}

export function checkLoop(text) {
  assert.deepEqual(called.splice(0), CITIES);
  assert.ok(text.includes(SAYS), text);
}

export function checkPerson(person) {
  assert.equal(typeof person.name, "string");
  assert.ok(Number.isInteger(person.age), JSON.stringify(person));
}

export async function first(count, pieces) {
  for await (const piece of pieces) if (--count < 0) return piece;
}

// The AI SDK prints its warnings where outcomes are printed.
globalThis.AI_SDK_LOG_WARNINGS = false;

export async function main(cells) {
  for (const [cell, run] of Object.entries(cells)) {
    let outcome;
    try {
      outcome = (await run(`${process.argv[2]}/${cell}`)) ?? "passed";
    } catch (error) {
      outcome = `failed: ${error.stack ?? error}`;
    }
    console.log(JSON.stringify({ cell, outcome }).replace('{"cell":', '{"cell": '));
  }
}
