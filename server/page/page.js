// The chat page: what is seen, what the user does, and what the browser keeps.

import { fill, request } from "./client.js";
import { Markdown, change, code } from "./markdown.js";

const find = (selector, where = document) => where.querySelector(selector);
const copy = (template) => find(template).content.firstElementChild.cloneNode(true);
const log = find("#log"), settings = find("#settings"), status = find("#status");
const composer = find("#composer"), input = find("textarea", composer);

// A conversation is {id, exchanges}; an exchange {question, answers, chosen}, with `chosen` the place of the answer
// that is shown and sent along with the next question; an answer {content, reasoning, calls, note, error}. All are
// texts as the user and the model wrote them.
const requests = new Map();  // exchange -> the AbortController of its request
const views = new WeakMap();  // exchange -> the elements that show it
let shown;  // a conversation
let edited;  // the exchange in it that the next question replaces, with those after it

const emptyAnswer = () => ({ content: "", reasoning: "", calls: [], note: "", error: "" });
const answerOf = (exchange) => exchange.answers[exchange.chosen];
const running = (conversation) => requests.get(conversation.exchanges.at(-1));
const titleOf = (conversation) => conversation.exchanges[0].question;

// What the browser keeps, if it does: each conversation by itself, as another tab may keep others.

const PREFIX = "llama-jax conversation ", SETTINGS = "llama-jax settings";
const doNotKeep = () => { find("#conversations small").hidden = false; };
let storage = {};
try { storage = localStorage; } catch { doNotKeep(); }

const keys = Object.keys(storage).filter((key) => key.startsWith(PREFIX)).sort().reverse();
const conversations = keys.map((key) => readConversation(storage[key]));  // the latest first
const kept = JSON.parse(storage[SETTINGS] ?? "{}");
for (const field of settings.elements) field.value = kept[field.name] ?? "";

function readConversation(text) {
  const { id, exchanges } = JSON.parse(text);
  const read = ({ question, answers, chosen = 0, answer, error, note }) => (  // `answer`: of an older page
    { question, answers: answers ?? [{ ...emptyAnswer(), content: answer, error, note }], chosen }
  );
  return { id, exchanges: exchanges.map(read) };
}

function store(key, value) {
  try { storage[key] = JSON.stringify(value); } catch { doNotKeep(); }
}

function keep(conversation) {
  if (conversations.includes(conversation)) store(PREFIX + conversation.id, conversation);
}

// How answers are drawn. Where neither the checkpoint nor the command line says it, OpenAI's API would draw from
// all tokens at temperature 1, which is gibberish from a small model. Greedy answers of a small model repeat
// themselves, and Retry would not change them. These numbers lie between.

const CAREFUL = { temperature: 0.5, top_p: 0.9 };
const NEUTRAL = { temperature: 1, top_p: 1, min_p: 0 };  // what no number means to the server
let defaults = {};  // the server's, by name
let suggested = CAREFUL;  // the page's, for what the server has no default for

function useDefaults(given) {
  defaults = given;
  suggested = "temperature" in given ? {} : CAREFUL;
  find("#origin").textContent = "temperature" in given
    ? "What is left empty is what the checkpoint, or the server's command line, gives."
    : "Neither the checkpoint nor the server's command line says how to draw: where temperature and top p are left "
      + `empty, this page asks for ${suggested.temperature} and ${suggested.top_p}.`;
  showSettings();
}

function showSettings() {
  const usual = { ...suggested, ...defaults };
  const numbers = [...settings.elements].filter((field) => field.type === "number");
  for (const field of numbers) field.placeholder = usual[field.name] ?? "";
  for (const slider of settings.querySelectorAll("[data-of]")) {
    const name = slider.dataset.of;
    slider.value = settings[name].value || (usual[name] ?? NEUTRAL[name]);
  }
  document.documentElement.dataset.theme = settings.elements.theme.value;
}

// A request to the API, with the exchanges that have answers, and the last one's question.

