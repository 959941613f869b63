// The documents: sorted, filtered, a page at a time, so that thousands open at once.

const PAGE = 50;
const MARKS = { won: "\u25b2 won", lost: "\u25bc lost", mixed: "\u25c6 mixed", same: "=" };

/** columns: {run, name, value(row), show(row), numeric}. `run` -1: of the document itself. */
function documentColumns(summary, rows) {
  const columns = [];
  if (new Set(rows.map((row) => row.task)).size > 1) columns.push({ run: -1, name: "task", value: (row) => row.task });
  columns.push({ run: -1, name: "document", value: (row) => row.doc, numeric: true });
  summary.runs.forEach((run, number) => {
    const cell = (key) => (row) => (row.runs[number] ? row.runs[number][key] : undefined);
    const add = (name, key, show, numeric = true) => {
      if (rows.some((row) => cell(key)(row) !== undefined)) {
        columns.push({ run: number, name, value: cell(key), show: (row) => show(cell(key)(row)), numeric });
      }
    };
    add("score", "score", scoreMark);
    if (number > 0) {
      add("change", "change", (value) => el("span", { class: `change ${value || ""}` }, MARKS[value] || NONE), false);
      add("text", "same", (value) => (value === undefined ? NONE : value ? "same" : "differs"), false);
    }
    add("tokens", "tokens", whole);
    add("tau", "tau", fixed);
    add("seconds", "seconds", (value) => fixed(value, 1));
  });
  return columns;
}

function scoreMark(value) {
  if (value === 1) return el("span", { class: "right" }, "\u2713 1");
  if (value === 0) return el("span", { class: "wrong" }, "\u2717 0");
  return score(value);
}

/** The table with its controls; `open(number)` shows one document. */
function documentTable(summary, open) {
  const rows = block("documents").map((row, number) => ({ ...row, number }));
  const columns = documentColumns(summary, rows);
  const state = { sort: null, down: false, page: 0, found: rows };
  const body = el("tbody"), count = el("p", { class: "count", role: "status" });
  const heads = columns.map((column, number) => sortHead(summary, column, () => {
    state.down = state.sort === number ? !state.down : false;
    state.sort = number;
    update();
  }));
  const pages = pager((step) => { state.page += step; draw(); });
  const filters = documentFilters(summary, rows, () => update());

  function update() {
    state.page = 0;
    state.found = rows.filter(filters.wanted);
    if (state.sort !== null) sortRows(state.found, columns[state.sort], state.down);
    heads.forEach((head, number) => {
      head.setAttribute("aria-sort", number !== state.sort ? "none" : state.down ? "descending" : "ascending");
    });
    draw();
  }

  function draw() {
    const first = state.page * PAGE, seen = state.found.slice(first, first + PAGE);
    body.replaceChildren(...seen.map((row) => tableRow(row, columns, () => open(row.number, state.found.map((one) => one.number)))));
    if (!seen.length) body.append(el("tr", {}, el("td", { colspan: columns.length, class: "empty" }, "No document fits these filters.")));
    count.textContent = state.found.length === rows.length ? plural(rows.length, "document")
      : `${whole(state.found.length)} of ${plural(rows.length, "document")}`;
    pages.show(state.page, Math.ceil(state.found.length / PAGE));
  }

  update();
  return el("div", {}, filters.controls, count,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Documents" },
      el("table", { class: "documents" }, el("caption", { class: "hidden" }, "Documents; the buttons in the head sort"),
        el("thead", {}, runHeads(summary, columns), el("tr", {}, heads)), body)),
    pages.controls);
}

function runHeads(summary, columns) {
  if (summary.runs.length < 2) return null;
  const own = columns.filter((column) => column.run < 0).length;
  return el("tr", { class: "runs" }, el("td", { colspan: own }), summary.runs.map((run, number) => {
    const span = columns.filter((column) => column.run === number).length;
    return span ? el("th", { scope: "colgroup", colspan: span }, swatch(number), run.name) : null;
  }));
}

function sortHead(summary, column, act) {
  const of = column.run >= 0 && summary.runs.length > 1 ? `, ${summary.runs[column.run].name}` : "";
  return el("th", { scope: "col", class: column.numeric ? "numeric" : null, "aria-sort": "none" },
    el("button", { type: "button", class: "sort", onclick: act }, column.name, of ? el("span", { class: "hidden" }, of) : null));
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
  return el("tr", {}, columns.map((column) => {
    if (column.name === "document" && column.run < 0) {
      return el("th", { scope: "row", class: "numeric" }, el("button", { type: "button", class: "open", onclick: open, "data-document": row.number, "aria-label": `Open document ${row.doc} of ${row.task}` }, String(row.doc)));
    }
    return el("td", { class: column.numeric ? "numeric" : null }, column.show ? column.show(row) : String(column.value(row)));
  }));
}

function documentFilters(summary, rows, changed) {
  const search = el("input", { type: "search", id: "search", placeholder: "prompt, answer or output", autocomplete: "off", spellcheck: "false" });
  const box = (name) => el("label", { class: "check" }, el("input", { type: "checkbox" }), name);
  const verdicts = box("only changed verdicts"), different = box("only different texts");
  const tasks = [...new Set(rows.map((row) => row.task))];
  const task = el("select", { id: "task" }, el("option", { value: "" }, "all tasks"), tasks.map((name) => el("option", { value: name }, name)));
  const several = summary.runs.length > 1;
  const others = (row) => row.runs.slice(1).filter(Boolean);
  let waiting = 0;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(changed, 120); });
  for (const control of [verdicts, different, task]) control.addEventListener("change", changed);
  const checked = (control) => control.firstElementChild.checked;
  return {
    controls: el("div", { class: "controls", role: "search", "aria-label": "Filter documents" },
      el("label", { class: "field" }, "Search", search),
      tasks.length > 1 ? el("label", { class: "field" }, "Task", task) : null,
      several ? [verdicts, different] : null),
    wanted: (row) => (!task.value || row.task === task.value)
      && (!checked(verdicts) || others(row).some((cell) => cell.change && cell.change !== "same"))
      && (!checked(different) || others(row).some((cell) => cell.same === false))
      && (!search.value || haystack(row.number).includes(search.value.toLowerCase())),
  };
}

const haystacks = [];

function haystack(number) {
  if (haystacks[number] === undefined) {
    const found = block("texts")[number];
    const outputs = found.runs.filter(Boolean).flatMap((run) => [...run.responses, ...run.filters.map((filter) => filter.answer)]);
    haystacks[number] = [found.prompt, found.target, ...outputs].join("\n").toLowerCase();
  }
  return haystacks[number];
}

function pager(turn) {
  const where = el("span");
  const back = el("button", { type: "button", onclick: () => turn(-1) }, "\u2190 Previous");
  const forward = el("button", { type: "button", onclick: () => turn(1) }, "Next \u2192");
  const controls = el("nav", { class: "pager", "aria-label": "Pages of documents" }, back, where, forward);
  return {
    controls,
    show: (page, pages) => {
      controls.hidden = pages < 2;
      where.textContent = `page ${page + 1} of ${pages}`;
      back.disabled = page === 0;
      forward.disabled = page >= pages - 1;
    },
  };
}
