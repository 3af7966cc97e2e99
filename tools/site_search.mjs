// site_search.mjs SITE QUESTIONS: asks the search of the built site, by its own script, each question of a file of lines
// "question<TAB>page page …"; fails unless one of the pages is among the first three pages found.
import { readFileSync, readdirSync } from "node:fs";
import { runInThisContext } from "node:vm";

const [site, questions] = process.argv.slice(2), HITS = 3;
const folder = `${site}/assets/javascripts/workers`, scripts = readdirSync(folder).filter((name) => /^search\..*\.js$/.test(name));
if (scripts.length !== 1) throw new Error(`${folder}: ${scripts.length} scripts of the search, expected one`);

// Stand-ins for a browser's worker.
let answer = null;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { globalThis.ask = listener; };
globalThis.postMessage = (message) => answer(message.data);
runInThisContext(readFileSync(`${folder}/${scripts[0]}`, "utf8"));
const SETUP = 0, QUERY = 2;
const send = (type, data) => new Promise((resolve) => { answer = resolve; globalThis.ask({ data: { type, data } }); });

const { config, docs } = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
await send(SETUP, { config, docs, options: { suggest: false } });
let failures = 0;
const lines = readFileSync(questions, "utf8").trim().split("\n").map((line) => line.split("\t"));
for (const [question, pages] of lines) {
  const { items } = await send(QUERY, question);
  const found = items.slice(0, HITS).map(([{ location }]) => location.split("#")[0]);
  const isThere = pages.split(" ").some((page) => found.includes(page));
  if (isThere) continue;
  ++failures;
  console.error(`docs: search for "${question}" finds ${found.join(", ") || "nothing"}; expected one of ${pages}`);
}
if (lines.length < 10) throw new Error(`${questions}: ${lines.length} questions, expected ten or more`);
console.log(`${lines.length - failures} of ${lines.length} questions have their page among the first ${HITS} that the site's search finds`);
process.exitCode = failures ? 1 : 0;