function messagesOf(exchanges) {
  const answered = exchanges.filter((exchange) => answerOf(exchange)?.content);
  const messages = answered.flatMap((exchange) => [
    { role: "user", content: exchange.question }, { role: "assistant", content: answerOf(exchange).content },
  ]);
  const system = settings.elements.system.value;
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function chat(exchanges) {
  const { question, chosen } = exchanges.at(-1);
  const messages = [...messagesOf(exchanges.slice(0, -1)), { role: "user", content: question }];
  const { system, theme, ...numbers } = Object.fromEntries(new FormData(settings));
  const given = Object.entries(numbers).filter(([, x]) => x).map(([name, x]) => [name, Number(x)]);
  const sampling = { ...suggested, ...Object.fromEntries(given) };
  if ("seed" in sampling) sampling.seed += chosen;  // each alternative is another draw
  return { messages, ...sampling, stream: true, stream_options: { include_usage: true } };
}

async function answer(conversation) {  // the last question, in addition to the answers that it has
  const exchange = conversation.exchanges.at(-1), controller = new AbortController(), filled = emptyAnswer();
  exchange.answers = exchange.answers.filter((x) => x.content || x.reasoning || x.calls.length);  // no mere errors
  exchange.chosen = exchange.answers.push(filled) - 1;
  requests.set(exchange, controller);
  say("Answering");
  draw(exchange);
  let frame;  // the answer is drawn at most once per frame of the screen
  const grown = () => { frame ??= requestAnimationFrame(() => { frame = undefined; draw(exchange); }); };
  await fill(filled, chat(conversation.exchanges), controller.signal, grown);
  cancelAnimationFrame(frame);
  requests.delete(exchange);
  draw(exchange);
  keep(conversation);
  if (conversation === shown) say(filled.error || filled.note, find(".answer", views.get(exchange)).textContent);
}

function say(...texts) {  // to a screen reader: an answer is read when it is complete, not at each of its tokens
  status.textContent = texts.join(". ");
}

// What is seen.

function show(conversation) {
  shown = conversation;
  find("#conversations ul").replaceChildren(...conversations.map(entry));
  log.replaceChildren(...shown.exchanges.map(article));
  log.scrollTop = log.scrollHeight;
  find("[popovertarget=export]").disabled = !shown.exchanges.length;
  showBusy();
  edit(null);
}

function showBusy() {
  document.body.classList.toggle("busy", Boolean(running(shown)));
}

function entry(conversation) {
  const item = copy("#entry"), title = find(".title", item), remover = find(".delete", item);
  title.textContent = titleOf(conversation);
  title.onclick = () => show(conversation);
  if (conversation === shown) title.ariaCurrent = "true";
  remover.ariaLabel = `Delete “${titleOf(conversation).slice(0, 60)}”`;
  remover.onclick = () => remove(conversation);
  return item;
}

function article(exchange) {
  if (!views.has(exchange)) {
    const view = copy("#exchange");
    view.texts = new Markdown(find(".answer", view));
    view.thoughts = new Markdown(find(".thoughts", view));
    find(".question", view).textContent = exchange.question;
    find(".edit", view).onclick = () => edit(exchange === edited ? null : exchange);
    find(".retry", view).onclick = retry;
    find(".previous", view).onclick = () => choose(exchange, exchange.chosen - 1);
    find(".next", view).onclick = () => choose(exchange, exchange.chosen + 1);
    find("footer .copy", view).onclick = ({ target }) => copyText(answerOf(exchange).content, target);
    views.set(exchange, view);
    draw(exchange);
  }
  return views.get(exchange);
}

function draw(exchange) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;  // pixels
  const view = views.get(exchange), busy = requests.has(exchange), { answers, chosen } = exchange;
  const { content, reasoning, calls, note, error } = answers[chosen] ?? emptyAnswer();
  view.ariaBusy = busy;
  view.texts.show(content);
  view.thoughts.show(reasoning);
  if (!busy) [view.texts, view.thoughts].forEach((text) => text.finish());
  find(".reasoning", view).hidden = !reasoning;
  find(".reasoning summary", view).textContent = busy && !content ? "Reasoning …" : "Reasoning";
  drawCalls(find(".calls", view), calls);
  find(".error", view).textContent = error;
  find(".note", view).textContent = note;
  find("footer .copy", view).hidden = !content;
  find(".alternatives", view).hidden = answers.length < 2;
  find(".place", view).textContent = `${chosen + 1}/${answers.length}`;
  showBusy();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function drawCalls(list, calls) {  // those that were open stay open
  while (list.children.length > calls.length) list.lastChild.remove();
  calls.forEach((call, i) => {
    const shownCall = list.children[i] ?? list.appendChild(copy("#call"));
    find("summary", shownCall).textContent = `Tool call: ${call.name}`;
    const made = code(call.arguments, "arguments"), old = find(".code", shownCall);
    if (old) change(old, made);
    else shownCall.append(made);
  });
}

// What the user does.

function begin() {
  show({ id: Date.now(), exchanges: [] });
}

function ask(question) {
  if (edited) shown.exchanges.splice(shown.exchanges.indexOf(edited));
  if (!conversations.includes(shown)) conversations.unshift(shown);
  shown.exchanges.push({ question, answers: [], chosen: 0 });
  input.value = "";
  show(shown);
  keep(shown);
  answer(shown);
}

function edit(exchange) {
  if (exchange || edited) input.value = exchange?.question ?? "";
  edited = exchange;
  find(".edited", log)?.classList.remove("edited");
  views.get(exchange)?.classList.add("edited");
  input.focus();
}

function retry() {
  answer(shown);
  log.focus();  // as the button cannot have the keyboard's focus meanwhile
}

function choose(exchange, place) {  // after the last answer comes the first
  const { length } = exchange.answers;
  exchange.chosen = (place + length) % length;
  draw(exchange);
  keep(shown);
  say(`Answer ${exchange.chosen + 1} of ${length}`);
}

function remove(conversation) {
  if (!confirm(`Delete “${titleOf(conversation).slice(0, 60)}”?`)) return;
  conversations.splice(conversations.indexOf(conversation), 1);
  delete storage[PREFIX + conversation.id];
  running(conversation)?.abort();
  if (conversation === shown) begin();
  else show(shown);
}

function stop() {
  running(shown)?.abort();
  input.focus();
}

async function copyText(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyBySelection(text);  // a page that did not come over https has no clipboard, except on this machine
  const label = button.textContent;
  button.textContent = "Copied";
  say("Copied");
  setTimeout(() => { button.textContent = label; }, 1500);
}

function copyBySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

const FILES = {
  json: () => JSON.stringify({ model: find("h1").textContent, messages: messagesOf(shown.exchanges) }, null, 2),
  md: () => messagesOf(shown.exchanges).map(({ role, content }) => `## ${role}\n\n${content}\n`).join("\n"),
};
const TYPES = { json: "application/json", md: "text/markdown" };

function save(format) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([FILES[format]()], { type: TYPES[format] }));
  link.download = `${titleOf(shown).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.${format}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);  // ms; some browsers read it later
}

composer.onsubmit = (event) => {
  event.preventDefault();
  if (input.value.trim() && !running(shown)) ask(input.value.trim());
};
input.onkeydown = (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    composer.requestSubmit();
  }
  if (event.key === "ArrowUp" && !input.value && !running(shown) && shown.exchanges.length) {
    event.preventDefault();
    edit(shown.exchanges.at(-1));
  }
};
document.onkeydown = (event) => {
  if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    begin();
  }
  if (event.key !== "Escape" || find(":popover-open")) return;
  if (running(shown)) stop();
  else if (edited) edit(null);
};
log.onclick = ({ target }) => {
  if (target.matches(".code .copy")) copyText(find("pre", target.closest(".code")).textContent, target);
};
find("#new").onclick = begin;
find("#stop").onclick = stop;
find("#export").onclick = ({ target }) => {
  if (target.value) save(target.value);
  find("#export").hidePopover();
};
settings.oninput = ({ target }) => {
  if (target.dataset.of) settings[target.dataset.of].value = target.value;
  showSettings();
  store(SETTINGS, Object.fromEntries(new FormData(settings)));
};
addEventListener("pagehide", () => conversations.filter(running).forEach(keep));

async function greet() {
  try {
    const { data: [{ id, default_sampling: given }] } = await (await request("v1/models")).json();
    find("h1").textContent = document.title = id;
    useDefaults(given ?? {});
  } catch (e) {
    find("h1").textContent = e.message;
    setTimeout(greet, 2000);
  }
}

useDefaults({});
if (conversations.length) show(conversations[0]);
else begin();
greet();
