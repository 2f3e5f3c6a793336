// The released npm client, unmodified: lists the models, streams one completion, sees an error as its class. Prints one JSON line.
// usage: node npm_client.mjs PACKAGE_DIRECTORY BASE_URL
import { createRequire } from "node:module";
import path from "node:path";

const [directory, baseURL] = process.argv.slice(2);
const { OpenAI } = createRequire(path.join(directory, "package.json"))("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const params = { model, prompt: "In the beginning", max_tokens: 24, temperature: 0 };
const whole = await client.completions.create(params);
let text = "", finish = null, usage = null;
const stream = await client.completions.create({ ...params, stream: true, stream_options: { include_usage: true } });
for await (const part of stream) {
  text += part.choices[0]?.text ?? "";
  finish = part.choices[0]?.finish_reason ?? finish;
  usage = part.usage ?? usage;
}
let error = null;
try {
  await client.completions.create({ ...params, temperature: 9 });
} catch (e) {
  error = { name: e.constructor.name, status: e.status, param: e.param };
}
// Leaving a stream early closes the connection.
const long = await client.completions.create({ ...params, max_tokens: 400, stream: true });
let n = 0;
for await (const _ of long) {
  if (++n === 3) break;
}
console.log(JSON.stringify({ whole: whole.choices[0].text, text, finish, usage, error, n }));
