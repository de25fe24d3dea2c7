// Markdown, as elements. The library marked says what a text consists of; the elements are made here, from a fixed set.
// Nothing that a model writes becomes markup: HTML in it is shown as it stands, an address leads somewhere only as http,
// https or mailto, and a picture is a link, for nothing is loaded that nobody asked for.

import { html } from "./dom.js";
import { Lexer } from "./marked.js";

// Beyond these a text is shown as it stands. Characters; milliseconds that one reading of it took.
const MAX_LENGTH = 200_000;
const MAX_READING = 250;
const ADDRESS = /^(?:https?:\/\/|mailto:)/i;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const OPTIONS = { gfm: true, breaks: true };

/** A text that grows, as elements of `parent`; those that stay the same are kept, and what is selected in them. */
export class Markdown {
  constructor(parent) {
    this.parent = parent;
    this.shown = []; // of each block: what it was made from
    this.isPlain = false;
  }

  update(text) {
    const blocks = this.read(text);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && this.shown[same] === blocks[same].from) same += 1;
    while (this.parent.childNodes.length > same) this.parent.lastChild.remove();
    for (const block of blocks.slice(same)) this.parent.append(block.make());
    this.shown = blocks.map((block) => block.from);
  }

  read(text) {
    if (!this.isPlain && text.length <= MAX_LENGTH) {
      const began = performance.now();
      try {
        const tokens = new Lexer(OPTIONS).lex(text);
        this.isPlain = performance.now() - began > MAX_READING;
        const names = Object.keys(tokens.links).join(" "); // a name that is explained later changes what stands before
        return tokens.filter(isShown).map((token) => ({ from: `${token.type} ${names} ${token.raw}`, make: () => block(token) }));
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        this.isPlain = true; // nested so deep that the reader has no stack left
      }
    }
    return [{ from: `plain ${text}`, make: () => html("p", { class: "plain" }, text) }];
  }
}

function isShown(token) {
  return token.type !== "space" && token.type !== "def";
}

function blocks(tokens) {
  return tokens.filter(isShown).map(block);
}

function block(token) {
  switch (token.type) {
    case "paragraph":
      return html("p", {}, ...inlines(token.tokens));
    case "text": // of an item of a tight list
      return html("span", {}, ...(token.tokens ? inlines(token.tokens) : [decoded(token.text)]));
    case "heading":
      return html(`h${Math.min(token.depth + 2, 6)}`, {}, ...inlines(token.tokens));
    case "code":
      return code(token);
    case "blockquote":
      return html("blockquote", {}, ...blocks(token.tokens));
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return html("hr");
    default: // HTML among them
      return html("p", {}, token.raw.trimEnd());
  }
}

function code(token) {
  const button = html("button", { type: "button", class: "text-button copy-code" }, "Copy");
  copies(button, () => token.text);
  const language = (token.lang ?? "").split(/\s/)[0].slice(0, 32);
  return html(
    "div",
    { class: "code" },
    html("div", { class: "code-head" }, html("span", {}, language), button),
    html("pre", { tabindex: "0" }, html("code", {}, token.text)),
  );
}

/** Have a button copy what `text()` gives. */
export function copies(button, text) {
  const name = button.textContent;
  button.addEventListener("click", async () => {
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      said = "Not allowed"; // no permission, or a page that came without TLS from another machine
    }
    button.textContent = said;
    setTimeout(() => (button.textContent = name), 1500);
  });
}

function list(token) {
  const items = token.items.map((item) => {
    const box = item.task ? [html("input", { type: "checkbox", disabled: true, checked: item.checked }), " "] : [];
    return html("li", {}, ...box, ...blocks(item.tokens.filter((part) => part.type !== "checkbox")));
  });
  const start = token.ordered && token.start !== 1 ? token.start : null;
  return html(token.ordered ? "ol" : "ul", { start }, ...items);
}

function table(token) {
  const row = (cells, name) =>
    html("tr", {}, ...cells.map((cell) => html(name, { class: cell.align && `is-${cell.align}` }, ...inlines(cell.tokens))));
  return html(
    "div",
    { class: "table", tabindex: "0" },
    html(
      "table",
      {},
      html("thead", {}, row(token.header, "th")),
      html("tbody", {}, ...token.rows.map((cells) => row(cells, "td"))),
    ),
  );
}

function inlines(tokens) {
  return tokens.map(inline);
}

function inline(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return html(token.type, {}, ...inlines(token.tokens));
    case "codespan":
      return html("code", {}, token.text);
    case "br":
      return html("br");
    case "link":
      return link(token.href, inlines(token.tokens), token.raw);
    case "image":
      return link(token.href, [`Picture: ${token.text || token.href}`], token.raw);
    case "escape":
      return token.text;
    case "text":
      return token.tokens ? html("span", {}, ...inlines(token.tokens)) : decoded(token.text);
    default: // HTML among them
      return token.raw;
  }
}

function link(address, children, raw) {
  if (!ADDRESS.test(address)) return raw;
  return html("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, ...children);
}

/** A text with the entities that people write: `&lt;`, `&#960;`. Others stay as they stand. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,6}));/g, (whole, decimal, hexadecimal, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const number = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
    return number > 0 && number <= 0x10ffff ? String.fromCodePoint(number) : "\ufffd";
  });
}
