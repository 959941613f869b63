// The documents: sorted, filtered, a page at a time, so that thousands open at once.

const PAGE = 50;
const MARKS = { won: "\u25b2 won", lost: "\u25bc lost", mixed: "\u25c6 mixed", same: "=" };
const IS_RIGHT = { 1: ["right", "\u2713 1"], 0: ["wrong", "\u2717 0"] };

/** columns: {run, name, value(row), show(row), isNumeric}; run is null for the document's own. */
function documentColumns(summary, rows) {
  const columns = [];
  const add = (run, name, value, show = String, isNumeric = true) => {
    if (rows.some((row) => value(row) !== undefined)) columns.push({ run, name, value, show: (row) => show(value(row)), isNumeric });
  };
  if (new Set(rows.map((row) => row.task)).size > 1) add(null, "task", (row) => row.task, String, false);
  add(null, "document", (row) => row.doc);
  for (const run of summary.runs) {
    const cell = (key) => (row) => row.runs[run.number]?.[key];
    add(run, "score", cell("score"), scoreMark);
    if (run.number > 0) {
      add(run, "change", cell("change"), (value) => el("span", { class: `change ${value || ""}` }, MARKS[value] || NONE), false);
      add(run, "text", cell("same"), (value) => (value === undefined ? NONE : value ? "same" : "differs"), false);
      add(run, "parts at", cell("parts"), whole);
    }
    add(run, "length", cell("length"), whole);
    add(run, "tokens", cell("tokens"), whole);
    add(run, "tau", cell("tau"), fixed);
    add(run, "seconds", cell("seconds"), (value) => fixed(value, 1));
  }
  return columns;
}

function scoreMark(value) {
  const [style, text] = IS_RIGHT[value] || ["", score(value)];
  return el("span", { class: style }, text);
}

/** The table with its controls, what changed first; `open(number, order)` shows one document. */
function documentTable(summary, open) {
  const rows = block("documents").map((row, number) => ({ ...row, number }));
  const columns = documentColumns(summary, rows);
  const state = { sort: null, down: false, page: 0, found: rows };
  const body = el("tbody"), count = el("p", { class: "count", role: "status" });
  const heads = columns.map((column) => sortHead(summary, column, () => {
    state.down = state.sort === column && !state.down;
    state.sort = column;
    update();
  }));
  const where = el("span");
  const [back, forward] = [["\u2190 Previous", -1], ["Next \u2192", 1]].map(([name, step]) => button(name, () => { state.page += step; draw(); }));
  const pages = el("nav", { class: "pager", "aria-label": "Pages of documents" }, back, where, forward);
  const filters = documentFilters(summary, rows, () => update());

  function update() {
    state.page = 0;
    state.found = rows.filter(filters.isWanted);
    if (state.sort !== null) sortRows(state.found, state.sort, state.down);
    heads.forEach((head, number) => {
      head.setAttribute("aria-sort", state.sort !== columns[number] ? "none" : state.down ? "descending" : "ascending");
    });
    draw();
  }

  function draw() {
    const { page, found } = state, last = Math.ceil(found.length / PAGE) - 1;
    const seen = found.slice(page * PAGE, (page + 1) * PAGE), order = found.map((row) => row.number);
    body.replaceChildren(...seen.map((row) => tableRow(row, columns, () => open(row.number, order))));
    if (!seen.length) body.append(el("tr", {}, el("td", { colspan: columns.length, class: "empty" }, "No document fits these filters.")));
    const all = plural(rows.length, "document");
    count.textContent = found.length === rows.length ? all : `${whole(found.length)} of ${all}`;
    where.textContent = `page ${page + 1} of ${last + 1}`;
    [pages.hidden, back.disabled, forward.disabled] = [last < 1, page === 0, page >= last];
  }

  update();
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || isTyping(event) || document.getElementById("document").open) return;
    event.preventDefault();
    filters.focus();
  });
  return el("div", {}, filters.controls, count,
    scroller("Documents", el("table", { class: "documents" },
      el("caption", { class: "hidden" }, "Documents; the buttons in the head sort"),
      el("thead", {}, runHeads(summary, columns), el("tr", {}, heads)), body)),
    pages);
}

/** Whether a key belongs to a field or to the browser. */
function isTyping(event) {
  return event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
}

