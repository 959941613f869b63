"use strict";
// Elements, numbers and the embedded data. Texts only ever become text nodes or attributes.

const HTML = "http://www.w3.org/1999/xhtml";
const SVG = "http://www.w3.org/2000/svg";

function make(space, name, attributes, children) {
  const node = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element. Attributes `on...` take functions; null, undefined and false leave one out. */
function el(name, attributes = {}, ...children) {
  return make(HTML, name, attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return make(SVG, name, attributes, children);
}

const parsed = new Map();

/** An embedded JSON block, parsed when it is first asked for: texts and traces may be large. */
function block(id) {
  if (!parsed.has(id)) parsed.set(id, JSON.parse(document.getElementById(`data-${id}`).textContent));
  return parsed.get(id);
}

const NONE = "\u2013";

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

/** Scores: 0.833; whole numbers without decimals. */
function score(value) {
  if (!isNumber(value)) return NONE;
  return Number.isInteger(value) ? String(value) : value.toFixed(3);
}

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function seconds(value) {
  if (!isNumber(value)) return NONE;
  return value < 100 ? `${value.toFixed(1)}\u00a0s` : `${whole(value)}\u00a0s`;
}

/** A plain table: head is a list of texts, the first column heads its rows. */
function table(head, rows, caption) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { class: "plain" },
      el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map(([first, ...rest]) =>
        el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell)))))));
}
