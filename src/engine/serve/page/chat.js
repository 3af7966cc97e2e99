'use strict';
// Chats with the served model: requests, the text as it arrives, its speed, and chats of before in this browser.
const { $ } = page;
const STORE = 'tandem-serve', SETTINGS = ['kind', 'tokens', 'temperature', 'top-p', 'seed', 'system', 'stop'], MAX_CHATS = 50, MAX_DELETED = 200;
const state = { chats: [], at: -1, running: null, kind: undefined };
const chat = () => state.chats[state.at];

function show(message, bad) {
  $('status').textContent = message;
  $('status').className = bad ? 'bad' : '';
}

// Storage of this browser, shared by all pages of the server. Its text is empty, foreign or refused to this page: nothing.
function stored() {
  try {
    const { settings, chats, deleted } = JSON.parse(localStorage.getItem(STORE));
    return { settings, chats: chats.map((each, i) => ({ id: i, ...each })), deleted: Array.isArray(deleted) ? deleted : [] };
  } catch {
    return { chats: [], deleted: [] };
  }
}

// Keeps the settings, and `changed` as the newest chat, or not at all if this page or another has deleted it; other pages may have
// changed the others. Returns whether another page has.
function store(changed, isDeleted) {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]));
  if ($('kind').disabled) settings.kind = state.kind;  // this model's, not the user's
  const before = stored(), isGone = before.deleted.includes(changed?.id);
  const chats = before.chats.filter(({ id }) => id !== changed?.id);
  const deleted = isDeleted && !isGone ? [...before.deleted, changed.id].slice(-MAX_DELETED) : before.deleted;
  if (changed?.messages.length && !isDeleted && !isGone) chats.push(changed);
  try {
    localStorage.setItem(STORE, JSON.stringify({ settings, chats: chats.slice(-MAX_CHATS), deleted }));
  } catch {  // full, or refused to this page: the chats are those of this visit
  }
  return isGone;
}

function restore() {
  const { settings, chats } = stored();
  for (const name of SETTINGS) $(name).value = settings?.[name] ?? $(name).value;
  state.kind = settings?.kind;
  state.chats = chats;
}

const titleOf = ({ messages }) => messages[0]?.content.replace(/\s+/g, ' ').slice(0, 60) || 'New chat';

function listChats() {
  $('chats').replaceChildren(...state.chats.map((each, i) => new Option(titleOf(each), i, false, i === state.at)).reverse());
}

function open(at) {
  state.at = at;
  listChats();
  drawLog();
  show('');
}

function openNew() {
  if (!chat() || chat().messages.length) state.chats.push({ id: `${Date.now()} ${Math.random()}`, messages: [] });
  open(state.chats.length - 1);
  $('prompt').focus();
}

function button(parent, label, act) {
  const element = page.add(parent, 'button', label);
  element.type = 'button';
  element.addEventListener('click', act);
  return element;
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that is not of this machine has no clipboard
    const area = page.add(document.body, 'textarea', text, 'unseen');
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  const label = from.textContent;
  from.textContent = 'Copied';
  setTimeout(() => { from.textContent = label; }, 1200);
}

function drawText(element, message) {
  const raw = message.role !== 'assistant' || message.prompt !== undefined;
  element.classList.toggle('raw', raw);
  if (!raw) return markdown(element, message.content);
  element.replaceChildren(message.prompt ?? message.content);
  if (message.prompt !== undefined) page.add(element, 'b', message.content, 'added');
}

function drawMessage(message, isLast) {
  const article = page.add($('log'), 'article', null, message.role);
  page.add(article, 'h2', message.prompt !== undefined ? 'Text' : message.role === 'user' ? 'You' : 'Model');
  drawText(page.add(article, 'div', null, 'text'), message);
  const tools = page.add(article, 'div', null, 'tools');
  const copies = button(tools, 'Copy', () => copy((message.prompt ?? '') + message.content, copies));
  if (isLast && message.role === 'assistant') button(tools, 'Regenerate', regenerate);
  page.add(tools, 'span', message.note ?? '', 'note-of');
  return article;
}

function drawLog() {
  $('log').replaceChildren();
  const { messages } = chat();
  messages.forEach((message, i) => drawMessage(message, i === messages.length - 1));
  window.scrollTo(0, document.documentElement.scrollHeight);
}

const headers = () => ({ 'Content-Type': 'application/json', ...($('key').value && { Authorization: `Bearer ${$('key').value}` }) });

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `status ${answer.status}`;
  }
}

async function findModel() {
  const answer = await fetch('v1/models', { headers: headers() });
  if (answer.status === 401) {
    $('key-label').hidden = false;
    $('settings').open = true;
    return show('This server asks for a key (Settings)', true);
  }
  if (!answer.ok) return show(await problem(answer), true);
  const model = (await answer.json()).data[0];
  $('meta').textContent = `${model.id}, ${model.max_model_len} tokens`;
  if (!model.has_chat_template) {
    $('kind').value = 'text';
    $('kind').disabled = true;
    $('meta').textContent += '; it has no chat template, so it continues texts';
  }
  chooseKind();
  show('');
}

function chooseKind() {
  $('prompt').placeholder = $('kind').value === 'chat' ? 'Message' : 'Text to continue';
}

