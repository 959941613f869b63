// Figures as files: the drawing as SVG, the numbers behind it as CSV. Nothing leaves the page otherwise.

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "font-family", "font-size", "font-weight"];

/** The buttons below a figure. holder: of its drawing; null for a figure of numbers alone. */
function saving(title, holder, names, rows) {
  const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  const save = (kind, type, content) => button(`Save ${kind}`, () => download(`${name}.${kind.toLowerCase()}`, type, content()), { "aria-label": `Save ${kind}: ${title}` });
  return el("div", { class: "save" },
    holder && save("SVG", "image/svg+xml", () => standalone(holder.firstElementChild)),
    save("CSV", "text/csv", () => asCsv(names, rows)));
}

function download(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

/** Values as they are, not as they are shown; an interval is two columns. */
function asCsv(names, rows) {
  const isInterval = names.map((_, at) => rows.some((row) => row[at] !== null && typeof row[at] === "object"));
  const head = names.flatMap((name, at) => isInterval[at] ? [`${name} low`, `${name} high`] : [name]);
  const lines = rows.map((row) => row.flatMap((value, at) => isInterval[at] ? [value?.low, value?.high] : [value]));
  return [head, ...lines].map((line) => line.map(csvField).join(",") + "\r\n").join("");
}

function csvField(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** A drawing that needs no style sheet: styles as attributes, with its patterns and the page's ground. */
function standalone(drawing) {
  const copy = styled(drawing);
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: getComputedStyle(document.body).backgroundColor }),
    styled(document.querySelector(".patterns defs")));
  return new XMLSerializer().serializeToString(copy);
}

function styled(node) {
  const copy = node.cloneNode(true), parts = (root) => [root, ...root.querySelectorAll("*")];
  const originals = parts(node);
  parts(copy).forEach((part, at) => {
    const style = getComputedStyle(originals[at]);
    for (const name of DRAWN) part.setAttribute(name, style.getPropertyValue(name));
  });
  return copy;
}