function runHeads({ runs }, columns) {
  if (runs.length < 2) return null;
  const span = (run) => columns.filter((column) => column.run === run).length;
  return el("tr", { class: "runs" }, el("td", { colspan: span(null) }),
    runs.filter(span).map((run) => el("th", { scope: "colgroup", colspan: span(run) }, swatch(run), run.name)));
}

function sortHead({ runs }, { run, name, isNumeric }, act) {
  const whose = run && runs.length > 1 ? el("span", { class: "hidden" }, `, ${run.name}`) : null;
  return el("th", { scope: "col", class: isNumeric ? "numeric" : null, "aria-sort": "none" }, button([name, whose], act, { class: "sort" }));
}

function sortRows(rows, column, down) {
  const sign = down ? -1 : 1;
  rows.sort((one, other) => {
    const a = column.value(one) ?? null, b = column.value(other) ?? null;
    if (a === null || b === null) return (a === null) - (b === null);  // what is missing comes last
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b) || one.number - other.number;
  });
}

function tableRow(row, columns, open) {
  const opener = { class: "open", "data-document": row.number, "aria-label": `Open document ${row.doc} of ${row.task}` };
  return el("tr", {}, columns.map((column) => column.name === "document"
    ? el("th", { scope: "row", class: "numeric" }, button(column.show(row), open, opener))
    : el("td", { class: column.isNumeric ? "numeric" : null }, column.show(row))));
}

const KINDS = [
  ["all documents", null],
  ["changed scores", (cell) => cell.change && cell.change !== "same"],
  ["lost", (cell) => cell.change === "lost"],
  ["won", (cell) => cell.change === "won"],
  ["different texts", (cell) => cell.same === false],
];
const lengthOf = (row) => Math.max(...row.runs.map((cell) => cell?.length ?? 0));
const partingOf = (row) => Math.min(...row.runs.map((cell) => cell?.parts ?? Infinity));

/** Search, and drop-downs for task, category, kind of change, length and where the texts part. */
function documentFilters({ runs }, rows, changed) {
  const tests = {};  // by drop-down; what is not chosen has none
  let waiting = 0;
  const search = el("input", { type: "search", placeholder: "prompt, answer or output", autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/",
    oninput: () => { clearTimeout(waiting); waiting = setTimeout(changed, 120); } });
  const drop = (name, options) => choice(name, options.map(([text], at) => [at, text]), 0, (at) => { tests[name] = options[at][1]; changed(); });
  const values = (of) => unique(rows.map(of)).filter((value) => value !== undefined);
  const groups = (name, all, of) => values(of).length > 1 ? drop(name, [[all, null], ...values(of).map((value) => [value, (row) => of(row) === value])]) : null;
  const quarters = (name, of) => {
    const sorted = rows.map(of).filter(Number.isFinite).sort((a, b) => a - b);
    const ends = [0.25, 0.5, 0.75, 1].map((share) => sorted[Math.ceil(share * sorted.length) - 1]);
    if (unique(ends).length < 4) return null;
    return drop(name, [["any", null], ...ends.map((end, at) => [at ? `${whole(ends[at - 1] + 1)} to ${whole(end)}` : `up to ${whole(end)}`,
      (row) => of(row) <= end && (!at || of(row) > ends[at - 1])])]);
  };
  const isInAny = (test) => test && ((row) => row.runs.slice(1).filter(Boolean).some(test));
  return {
    controls: el("div", { class: "controls", role: "search", "aria-label": "Filter documents" },
      el("label", { class: "field" }, "Search", search),
      runs.length > 1 ? drop("Show", KINDS.map(([text, test]) => [text, isInAny(test)])) : null,
      groups("Task", "all tasks", (row) => row.task),
      unique(rows.flatMap((row) => Object.keys(row.fields))).map((name) => groups(name, "all", (row) => row.fields[name])),
      quarters("Length, characters", lengthOf),
      runs.length > 1 ? quarters("Texts part at character", partingOf) : null),
    isWanted: (row) => Object.values(tests).every((test) => !test || test(row))
      && (!search.value || haystack(row.number).includes(search.value.toLowerCase())),
    focus: () => search.focus(),
  };
}

const haystacks = [];

function haystack(number) {
  const { prompt, target, runs } = block("texts")[number];
  const outputsOf = (run) => [...run.responses, ...run.filters.map((filter) => filter.answer)];
  haystacks[number] ??= [prompt, target, ...runs.filter(Boolean).flatMap(outputsOf)].join("\n").toLowerCase();
  return haystacks[number];
}
