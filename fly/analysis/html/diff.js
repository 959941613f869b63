// Word-level difference of two texts, and the two side by side.

const MOST_CELLS = 2 ** 24;  // of the table of common subsequences: about 4,000 differing words each

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
}

/** Lists of [text, isCommon] for both sides. Very long texts are compared at their ends only. */
function difference(left, right) {
  const a = words(left), b = words(right);
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end++;
  const [onlyA, onlyB] = edits(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return [joined(a, start, onlyA), joined(b, start, onlyB)];
}

/** The indexes outside of a longest common subsequence, of both lists. */
function edits(a, b) {
  if (a.length * b.length > MOST_CELLS) return [[...a.keys()], [...b.keys()]];
  const width = b.length + 1, longest = new Uint16Array((a.length + 1) * width);  // of the rests
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const at = i * width + j;
      longest[at] = a[i] === b[j] ? longest[at + width + 1] + 1 : Math.max(longest[at + width], longest[at + 1]);
    }
  }
  const onlyA = [], onlyB = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    const at = i * width + j;
    if (i < a.length && j < b.length && a[i] === b[j]) { i++; j++; }
    else if (j === b.length || (i < a.length && longest[at + width] >= longest[at + 1])) onlyA.push(i++);
    else onlyB.push(j++);
  }
  return [onlyA, onlyB];
}

/** Neighbouring words of one kind as one text. differing: indexes, counted from `start`. */
function joined(list, start, differing) {
  const only = new Set(differing), result = [];
  list.forEach((word, index) => {
    const isCommon = !only.has(index - start), last = result.at(-1);
    if (last && last[1] === isCommon) last[0] += word;
    else result.push([word, isCommon]);
  });
  return result;
}

/** Two panes; `names` head them. */
function sideBySide(names, left, right) {
  const pane = (name, runs, tag) => el("section", { class: "pane", "aria-label": name },
    el("h4", {}, name),
    el("pre", { tabindex: "0" }, runs.map(([text, isCommon]) => isCommon ? text : el(tag, {}, visible(text)))));
  const [a, b] = difference(left, right);
  return el("div", {},
    left === right ? el("p", { class: "note" }, "The two texts are the same.") : null,
    el("div", { class: "panes" }, pane(names[0], a, "del"), pane(names[1], b, "ins")));
}

/** White space that differs must be seen. */
function visible(text) {
  return /^\s+$/.test(text) ? text.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5") : text;
}
