// Elements, made and changed. Text is always set as text: nothing that a model or a peer says becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/** Change the text only where it is another: a screen reader says again what is written again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

/**
 * Children of `parent`, one for each of `items`, in their order; those that stay are kept as they are.
 * `make(item)` gives an object with `element` and `update(item)`.
 */
export class KeyedList {
  constructor(parent, keyOf, make) {
    this.parent = parent;
    this.keyOf = keyOf;
    this.make = make;
    this.views = new Map();
  }

  update(items) {
    const wanted = new Map(items.map((item) => [this.keyOf(item), item]));
    for (const [key, view] of this.views) {
      if (!wanted.has(key)) {
        view.element.remove();
        this.views.delete(key);
      }
    }
    let place = this.parent.firstChild;
    for (const [key, item] of wanted) {
      let view = this.views.get(key);
      if (!view) {
        view = this.make(item);
        this.views.set(key, view);
      }
      view.update(item);
      if (view.element === place) place = place.nextSibling;
      else this.parent.insertBefore(view.element, place);
    }
  }
}
