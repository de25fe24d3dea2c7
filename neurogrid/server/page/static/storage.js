// What the browser keeps for this page. Where storage is switched off or full, it holds until the page is left.

class Store {
  /** `place()` gives the browser's storage: to ask for it may fail. */
  constructor(place) {
    this.place = place;
    this.here = new Map();
  }

  get(name, fallback = null) {
    try {
      return this.place().getItem(`neurogrid-${name}`) ?? this.here.get(name) ?? fallback;
    } catch {
      return this.here.get(name) ?? fallback;
    }
  }

  /** Keep a text under a name; null forgets it. */
  set(name, value) {
    // What the browser keeps is kept there alone: another tab may change it, or delete it.
    this.here.delete(name);
    try {
      if (value === null) this.place().removeItem(`neurogrid-${name}`);
      else this.place().setItem(`neurogrid-${name}`, value);
    } catch {
      if (value !== null) this.here.set(name, value);
      // Switched off or full, as above: what was kept before must not come back in its place.
      try {
        this.place().removeItem(`neurogrid-${name}`);
      } catch {
        // Nothing was kept.
      }
    }
  }
}

/** Kept until it is deleted, for all tabs: settings. */
export const always = new Store(() => localStorage);
/** Kept until this tab is closed: the key, and the conversation. */
export const thisTab = new Store(() => sessionStorage);
