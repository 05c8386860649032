"use strict";
// What the page does beyond its links and folds: filter, search, keys, copying; the state is the address's fragment.
(() => {
  const FACETS = ["engine", "load", "layer", "fault", "group"];
  const form = document.getElementById("filter");
  const search = form.elements.q;
  const statuses = [...form.querySelectorAll(".statuses button")];
  const selects = FACETS.map((name) => form.elements[name]).filter(Boolean);
  const cells = [...document.querySelectorAll("details.cell")];
  const tiles = new Map([...document.querySelectorAll("a.tile")].map((tile) => [tile.hash.slice(1), tile]));
  const unfold = document.getElementById("unfold");
  const texts = new Map();
  let current = "";

  const textOf = (cell) => {
    if (!texts.has(cell)) texts.set(cell, cell.textContent.toLowerCase());
    return texts.get(cell);
  };
  const byId = (id) => cells.find((cell) => cell.dataset.id === id);
  const shown = () => cells.filter((cell) => !cell.hidden);
  const summaryOf = (cell) => cell.querySelector("summary");
  const say = (text) => { document.getElementById("said").textContent = text; };

  // State <-> fragment. A fragment that is just a cell's id is a plain link.

  const write = (push) => {
    const pairs = new URLSearchParams();
    const wanted = statuses.filter((button) => button.ariaPressed === "true").map((button) => button.dataset.value);
    if (wanted.length) pairs.set("status", wanted.join(","));
    for (const select of selects) if (select.value) pairs.set(select.name, select.value);
    if (search.value.trim()) pairs.set("q", search.value.trim());
    if (current) pairs.set("cell", current);
    const keys = [...pairs.keys()];
    const fragment = keys.length === 1 && keys[0] === "cell" ? current : pairs.toString();
    if (fragment === location.hash.slice(1)) return;
    history[push ? "pushState" : "replaceState"](null, "", fragment ? `#${fragment}` : location.pathname + location.search);
  };

  const read = () => {
    const fragment = location.hash.slice(1);
    const plain = byId(fragment);
    if (!plain && fragment && !fragment.includes("=")) return;  // a section of the page
    const pairs = new URLSearchParams(plain ? "" : fragment);
    const wanted = (pairs.get("status") || "").split(",");
    for (const button of statuses) button.ariaPressed = String(wanted.includes(button.dataset.value));
    for (const select of selects) select.value = pairs.get(select.name) || "";
    search.value = pairs.get("q") || "";
    apply();
    const cell = plain || byId(pairs.get("cell"));
    if (cell) show(cell);
  };

  // Filter

  const matches = (cell) => {
    const wanted = statuses.filter((button) => button.ariaPressed === "true");
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return (!wanted.length || wanted.some((button) => button.dataset.value === cell.dataset.status))
      && selects.every((select) => !select.value || cell.dataset[select.name] === select.value)
      && words.every((word) => textOf(cell).includes(word));
  };

  const apply = () => {
    for (const cell of cells) {
      cell.hidden = !matches(cell);
      const tile = tiles.get(cell.dataset.id);
      if (tile) tile.classList.toggle("out", cell.hidden);
    }
    const count = shown().length;
    document.getElementById("none").hidden = count > 0 || !cells.length;
    document.getElementById("shown").textContent = `${count} of ${cells.length} cells`;
  };

  const clear = () => {
    for (const button of statuses) button.ariaPressed = "false";
    for (const select of selects) select.value = "";
    search.value = "";
    apply();
    write(false);
  };

  const show = (cell) => {
    if (cell.hidden) clear();
    current = cell.dataset.id;
    cell.open = true;
    cell.scrollIntoView({ block: "start" });
    summaryOf(cell).focus({ preventScroll: true });
  };

  const changed = () => { apply(); write(false); };
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => { event.preventDefault(); current = ""; clear(); });
  document.getElementById("clear-none").addEventListener("click", clear);
  for (const button of statuses) {
    button.addEventListener("click", () => { button.ariaPressed = String(button.ariaPressed !== "true"); changed(); });
  }

  // Cells

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#cell-']");
    const cell = link && byId(link.hash.slice(1));
    if (!cell || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    show(cell);
    write(true);
  });
  for (const cell of cells) {
    summaryOf(cell).addEventListener("click", () => {
      current = cell.open ? "" : cell.dataset.id;  // it is about to change
      write(false);
    });
  }
  const foldAll = (open) => { for (const details of document.querySelectorAll("#list details")) details.open = open; };
  unfold.addEventListener("click", () => {
    const open = unfold.ariaPressed !== "true";
    unfold.ariaPressed = String(open);
    unfold.textContent = open ? "Fold all" : "Unfold all";
    for (const cell of cells) cell.open = open;
  });

  // Keys

  const step = (by) => {
    const all = shown();
    if (!all.length) return;
    const at = all.indexOf(document.activeElement.closest("details.cell"));
    const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1);
    summaryOf(all[next]).focus();
  };
  const escape = () => {
    const cell = document.activeElement.closest("details.cell[open]") || byId(current);
    if (document.activeElement === search && !search.value) search.blur();
    else if (document.activeElement !== search && cell && cell.open) {
      cell.open = false;
      current = "";
      summaryOf(cell).focus();
      write(false);
    } else clear();
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select");
    if (event.key === "/" && !typing) search.focus();
    else if (event.key === "Escape") escape();
    else if (event.key === "ArrowDown" && !event.target.matches("select")) step(1);
    else if (event.key === "ArrowUp" && !typing) step(-1);
    else if (event.key === "Enter" && event.target === search && shown().length) { show(shown()[0]); write(true); }
    else return;
    event.preventDefault();
  });

  // Commands

  const copied = async (code, button) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);  // where a page may not write to the clipboard
      button.textContent = "Selected: press Ctrl+C";
    }
    say(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };
  for (const code of document.querySelectorAll("code.command")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", () => copied(code, button));
    code.after(button);
  }

  // Paper shows everything.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of folded) details.open = false; });

  addEventListener("hashchange", read);
  addEventListener("popstate", read);
  form.hidden = false;
  read();
  apply();
})();
