// Markdown as elements of the page. markdown-it parses it into tokens, and this file makes elements of the tokens.
// No part of a text is ever read as HTML: what looks like a tag is text, because markdown-it has `html: false`,
// and because elements are created here by name, from the short lists below.

import markdownit from "./vendor/markdown-it.mjs";

export const parser = markdownit({ html: false, linkify: true, breaks: true });
parser.validateLink = (url) => /^(https?|mailto):/i.test(url);  // other links stay as they were written
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });  // a bare address is a link if it has its https://

const TAGS = new Set("p ul ol li blockquote hr thead tbody tr th td em strong s".split(" "));
const FIRST_LEVEL = 3;  // of headings: h1 is the page's, h2 are those of questions and answers

// A text that grows is shown in a container, each top-level block of it as one element. Blocks that are complete
// are neither parsed nor touched again, so that a long answer costs time in proportion to its length.
export class Markdown {
  constructor(container) {
    this.container = container;
    this.clear();
  }

  clear() {
    this.container.replaceChildren();
    this.text = "";
    this.start = 0;  // of the blocks that may still change, in characters
    this.complete = 0;  // the blocks before them
    this.definitions = {};  // of links, which later blocks refer to; markdown-it's `env`
  }

  show(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const rest = text.slice(this.start), blocks = blocksOf(parser.parse(rest, this.definitions));
    blocks.forEach((tokens, i) => {
      const old = this.container.children[this.complete + i], made = build(tokens).firstElementChild;
      if (old) change(old, made);
      else this.container.append(made);
    });
    while (this.container.children.length > this.complete + blocks.length) this.container.lastChild.remove();

    // A block is complete when the next one has a whole line: "2" after a list may become its item "2. b".
    const starts = lineStarts(rest), whole = blocks.filter(([{ map: [line] }]) => line + 1 < starts.length);
    if (whole.length > 1) {
      this.start += starts[whole.at(-1)[0].map[0]];
      this.complete += whole.length - 1;
    }
  }

  finish() {  // a definition of a link may come after the blocks that refer to it
    const text = this.text;
    if (!this.definitions.references) return;
    this.clear();
    this.show(text);
  }
}

function lineStarts(text) {
  return [0, ...Array.from(text.matchAll(/\r\n?|\n/g), (end) => end.index + end[0].length)];
}

function blocksOf(tokens) {
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) blocks.push([]);
    blocks.at(-1).push(token);
  }
  return blocks;
}

function build(tokens, into = document.createDocumentFragment()) {
  const open = [into];  // the elements that later tokens are put into, the innermost last
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) open.pop();
    else if (token.nesting === 0) parent.append(leaf(token));
    else if (token.hidden) open.push(parent);  // the paragraphs in a list without blank lines
    else {
      const made = element(token);
      parent.append(made);
      open.push(made.querySelector("table") ?? made);
    }
  }
  return into;
}

function element(token) {
  if (token.type === "heading_open") return make(`h${Math.min(Number(token.tag[1]) + FIRST_LEVEL - 1, 6)}`);
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (token.type === "table_open") {
    const scrolled = group("Table");
    scrolled.className = "table";
    scrolled.append(make("table"));
    return scrolled;
  }
  const made = make(TAGS.has(token.tag) ? token.tag : "span");
  if (token.attrGet("start") !== null) made.start = token.attrGet("start");
  const alignment = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (alignment) made.style.textAlign = alignment[1];
  return made;
}

function leaf(token) {
  switch (token.type) {
    case "inline": return build(token.children);
    case "softbreak": case "hardbreak": return make("br");
    case "hr": return make("hr");
    case "code_inline": return make("code", token.content);
    case "fence": case "code_block": return code(token.content, token.info.trim().split(/\s/)[0]);
    case "image": {  // nothing is loaded from elsewhere: a link to the image
      const made = link(token.attrGet("src"));
      made.textContent = token.content || token.attrGet("src");
      return made;
    }
    default: return token.content;
  }
}

function link(url) {
  const made = make("a");
  made.href = url;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

export function code(text, language) {
  const made = make("div"), bar = make("div"), button = make("button", "Copy"), block = group("Code");
  made.className = "code";
  button.className = "copy";
  button.ariaLabel = "Copy code";
  bar.append(make("span", language), button);
  block.append(make("pre", text.replace(/\n$/, "")));
  made.append(bar, block);
  return made;
}

function group(label) {  // it may scroll by itself, so the keyboard must reach it
  const made = make("div");
  made.role = "group";
  made.ariaLabel = label;
  made.tabIndex = 0;
  return made;
}

function make(name, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

// Make `old` equal to `made`, and keep those of its nodes that are equal already: a selection, the keyboard's focus
// and the place to which a block was scrolled outlive the next word.
export function change(old, made) {
  if (old.isEqualNode(made)) return;
  if (!old.cloneNode().isEqualNode(made.cloneNode())) {
    if (old.nodeType === Node.TEXT_NODE && made.nodeType === Node.TEXT_NODE) old.data = made.data;
    else old.replaceWith(made);
    return;
  }
  const before = [...old.childNodes], after = [...made.childNodes];
  after.forEach((node, i) => before[i] ? change(before[i], node) : old.append(node));
  before.slice(after.length).forEach((node) => node.remove());
}