function requestFor(message) {
  const body = { stream: true, stream_options: { include_usage: true } };
  const numbers = { max_tokens: 'tokens', temperature: 'temperature', top_p: 'top-p', seed: 'seed' };
  for (const [field, name] of Object.entries(numbers)) if ($(name).value) body[field] = Number($(name).value);
  const stops = $('stop').value.split('\n').filter(Boolean);
  if (stops.length) body.stop = stops;
  if (message.prompt !== undefined) return { path: 'v1/completions', body: { max_tokens: 128, ...body, prompt: message.prompt } };
  const before = chat().messages.slice(0, -1).filter(({ prompt }) => prompt === undefined);
  body.messages = before.map(({ role, content }) => ({ role, content }));
  if ($('system').value) body.messages.unshift({ role: 'system', content: $('system').value });
  return { path: 'v1/chat/completions', body };
}

// Events of a stream; `each` gets those of its JSON objects.
async function readEvents(answer, each) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ''; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split('\n\n');
    rest = events.pop();
    for (const event of events) if (event.startsWith('data: ') && event !== 'data: [DONE]') each(JSON.parse(event.slice(6)));
  }
}

// Time to the first token, then tokens/s from it to the last one. Tokens that arrive at once have no rate.
function describeSpeed({ begun, first, last, tokens }) {
  const seconds = (last - first) / 1e3, minSeconds = 0.1;
  if (!tokens) return 'no tokens';
  return `${tokens} tokens, the first after ${Math.round(first - begun)} ms` +
    (tokens > 1 && seconds >= minSeconds ? `, then ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : '');
}

async function receive(message, article, times) {
  const text = article.querySelector('.text'), note = article.querySelector('.note-of');
  const { path, body } = requestFor(message);
  const answer = await fetch(path, { method: 'POST', headers: headers(), body: JSON.stringify(body), signal: state.running.signal });
  if (!answer.ok) throw new Error(await problem(answer));
  let drawn = false;
  await readEvents(answer, (chunk) => {
    if (chunk.error) throw new Error(chunk.error.message);
    times.tokens = chunk.usage?.completion_tokens ?? times.tokens;
    for (const choice of chunk.choices) {
      const added = choice.text ?? choice.delta?.content ?? '';
      message.content += added;
      times.finish = choice.finish_reason ?? times.finish;
      if (!added) continue;
      times.last = performance.now();
      times.first ||= times.last;
      if (!chunk.usage) ++times.tokens;
    }
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      const below = document.documentElement.scrollHeight - innerHeight - scrollY;
      drawText(text, message);
      note.textContent = describeSpeed(times);
      if (below < 80) window.scrollTo(0, document.documentElement.scrollHeight);
    });
  });
}

// Adds the answer to the chat's last message; `before` is put back if there is none.
async function answerLast(prompt, before) {
  const shown = chat(), message = { role: 'assistant', content: '', ...(prompt !== undefined && { prompt }) };
  const times = { begun: performance.now(), first: 0, last: 0, tokens: 0, finish: '' };
  shown.messages.push(message);
  drawLog();
  state.running = new AbortController();
  $('go').textContent = 'Stop';
  $('log').setAttribute('aria-busy', 'true');
  show('…');
  try {
    await receive(message, $('log').lastElementChild, times);
    show(times.finish === 'length' ? 'Ended at its limit of tokens' : '');
  } catch (error) {
    const stopped = error.name === 'AbortError';
    show(stopped ? 'Stopped' : error.message, !stopped);
    if (!message.content && (before || !stopped)) shown.messages.splice(-1, 1, ...(before ? [before] : []));
  }
  message.note = describeSpeed(times);
  state.running = null;
  $('go').textContent = 'Send';
  $('log').removeAttribute('aria-busy');
  if (store(shown)) show('Another tab has deleted this chat: it stays until you leave this page');
  listChats();
  if (chat() === shown) drawLog();
}

function send() {
  const text = $('prompt').value;
  if (!text.trim()) return;
  $('prompt').value = '';
  fitPrompt();
  if ($('kind').value === 'text') return answerLast(text);
  const { messages } = chat();
  if (messages.at(-1)?.role === 'user') messages.pop();  // its answer failed
  messages.push({ role: 'user', content: text });
  return answerLast();
}

function regenerate() {
  if (state.running) return;
  const before = chat().messages.pop();
  answerLast(before.prompt, before);
}

function fitPrompt() {
  const area = $('prompt');
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight + 2}px`;
}

$('form').addEventListener('submit', (event) => {
  event.preventDefault();
  if (state.running) state.running.abort();
  else send();
});
$('prompt').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!state.running) send();
});
$('prompt').addEventListener('input', fitPrompt);
$('log').addEventListener('click', ({ target }) => {
  if (target.dataset.copies) copy(target.parentElement.querySelector('pre').textContent, target);
});
$('key').addEventListener('change', findModel);
$('kind').addEventListener('change', chooseKind);
for (const name of SETTINGS) $(name).addEventListener('change', () => store());
$('chats').addEventListener('change', () => { if (!state.running) open(Number($('chats').value)); else listChats(); });
$('new').addEventListener('click', () => { if (!state.running) openNew(); });
$('delete').addEventListener('click', () => {
  if (state.running) return;
  const [deleted] = state.chats.splice(state.at, 1);
  store(deleted, true);
  state.at = state.chats.length - 1;
  if (state.at < 0) openNew();
  else open(state.at);
});
// Another page of this browser has stored: what it has deleted leaves the list, except for the chat that is open here.
window.addEventListener('storage', ({ key }) => {
  if (key !== STORE) return;
  const open = chat(), gone = new Set(stored().deleted);
  state.chats = state.chats.filter((each) => each === open || !gone.has(each.id));
  state.at = state.chats.indexOf(open);
  listChats();
});
page.onTheme(() => {});
restore();
state.at = state.chats.length - 1;
openNew();
findModel().catch((error) => show(error.message, true));
