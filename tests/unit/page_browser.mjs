// As much of a browser as the scripts of the page need in node: elements without a layout, and storage that tabs share.
// `import` it before the scripts.

class Text {
  nodeType = 3;

  constructor(text) {
    this.textContent = text;
  }

  remove() {
    this.parent?.take(this);
  }
}

class Element extends EventTarget {
  nodeType = 1;
  childNodes = [];
  parent = null;
  attributes = new Map();
  classes = new Set();
  dataset = {};
  style = { setProperty() {} };
  hidden = false;
  value = "";
  scrollTop = 0;
  scrollHeight = 0;
  clientHeight = 0;
  classList = {
    add: (name) => this.classes.add(name),
    remove: (name) => this.classes.delete(name),
    contains: (name) => this.classes.has(name),
    toggle: (name, isOn) => (isOn ? this.classes.add(name) : this.classes.delete(name)),
  };

  constructor(name) {
    super();
    this.name = name;
  }

  setAttribute(name, value) {
    this.attributes.set(name, String(value));
    if (name === "class") this.classes = new Set(value.split(" "));
  }

  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }

  removeAttribute(name) {
    this.attributes.delete(name);
  }

  take(node) {
    this.childNodes = this.childNodes.filter((one) => one !== node);
    node.parent = null;
  }

  append(...nodes) {
    for (const given of nodes) {
      const node = typeof given === "string" ? new Text(given) : given;
      node.parent?.take(node);
      node.parent = this;
      this.childNodes.push(node);
    }
  }

  replaceChildren(...nodes) {
    for (const node of this.childNodes) node.parent = null;
    this.childNodes = [];
    this.append(...nodes);
  }

  remove() {
    this.parent?.take(this);
  }

  get lastChild() {
    return this.childNodes.at(-1) ?? null;
  }

  get textContent() {
    return this.childNodes.map((node) => node.textContent).join("");
  }

  set textContent(text) {
    this.replaceChildren(...(text ? [text] : []));
  }

  /** All elements within. */
  get all() {
    return this.childNodes.flatMap((node) => (node.nodeType === 1 ? [node, ...node.all] : []));
  }

  click() {
    this.dispatchEvent(new Event("click"));
  }

  focus() {}
}

const byId = new Map();

globalThis.Node = { TEXT_NODE: 3 };
globalThis.document = Object.assign(new EventTarget(), {
  createElement: (name) => new Element(name),
  createElementNS: (_, name) => new Element(name),
  getElementById(id) {
    if (!byId.has(id)) byId.set(id, new Element(id));
    return byId.get(id);
  },
  querySelector: () => null,
});
const page = new EventTarget();
globalThis.addEventListener = (...args) => page.addEventListener(...args);
/** The tab is left, or the page loaded anew. */
export const leave = () => page.dispatchEvent(new Event("pagehide"));

/** The place that a browser keeps texts in, of so many characters. */
export class Place {
  kept = new Map();

  constructor(room = Infinity) {
    this.room = room;
  }

  getItem(name) {
    return this.kept.get(name) ?? null;
  }

  setItem(name, value) {
    const others = [...this.kept].filter(([other]) => other !== name);
    const taken = others.reduce((sum, [, text]) => sum + text.length, 0);
    if (taken + value.length > this.room) throw new DOMException("full", "QuotaExceededError");
    this.kept.set(name, value);
  }

  removeItem(name) {
    this.kept.delete(name);
  }
}

globalThis.localStorage = new Place();
globalThis.sessionStorage = new Place();
