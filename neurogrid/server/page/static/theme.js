// Light or dark, before anything is drawn: as chosen here, else as the system has it.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("neurogrid-theme");
  } catch {
    // Storage is switched off: the system decides.
  }
  if (chosen === "light" || chosen === "dark") {
    document.documentElement.dataset.theme = chosen;
  }
})();
