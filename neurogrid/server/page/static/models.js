// Which model answers: one that is served, or an adapter on it. To be chosen where there are several; the cluster that is
// shown is that of the one that is chosen.

import { ask } from "./api.js";
import { byId, html } from "./dom.js";
import { always } from "./storage.js";

// Where there are several models, they give way and come back while the page is open.
const LOOK_AGAIN = 5000;

export class Models extends EventTarget {
  /**
   * `served()` is the name of the model that is served; `onChange()` is told when there are others, or another one is
   * chosen. Sends "change" when another cluster is to be shown.
   */
  constructor(served, onChange) {
    super();
    this.served = served;
    this.onChange = onChange;
    this.select = byId("model-choice");
    this.all = [];
    this.shown = "";
    this.select.addEventListener("change", () => {
      always.set("model", this.select.value);
      this.onChange();
      this.follow();
    });
    addEventListener("focus", () => this.look());
    setInterval(() => this.severalModels && this.look(), LOOK_AGAIN);
  }

  /** The name that requests are made under. */
  get name() {
    return this.all.some((one) => one.id === this.select.value) ? this.select.value : this.served();
  }

  /** Whether that one takes images. */
  get takesImages() {
    return this.all.find((one) => one.id === this.name)?.input_modalities?.includes("image") ?? false;
  }

  get severalModels() {
    return this.all.filter((one) => !one.parent).length > 1;
  }

  /** The model of the cluster to show: empty for the one that there is. */
  get cluster() {
    const chosen = this.all.find((one) => one.id === this.name);
    return this.severalModels && chosen ? (chosen.parent ?? chosen.id) : "";
  }

  follow() {
    if (this.cluster === this.shown) return;
    this.shown = this.cluster;
    this.dispatchEvent(new Event("change"));
  }

  /** Ask what there is now: models and adapters come and go while the server runs. */
  async look() {
    if (!this.served()) return;
    let all;
    try {
      all = (await (await ask("/v1/models")).json()).data;
    } catch {
      return; // what was there before stays; the page says elsewhere what is wrong with the connection
    }
    if (JSON.stringify(all) === JSON.stringify(this.all)) return;
    const chosen = this.all.length ? this.select.value : always.get("model");
    this.all = all;
    const text = ({ id, state }) => (!state || state === "ready" ? id : `${id} (${state})`);
    const options = all.map((one) => html("option", { value: one.id, selected: one.id === chosen }, text(one)));
    this.select.replaceChildren(...options);
    this.select.hidden = all.length < 2;
    this.onChange();
    this.follow();
  }
}
