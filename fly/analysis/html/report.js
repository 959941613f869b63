// Puts the page together: sections, one document in a dialog, the trace section, the theme.

const summary = block("summary");
summary.runs.forEach((run, number) => { run.number = number; });
const NO_TRACE = "No run has a trace. Run with trace=true in model_args and --output_path DIR to see where every token came from; it changes no text.";

const LINKS = { scores: "Scores", matrix: "Matrix", speed: "Speed", drafts: "Drafts", traces: "Tokens", documents: "Documents", runs: "Runs" };

function documentName(row) {
  return `${row.task}, document ${row.doc}`;
}

/** Fills `view` with the trace of one document; returns the controls that choose run and repeat. */
function documentTrace(number, preferred, view) {
  const { texts, documents } = block("traces");
  const byRun = documents[number] || {};
  const runs = Object.keys(byRun).map(Number);
  if (!runs.length) {
    view.replaceChildren(missing(summary.traced.all ? "This document\u2019s trace is not in the page: `fly report --traces N` takes more." : NO_TRACE));
    return [];
  }
  const repeats = el("span", { class: "slot" }), note = el("p", { class: "note" });
  const draw = (run, request) => {
    const generation = byRun[run][request];
    const tokens = [...generation.source].filter((letter) => letter !== "x").length;
    note.textContent = `${plural(tokens, "token")} in ${plural(generation.round.at(-1), "round")}, ended by ${generation.finish || "the run being cut short"}`;
    view.replaceChildren(traceView(generation, texts, summary.runs[run].entropy?.unit ?? "nats"));
  };
  const take = (run) => {
    const all = byRun[run].map((_, at) => [at, String(at + 1)]);
    repeats.replaceChildren(...(all.length > 1 ? [choice("Repeat", all, 0, (request) => draw(run, request))] : []));
    draw(run, 0);
  };
  const first = runs.includes(preferred) ? preferred : runs[0];
  take(first);
  return [choice("Run", runs.map((run) => [run, summary.runs[run].name]), first, take), repeats, note];
}

function traceSection() {
  const shown = summary.traced.shown;
  if (!shown.length) return section("traces", "Where the tokens came from", missing(summary.traced.all ? "Traces were left out: --traces 0." : NO_TRACE));
  const rows = block("documents");
  const preferred = summary.runs.findIndex((run) => run.traced && run.positions.drafted.length);
  const slot = el("span", { class: "slot" }), view = el("div");
  const draw = (number) => slot.replaceChildren(...documentTrace(number, preferred, view));
  const left = summary.traced.all > shown.length ? el("p", { class: "note" }, `${shown.length} of ${plural(summary.traced.all, "traced document")} are in this page (--traces).`) : null;
  draw(shown[0]);
  return section("traces", "Where the tokens came from",
    el("p", { class: "note" }, "Point at a token, or move with the arrow keys, for the target\u2019s entropy, the target token and the window."),
    left, el("div", { class: "controls" }, choice("Document", shown.map((number) => [number, documentName(rows[number])]), shown[0], draw), slot), view);
}

/** The part of the address that opens a document, in every page of the same runs. */
function linkTo(row) {
  return `#document/${encodeURIComponent(row.task)}/${row.doc}`;
}

/** Opens the document that the address names, if it names one. */
function openLinked() {
  const rows = block("documents"), number = rows.findIndex((row) => linkTo(row) === location.hash);
  if (number >= 0) openDocument(number, rows.map((_, at) => at));
}

/** One document: texts side by side, scores, prompt, trace. order: the table's, for next and previous. */
function openDocument(number, order) {
  const dialog = document.getElementById("document");
  const row = block("documents")[number], found = block("texts")[number];
  const at = order.indexOf(number), view = el("div");
  const go = (step, name, key) => button(name, () => openDocument(order[at + step], order), { disabled: order[at + step] === undefined, "aria-keyshortcuts": key, "data-key": key });
  dialog.replaceChildren(
    el("header", { class: "dialog-head" }, el("h2", { id: "document-title", tabindex: "-1" }, documentName(row)),
      el("div", { class: "buttons" }, el("a", { href: linkTo(row) }, "Link"), go(-1, "\u2190 Previous", "k"), go(1, "Next \u2192", "j"), button("Close", () => dialog.close()))),
    outputs(found),
    el("h3", {}, "Scores"), scoreTable(found),
    el("details", {}, el("summary", {}, "Prompt and target"), el("h4", {}, "Prompt"), el("pre", { tabindex: "0" }, found.prompt), el("h4", {}, "Target"), el("pre", { tabindex: "0" }, String(found.target))),
    el("h3", {}, "Where the tokens came from"), el("div", { class: "controls" }, documentTrace(number, summary.runs.length - 1, view)), view);
  history.replaceState(null, "", linkTo(row));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  document.getElementById("document-title").focus();
}

