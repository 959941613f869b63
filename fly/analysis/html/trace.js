// The trace view: every token with its origin; what the trace knows of it on hover and focus.

const SOURCES = {
  n: ["ngram", "n-gram", "Proposed by the n-gram lookup, and the target token."],
  d: ["draft", "draft", "Proposed by the draft model, and the target token."],
  e: ["earlier", "earlier run", "Proposed from an earlier run\u2019s output, and the target token."],
  s: ["sibling", "sibling", "Proposed from another sample of this prompt, and the target token."],
  o: ["other", "other document", "Proposed from another document\u2019s output, and the target token."],
  w: ["deferred", "deferred, stood", "Proposed, not the target token, and let stand."],
  r: ["recovered", "recovered", "The target token in place of a draft token that was rejected or rolled back."],
  b: ["bonus", "bonus", "The target token after a draft that was accepted whole."],
  x: ["rolled", "rolled back", "Accepted at first, then dropped."],
};
const PROPOSERS = {
  n: "the n-gram lookup", d: "the draft model", e: "an earlier run\u2019s output",
  s: "another sample of this prompt", o: "another document\u2019s output", t: "the target",
};
const IN_SOME_RUNS = "eso";  // in the legend only if they occur
const tip = el("div", { class: "tip", role: "tooltip", id: "tip", hidden: true });
let shownToken = null;  // the node whose facts the tip holds

addEventListener("scroll", () => shownToken && place(shownToken), { capture: true, passive: true });

/** The columns of a generation (traces.py) as one object per token; missing texts are null. */
function tokensOf(generation, texts) {
  const columns = ["by", "entropy", "index", "round", "window"];
  const textOf = (name, number) => texts[generation[name][number]] ?? null;
  return [...generation.source].map((letter, number) => ({
    letter, number, ...Object.fromEntries(columns.map((name) => [name, generation[name][number]])),
    text: textOf("text", number), target: textOf("target", number), replaced: textOf("replaced", number),
    wasDeferred: generation.by[number] !== "t" && generation.target[number] !== null,
  }));
}

/** generation: columns as traces.py writes them; texts: what their numbers mean. */
function traceView(generation, texts, unit) {
  const tokens = tokensOf(generation, texts);
  const nodes = tokens.map(({ letter, number, round, text }) => el("span", {
    class: `token ${SOURCES[letter][0]}${round !== tokens[number - 1]?.round ? " begins" : ""}`,
    tabindex: number === 0 ? "0" : "-1", "data-number": number, "aria-describedby": tip.id,
  }, tokenText(text)));
  const show = (event) => {
    const node = event.target.closest(".token");
    if (!node || shownToken === node) return;
    hideFacts();
    shownToken = node;
    text.after(tip);
    const token = tokens[node.dataset.number];
    tip.replaceChildren(...facts(tokens, token, unit));
    tip.hidden = false;
    windowOf(tokens, token).forEach(({ number }) => nodes[number].classList.add("in-window"));
    place(node);
  };
  const text = el("div", {
    class: "tokens", role: "group", "aria-label": "Generated tokens; arrow keys move between them",
    onpointerover: show, onclick: show, onpointerleave: hideFacts, onfocusin: show, onfocusout: hideFacts,
    onkeydown: (event) => moveFocus(event, nodes),
  }, nodes);
  return el("div", {}, traceOptions(generation, text), text);
}

function hideFacts() {
  tip.hidden = true;
  shownToken = null;
  document.querySelectorAll(".in-window").forEach((node) => node.classList.remove("in-window"));
}

/** Line ends and half characters must be seen. */
function tokenText(text) {
  return text === "" ? "\u2039\u2026\u203a" : text.replaceAll("\r", "\u240d").replaceAll("\n", "\u21b5\n");
}

function traceOptions(generation, text) {
  const count = (letter) => [...generation.source].filter((each) => each === letter).length;
  const listed = Object.entries(SOURCES).filter(([letter]) => count(letter) || !IN_SOME_RUNS.includes(letter));
  const toggle = (name, className, isOn) => {
    text.classList.toggle(className, isOn);
    return checkbox(name, isOn, (isChecked) => text.classList.toggle(className, isChecked));
  };
  return el("div", { class: "trace-head" },
    el("ul", { class: "legend" }, listed.map(([letter, [className, name, meaning]]) =>
      el("li", { title: meaning }, el("span", { class: `token ${className}` }, name), ` ${count(letter)}`))),
    el("div", { class: "controls" },
      toggle("rolled-back tokens", "with-rolled", true), toggle("mark rounds", "with-rounds", false)));
}

function quoted(text) {
  const seen = text === "" ? "part of a character" : text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  return el("code", {}, seen.replaceAll(" ", "\u2423"));
}

function facts(tokens, token, unit) {
  const [, name, meaning] = SOURCES[token.letter];
  const rows = [
    ["entropy", isNumber(token.entropy) ? `${fixed(token.entropy, 3)} ${unit}` : "not traced"],
    ["target token", token.target === null ? "this token" : quoted(token.target)],
    token.by !== "t" && ["proposed by", PROPOSERS[token.by]],
    token.replaced !== null && ["in place of", quoted(token.replaced)],
    ["window", windowInWords(tokens, token)],
    ["place", `token ${token.index + 1}, round ${token.round}`],
  ];
  return [
    el("p", {}, quoted(token.text), " ", el("b", {}, name)),
    el("p", { class: "note" }, meaning),
    el("dl", {}, rows.filter(Boolean).map(([term, value]) => [el("dt", {}, term), el("dd", {}, value)])),
  ];
}

function windowInWords(tokens, token) {
  if (token.window !== null) return `of the deferral at token ${token.window + 1}`;
  if (!token.wasDeferred) return "in none";
  const length = windowOf(tokens, token).length - 1;
  if (length < 1) return "none followed";
  return token.letter === "w" ? `opened here; the next ${length} matched` : `opened here; it fell after ${length}`;
}

/** The tokens in the same window, its deferral first. */
function windowOf(tokens, token) {
  const opener = token.wasDeferred ? token.index : token.window;
  const before = tokens.slice(0, token.number + 1);
  const first = before.findLast(({ index, wasDeferred }) => index === opener && wasDeferred);
  if (!first) return [];
  const rest = tokens.slice(first.number + 1), end = rest.findIndex(({ window }) => window !== opener);
  const inside = end < 0 ? rest : rest.slice(0, end);
  return [first, ...inside.filter(({ letter }) => (letter === "x") === (first.letter === "x"))];
}

function place(token) {
  const box = token.getClientRects()[0] || token.getBoundingClientRect();
  const width = Math.min(300, innerWidth - 16);
  tip.style.width = `${width}px`;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  const below = box.bottom + 6, high = tip.offsetHeight;
  tip.style.top = `${below + high < innerHeight ? below : Math.max(4, box.top - high - 6)}px`;
}

function moveFocus(event, nodes) {
  if (event.key === "Escape" && !tip.hidden) {
    event.preventDefault();  // the first Escape closes the facts, the next one the dialog
    event.stopPropagation();
    hideFacts();
    return;
  }
  const seen = nodes.filter((node) => node.offsetParent !== null), now = seen.indexOf(event.target);
  const goal = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: seen.length - 1 }[event.key];
  if (goal === undefined || now < 0) return;
  event.preventDefault();
  const next = seen[Math.max(0, Math.min(seen.length - 1, goal))];
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
