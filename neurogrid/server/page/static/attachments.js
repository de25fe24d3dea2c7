// Images that go with the next message: chosen, pasted or dropped. Only where the model takes them.

import { byId, html, setText } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// What the server takes of one prompt.
const MAX_IMAGES = 16;
// A file that is larger is drawn anew, with this many pixels a side at most: models see fewer, and the browser keeps it.
const MAX_BYTES = 1_000_000;
const MAX_SIDE = 2048;

export class Attachments {
  /** `isTaken()` tells whether the model takes images. */
  constructor(isTaken) {
    this.isTaken = isTaken;
    this.urls = []; // data: URLs
    this.list = byId("attached");
    this.note = byId("attached-note");
    this.button = byId("attach");
    this.input = byId("attach-file");
    const form = byId("composer");
    this.button.addEventListener("click", () => this.input.click());
    this.input.addEventListener("change", () => {
      this.add([...this.input.files]); // the list is emptied with the field
      this.input.value = "";
    });
    byId("prompt").addEventListener("paste", (event) => {
      if (!this.isTaken() || !event.clipboardData.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
    const chat = byId("chat");
    chat.addEventListener("dragover", (event) => {
      if (!this.isTaken() || !event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      form.classList.add("is-over");
    });
    chat.addEventListener("dragleave", () => form.classList.remove("is-over"));
    chat.addEventListener("drop", (event) => {
      form.classList.remove("is-over");
      if (!this.isTaken() || !event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  /** Show whether there can be any. */
  draw() {
    this.button.hidden = !this.isTaken();
  }

  async add(files) {
    setText(this.note, "");
    for (const file of files) {
      let url = null;
      try {
        if (this.urls.length < MAX_IMAGES) url = await urlOf(file);
      } catch {
        setText(this.note, `${file.name || "That"} is no image in PNG, JPEG, WebP or GIF.`);
        continue;
      }
      // Others may have come while this one was read.
      if (this.urls.length >= MAX_IMAGES) {
        setText(this.note, `A message has ${MAX_IMAGES} images at most.`);
        break;
      }
      this.urls.push(url);
      this.show();
    }
    byId("prompt").focus();
  }

  /** Those that are there, which are then no more. */
  take() {
    const urls = this.urls;
    this.urls = [];
    setText(this.note, "");
    this.show();
    return urls;
  }

  show() {
    this.list.hidden = !this.urls.length;
    const items = this.urls.map((url, index) => {
      const name = `Image ${index + 1}`;
      const gone = html("button", { type: "button", class: "attached-gone", "aria-label": `Leave out: ${name}` }, "×");
      gone.addEventListener("click", () => {
        this.urls.splice(index, 1);
        this.show();
      });
      return html("li", {}, html("img", { src: url, alt: name }), gone);
    });
    this.list.replaceChildren(...items);
  }
}

/** A file as a data: URL. */
async function urlOf(file) {
  if (!TYPES.includes(file.type)) throw new TypeError(file.type);
  const picture = await createImageBitmap(file);
  if (file.size <= MAX_BYTES) return await read(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  const canvas = html("canvas", { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
