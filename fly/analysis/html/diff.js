// Word-level difference of two texts (Myers, 1986), and the two side by side.

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
}

const MOST_EDITS = 1500;

/** Lists of [text, isCommon] for both sides. Texts too different are compared at their ends only. */
function difference(left, right) {
  const a = words(left), b = words(right);
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start &&
         a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const inA = new Array(a.length).fill(true), inB = new Array(b.length).fill(true);
  const middleA = a.slice(start, a.length - end), middleB = b.slice(start, b.length - end);
  const [goneA, goneB] = edits(middleA, middleB);
  goneA.forEach((index) => { inA[start + index] = false; });
  goneB.forEach((index) => { inB[start + index] = false; });
  return [runsOf(a, inA), runsOf(b, inB)];
}

/** Indexes that only the one and only the other list has. */
function edits(a, b) {
  const history = [];
  let reach = new Map([[1, 0]]);
  for (let d = 0; d <= Math.min(a.length + b.length, MOST_EDITS); d++) {
    history.push(new Map(reach));
    for (let k = -d; k <= d; k += 2) {
      const down = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
      let x = down ? reach.get(k + 1) : reach.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      reach.set(k, x);
      if (x >= a.length && x - k >= b.length) return walkBack(history, a.length, b.length);
    }
  }
  return [[...a.keys()], [...b.keys()]];
}

function walkBack(history, endA, endB) {
  const goneA = [], goneB = [];
  let x = endA, y = endB;
  for (let d = history.length - 1; d > 0; d--) {
    const reach = history[d], k = x - y;
    const down = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
    const before = down ? k + 1 : k - 1;
    x = reach.get(before);
    y = x - before;
    if (down) goneB.push(y); else goneA.push(x);
  }
  return [goneA, goneB];
}

function runsOf(list, common) {
  const result = [];
  list.forEach((word, index) => {
    const last = result[result.length - 1];
    if (last && last[1] === common[index]) last[0] += word;
    else result.push([word, common[index]]);
  });
  return result;
}

/** Two panes; `names` head them. */
function sideBySide(names, left, right) {
  const same = left === right;
  const [a, b] = same ? [[[left, true]], [[right, true]]] : difference(left, right);
  const pane = (name, runs, tag) => el("section", { class: "pane", "aria-label": name },
    el("h4", {}, name),
    el("pre", { tabindex: "0" }, runs.map(([text, common]) => common ? text : el(tag, {}, visible(text)))));
  return el("div", {},
    el("p", { class: "note" }, same ? "The two texts are the same." : null),
    el("div", { class: "panes" }, pane(names[0], a, "del"), pane(names[1], b, "ins")));
}

/** White space that differs must be seen. */
function visible(text) {
  return /^\s+$/.test(text) ? text.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5") : text;
}
