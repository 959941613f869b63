// The trace view: every token with its origin; what the trace knows of it on hover and focus.

const SOURCES = {
  n: ["ngram", "n-gram", "Proposed by the n-gram lookup; the target\u2019s own choice."],
  d: ["draft", "draft", "Proposed by the draft model; the target\u2019s own choice."],
  w: ["deferred", "deferred, stood", "Proposed, not the target\u2019s choice, and let stand."],
  c: ["correction", "target correction", "The target\u2019s own token, where a proposal fell."],
  b: ["bonus", "bonus", "The target\u2019s own token, after a draft that stood whole."],
  r: ["rolled", "rolled back", "Let in for the time being, then taken back."],
};
const PROPOSERS = { n: "the n-gram lookup", d: "the draft model", t: "the target" };
let traceViews = 0;
let shownFacts = null;  // {tip, token}: at most one is open

addEventListener("scroll", () => shownFacts && place(shownFacts.tip, shownFacts.token), { capture: true, passive: true });

/** generation: columns as traces.py writes them; texts: what their numbers mean. */
function traceView(generation, texts, unit) {
  const tip = el("div", { class: "tip", role: "tooltip", id: `tip-${++traceViews}`, hidden: true });
  const tokens = [...generation.source].map((letter, number) => el("span", {
    class: `token ${SOURCES[letter][0]}${generation.round[number] !== generation.round[number - 1] ? " begins" : ""}`,
    tabindex: number === 0 ? "0" : "-1", "data-number": number, "aria-describedby": tip.id,
  }, tokenText(texts[generation.text[number]])));
  const text = el("div", {
    class: "tokens", role: "group", "aria-label": "Generated tokens; arrow keys move between them",
  }, tokens);
  const hide = () => {
    tip.hidden = true;
    if (shownFacts && shownFacts.tip === tip) shownFacts = null;
    text.querySelectorAll(".in-window").forEach((node) => node.classList.remove("in-window"));
  };
  const show = (token) => {
    if (shownFacts && shownFacts.token === token) return;
    hide();
    shownFacts = { tip, token };
    const number = Number(token.dataset.number);
    tip.replaceChildren(...facts(generation, texts, number, unit));
    tip.hidden = false;
    windowOf(generation, number).forEach((other) => tokens[other].classList.add("in-window"));
    place(tip, token);
  };
  const under = (event) => event.target.closest(".token");
  text.addEventListener("pointerover", (event) => under(event) && show(under(event)));
  text.addEventListener("click", (event) => under(event) && show(under(event)));  // a second tap
  text.addEventListener("pointerleave", hide);
  text.addEventListener("focusin", (event) => under(event) && show(under(event)));
  text.addEventListener("focusout", hide);
  text.addEventListener("keydown", (event) => moveFocus(event, tokens, hide, tip));
  return el("div", { class: "trace" }, traceOptions(generation, text), text, tip);
}

/** Line ends and half characters must be seen. */
function tokenText(text) {
  if (text === "") return "\u2039\u2026\u203a";
  return text.replaceAll("\r", "\u240d").replaceAll("\n", "\u21b5\n");
}

function traceOptions(generation, text) {
  const counts = {};
  for (const letter of generation.source) counts[letter] = (counts[letter] || 0) + 1;
  const toggle = (name, className, on) => {
    const box = el("input", { type: "checkbox", checked: on });
    const apply = () => text.classList.toggle(className, box.checked);
    box.addEventListener("change", apply);
    apply();
    return el("label", { class: "check" }, box, name);
  };
  return el("div", { class: "trace-head" },
    el("ul", { class: "legend" }, Object.entries(SOURCES).map(([letter, [className, name, meaning]]) =>
      el("li", { title: meaning }, el("span", { class: `token ${className}` }, name), ` ${counts[letter] || 0}`))),
    el("div", { class: "controls" },
      toggle("rolled-back tokens", "with-rolled", true), toggle("mark rounds", "with-rounds", false)));
}

function quoted(text) {
  const seen = text === "" ? "part of a character" : text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  return el("code", {}, seen.replaceAll(" ", "\u2423"));
}

function facts(generation, texts, number, unit) {
  const letter = generation.source[number], column = (name) => generation[name][number];
  const rows = [["entropy", isNumber(column("entropy")) ? `${fixed(column("entropy"), 3)} ${unit}` : "not traced"]];
  rows.push(["target\u2019s choice", column("choice") < 0 ? "this token" : quoted(texts[column("choice")])]);
  if (generation.by[number] !== "t") rows.push(["proposed by", PROPOSERS[generation.by[number]]]);
  if (column("replaced") >= 0) rows.push(["in place of", quoted(texts[column("replaced")])]);
  rows.push(["window", windowInWords(generation, number)]);
  rows.push(["place", `token ${column("index") + 1}, round ${column("round")}`]);
  return [
    el("p", {}, quoted(texts[column("text")]), " ", el("b", {}, SOURCES[letter][1])),
    el("p", { class: "note" }, SOURCES[letter][2]),
    el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
  ];
}

function wasDeferred(generation, number) {
  return generation.by[number] !== "t" && generation.choice[number] >= 0;
}

function windowInWords(generation, number) {
  if (generation.window[number] >= 0) return `of the deferral at token ${generation.window[number] + 1}`;
  const length = windowOf(generation, number).length - 1;
  if (!wasDeferred(generation, number)) return "in none";
  if (length < 1) return "none followed";
  return generation.source[number] === "w" ? `opened here; the next ${length} matched` : `opened here; it fell after ${length}`;
}

/** Numbers of the tokens in the same window, its deferral first. */
function windowOf(generation, number) {
  const opener = wasDeferred(generation, number) ? generation.index[number] : generation.window[number];
  if (opener < 0) return [];
  let first = number;
  while (first >= 0 && !(generation.index[first] === opener && wasDeferred(generation, first))) first--;
  const result = [first];
  for (let next = first + 1; next < generation.window.length && generation.window[next] === opener; next++) {
    if ((generation.source[next] === "r") === (generation.source[first] === "r")) result.push(next);
  }
  return first < 0 ? [] : result;
}

function place(tip, token) {
  const box = token.getClientRects()[0] || token.getBoundingClientRect();
  const width = Math.min(300, innerWidth - 16);
  tip.style.width = `${width}px`;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  const below = box.bottom + 6, high = tip.offsetHeight;
  tip.style.top = `${below + high < innerHeight ? below : Math.max(4, box.top - high - 6)}px`;
}

function moveFocus(event, tokens, hide, tip) {
  if (event.key === "Escape" && !tip.hidden) {
    event.preventDefault();  // the first Escape closes the facts, the next one the dialog
    event.stopPropagation();
    hide();
    return;
  }
  const seen = tokens.filter((token) => token.offsetParent !== null);
  const now = seen.indexOf(event.target);
  const goal = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: seen.length - 1 }[event.key];
  if (goal === undefined || now < 0) return;
  event.preventDefault();
  const next = seen[Math.max(0, Math.min(seen.length - 1, goal))];
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
