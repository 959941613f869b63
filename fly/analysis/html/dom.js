"use strict";
// Elements, numbers and the embedded data. Texts only ever become text nodes or attributes.

const HTML = "http://www.w3.org/1999/xhtml";
const SVG = "http://www.w3.org/2000/svg";
const NONE = "\u2013";

function make(space, name, attributes, children) {
  const node = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null));
  return node;
}

/** An HTML element. Attributes `on...` take functions; null, undefined and false leave one out. */
function el(name, attributes = {}, ...children) {
  return make(HTML, name, attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return make(SVG, name, attributes, children);
}

/** A labelled drop-down. options: [value, text]; `changed` gets the value as a number. */
function choice(name, options, chosen, changed) {
  const select = el("select", { onchange: () => changed(Number(select.value)) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  return el("label", { class: "field" }, name, select);
}

function checkbox(name, isChecked, changed) {
  const box = el("input", { type: "checkbox", checked: isChecked, onchange: () => changed(box.checked) });
  return el("label", { class: "check" }, box, name);
}

function button(text, act, attributes = {}) {
  return el("button", { type: "button", onclick: act, ...attributes }, text);
}

/** What may be wider than the page, and then scrolls by itself. */
function scroller(name, ...children) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, children);
}

/** A plain table: head is a list of texts, the first column heads its rows. */
function table(head, rows, caption) {
  return scroller(caption, el("table", { class: "plain" },
    el("caption", { class: "hidden" }, caption),
    el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map(([first, ...rest]) =>
      el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell)))))));
}

function section(id, title, ...content) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), content);
}

function theme() {
  const toggle = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    const isDark = chosen ?? dark.matches;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    toggle.setAttribute("aria-pressed", String(isDark));
    toggle.textContent = isDark ? "Light theme" : "Dark theme";
  };
  toggle.addEventListener("click", () => { chosen = document.documentElement.dataset.theme !== "dark"; apply(); });
  dark.addEventListener("change", apply);
  apply();
}

/** Puts the page together. links: a text per section; defining: the page of the docs on its numbers. */
function fillPage({ version, created }, head, sections, links, defining) {
  document.getElementById("main").replaceChildren(el("h1", { class: "hidden" }, document.title), ...head, ...sections);
  document.getElementById("sections").append(...sections.map(({ id }, at) => el("a", { href: `#${id}` }, links[at])));
  document.getElementById("footer").append(`fly ${version}, written ${created}. ${defining} defines every number.`);
  theme();
  document.documentElement.dataset.ready = "true";
}

const parsed = new Map();

/** An embedded JSON block, parsed when it is first asked for: texts and traces may be large. */
function block(id) {
  if (!parsed.has(id)) parsed.set(id, JSON.parse(document.getElementById(`data-${id}`).textContent));
  return parsed.get(id);
}

function text(value) {
  return String(value ?? NONE);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function fixed(value, digits = 2) {
  return isNumber(value) ? value.toFixed(digits) : NONE;
}

function times(value) {
  return isNumber(value) ? `${value.toFixed(2)}\u00d7` : NONE;
}

function percent(value, digits = 1) {
  return isNumber(value) ? `${(100 * value).toFixed(digits)}\u00a0%` : NONE;
}

function whole(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en").replaceAll(",", "\u202f") : NONE;
}

/** An interval of numbers in words. */
function between(interval, format) {
  return interval ? `${format(interval.low)} to ${format(interval.high)}` : NONE;
}

function short(value) {
  return String(Number(value.toPrecision(3)));
}

function three(value) {
  return fixed(value, 3);
}

/** Scores: 0.833; whole numbers without decimals. */
function score(value) {
  return Number.isInteger(value) ? String(value) : fixed(value, 3);
}

function pValue(value) {
  return isNumber(value) && value < 0.001 ? "<0.001" : fixed(value, 3);
}

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function seconds(value) {
  if (!isNumber(value)) return NONE;
  return `${value < 100 ? value.toFixed(1) : whole(value)}\u00a0s`;
}