function outputs(found) {
  const there = found.runs.map((run, number) => number).filter((number) => found.runs[number]);
  const state = { left: there[0], right: there[1], repeat: 0 };
  const name = (number) => summary.runs[number].name;
  const text = (number) => found.runs[number].responses[state.repeat] ?? "";
  const repeats = Math.max(...there.map((number) => found.runs[number].responses.length));
  const holder = el("div"), options = there.map((number) => [number, name(number)]);
  const shown = (part) => there.length > 1
    ? sideBySide([name(state.left), name(state.right)], part(text(state.left)), part(text(state.right)))
    : el("pre", { tabindex: "0" }, part(text(state.left)));
  const draw = () => holder.replaceChildren(
    ...there.some((number) => reasoningOf(text(number))) ? [el("details", {}, el("summary", {}, "Reasoning"), shown(reasoningOf))] : [], shown(answerOf));
  const set = (key) => (value) => { state[key] = value; draw(); };
  draw();
  return el("div", {}, el("h3", {}, there.length > 1 ? "Outputs side by side" : "Output"),
    el("div", { class: "controls" },
      there.length > 2 ? [choice("Left", options, state.left, set("left")), choice("Right", options, state.right, set("right"))] : null,
      repeats > 1 ? choice("Repeat", Array.from({ length: repeats }, (_, at) => [at, String(at + 1)]), 0, set("repeat")) : null),
    holder);
}

const THINK_END = "</think>";

/** What a model writes before its answer, the mark between them included; empty without a mark. */
function reasoningOf(text) {
  const at = text.lastIndexOf(THINK_END);
  return at < 0 ? "" : text.slice(0, at + THINK_END.length);
}

function answerOf(text) {
  const reasoning = reasoningOf(text);
  return reasoning ? text.slice(reasoning.length).trimStart() : text;
}

function scoreTable(found) {
  const lines = found.runs.flatMap((run, number) => run ? run.filters.map((filter) => [
    summary.runs[number].name, filter.name, el("code", { class: "answer" }, filter.answer.length > 200 ? `${filter.answer.slice(0, 200)}\u2026` : filter.answer),
    Object.entries(filter.scores).map(([metric, value]) => `${metric} ${score(value)}`).join(", ") || NONE]) : []);
  return table(["run", "filter", "answer", "scores"], lines, "Scores of this document");
}

/** j and k go through the documents; closing one takes it out of the address. */
function listen() {
  const dialog = document.getElementById("document");
  dialog.addEventListener("keydown", (event) => {
    if (!isTyping(event)) dialog.querySelector(`[data-key="${CSS.escape(event.key)}"]`)?.click();
  });
  dialog.addEventListener("close", () => history.replaceState(null, "", "#documents"));
  addEventListener("hashchange", openLinked);
}

function build() {
  const charts = [...positionFigures(summary), blockFigure(summary), ...entropyFigures(summary)].filter(Boolean);
  const untraced = summary.runs.filter((run) => !run.traced).map((run) => run.name);
  const sections = [
    section("scores", "Scores", comparisonFigure(summary), categoryFigure(summary), el("div", { class: "grid" }, scoreFigures(summary))),
    matrixSection(summary),
    section("speed", "Speed", el("div", { class: "grid" }, speedFigure(summary), timeFigure(summary), lengthFigure(summary), draftLengthFigures(summary), throughputFigures(summary))),
    section("drafts", "What was drafted, and what stood",
      charts.length && untraced.length ? el("p", { class: "note" }, `Without a trace (trace=true), which tells deferrals from matches and has entropies: ${untraced.join(", ")}.`) : null,
      charts.length ? el("div", { class: "grid thirds" }, charts) : missing(summary.traced.all ? "The traced runs drafted nothing." : NO_TRACE)),
    traceSection(),
    section("documents", "Documents", documentTable(summary, openDocument)),
    section("runs", "Runs", settings(summary)),
  ].filter(Boolean);
  const head = el("div", { class: "headlines" }, factsOfAll(summary), headline(summary));
  fillPage(summary, [head], sections, sections.map(({ id }) => LINKS[id]), "docs/compare.md");
  listen();
  openLinked();
}

build();
