// What the page says of whole runs: headline numbers, scores, speed and the charts of traces.

const PHASES = [["prefill", "p0"], ["draft", "p1"], ["verify", "p2"], ["other", "p3"], ["recording", "p5"], ["compile", "p4"]];
const FATES = [["stood", "deferred, stood", "f0"], ["rolled_back", "deferred, rolled back", "f1"], ["rejected", "rejected at once", "f2"]];
const SIGNS = { held: ["\u2713", "held"], unchanged: ["=", "unchanged"], fell: ["\u2717", "fell"], "decides nothing": ["\u2013", ""] };
const UNDECIDED = ["?", "undecided"];

const kindOf = (run) => `s${run.number % 6}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

function swatch(run) {
  return svg("svg", { width: 14, height: 14, class: "swatch", "aria-hidden": "true" }, bar(0, 0, 14, 14, kindOf(run)));
}

function missing(text) {
  return el("p", { class: "empty" }, text);
}

function card(title, value, note, verdict = "") {
  return el("div", { class: `card ${verdict}` },
    el("p", { class: "card-title" }, title), el("p", { class: "card-value" }, value),
    note ? el("p", { class: "note" }, note) : null);
}

/** One row of cards per compared run; of the only run, if there is one. */
function headline({ runs: [base, ...others], comparisons, scores }) {
  if (!others.length) return headlineOf(base, null, ownCards(base, scores[0]));
  return others.map((run, number) => headlineOf(run, base, comparedCards(comparisons[number]), comparisons[number].notes));
}

function headlineOf(run, base, cards, notes = []) {
  const { stats } = run;
  return el("div", { class: "headline" },
    el("h2", { class: "run-title" }, swatch(run), run.name, base && el("span", { class: "against" }, ` against ${base.name}`)),
    el("div", { class: "cards" }, cards, stats && card("Mean acceptance length (tau)", fixed(stats.tau),
      `${plural(stats.emitted, "token")} in ${plural(stats.rounds, "round")} (passes of the target)${acceptanceLengths(stats)}`)),
    notesBelow(notes));
}

function notesBelow(notes) {
  return notes.map((note) => el("p", { class: "note" }, `Note: ${note}`));
}

/** What tau does not say: AL, and both where every document counts the same. */
function acceptanceLengths(stats) {
  const means = [["tau", stats.tau_document_mean], ["AL", stats.al_document_mean]].filter(([, mean]) => isNumber(mean));
  const al = isNumber(stats.al) ? `; AL = 1 + accepted / drafts = ${fixed(stats.al)}` : "";
  return al + (means.length ? `; means over documents: ${means.map(([name, mean]) => `${name} ${fixed(mean)}`).join(", ")}` : "");
}

function comparedCards(comparison) {
  if (comparison.refused) return [card("Not comparable", NONE, comparison.refused)];
  return [recoveryCard(comparison), timeCard(comparison)];
}

function timeCard({ speed }) {
  if (speed?.withheld) return card("Time x", NONE, `The runs differ in what times depend on: ${speed.withheld}.`);
  if (!speed?.end_to_end) return card("Time x", NONE, "Both runs need fly\u2019s records of the same documents.");
  return card("Time x, end to end", times(speed.end_to_end.value),
    `${intervalNote(speed.end_to_end, times)}decoding alone ${times(speed.decode?.value)}; ${times(speed.tokens?.value)} the tokens`);
}

function intervalNote({ interval }, format) {
  return interval ? `95 % interval ${between(interval, format)}; ` : "";
}

function recoveryCard({ main, verdict, reason }) {
  const [sign, style] = SIGNS[verdict] || UNDECIDED;
  const documents = plural(main.documents, "document");
  const result = card("Recovery of the score", percent(main.recovery),
    main.other === null ? documents : `${intervalNote(main, percent)}${documents}: ${main.lost} lost, ${main.won} won`, style);
  result.append(el("p", { class: "verdict" }, `${sign} ${verdict}`),
    el("p", { class: "note" }, `${reason[0].toUpperCase()}${reason.slice(1)}.`));
  return result;
}

function ownCards({ stats }, first) {
  const found = first?.runs[0];
  return [
    found && card(`${first.task}, ${first.metric}`, fixed(found.value, 3), plural(found.documents, "document")),
    stats && card("Speed, end to end", `${fixed(stats.end_to_end_tok_s, 1)} tok/s`, `decoding alone ${fixed(stats.decode_tok_s, 1)} tok/s`),
  ];
}

/** The table of runs: what each was, and where its draft tokens came from. */
function settings({ runs }) {
  const namesIn = (key) => [...new Set(runs.flatMap((run) => Object.keys(run[key])))];
  const rows = namesIn("settings").map((name) => [name, ...runs.map((run) => run.settings[name] ?? NONE)]);
  const drafted = namesIn("sources").map((name) => [`drafted from ${name}`, ...runs.map((run) => ofSource(run.sources[name]))]);
  return table(["", ...runs.map((run) => run.name)], [...rows, ...drafted], "Settings of the runs");
}

function ofSource(counts) {
  if (!counts) return NONE;
  return `${whole(counts.accepted)} of ${whole(counts.drafted)} accepted (${percent(counts.accepted / counts.drafted)})`;
}

function scoreFigures({ runs, scores }) {
  return scores.map((entry) => {
    const found = entry.runs.map((each, number) => ({ ...each, run: runs[number] })).filter((each) => isNumber(each.value));
    const isShare = found.every(({ right }) => right !== undefined);
    const all = found.flatMap(({ value, interval }) => interval ? [value, interval.low, interval.high] : [value]);
    const high = isShare ? 1 : Math.max(...all), low = isShare ? 0 : Math.min(0, ...all);
    const rows = found.map(({ run, value, interval, right, documents }) => ({
      label: run.name, value, interval, kind: kindOf(run), text: fixed(value, 3) + (right === undefined ? "" : ` (${right} of ${documents})`),
    }));
    const filter = entry.filter === "none" ? "" : `, filter ${entry.filter}`;
    return figure(`${entry.task}: ${entry.metric}${filter}`,
      `Lines are 95 % intervals of each run by itself${isShare ? " (Wilson)" : ""}.${entry.higher_is_better ? "" : " Lower is better."}`,
      (width) => intervals(width, rows, low, high, `Scores of ${entry.task}`),
      table(["run", "score", "95 % interval", "documents"], found.map(({ run, value, interval, documents }) =>
        [run.name, fixed(value, 3), between(interval, (bound) => fixed(bound, 3)), whole(documents)]), "Scores"));
  });
}

/** Every metric of every compared run: the pairs and their verdict. Null for one run. */
function comparisonFigure({ runs: [base], comparisons, notes }) {
  const lines = comparisons.flatMap(({ name, rows = [] }) => rows.map((row) => {
    const isMissing = row.other === null, [sign, style] = SIGNS[row.verdict] || UNDECIDED;
    const more = style === "undecided" && row.decides ? `; ${whole(row.decides)} documents would decide` : "";
    return [`${name}: ${row.label.replace(",", ", ")}`, fixed(row.baseline, 3), fixed(row.other, 3), percent(row.recovery),
      between(row.interval, percent), isMissing ? NONE : `${row.lost} / ${row.won}`, isMissing ? NONE : `${pValue(row.p)} (${row.test})`,
      [el("b", { class: style }, `${sign} ${row.verdict}`), more]];
  }));
  if (!lines.length) return null;
  return el("figure", {}, caption("Did the scores hold?",
    `Against ${base.name}, in pairs of the same documents. Recovery is the share of its score that is kept, with a paired 95 % bootstrap interval; docs/compare.md defines the verdicts.`),
  table(["run: task and metric", base.name, "score", "recovery", "95 % interval", "lost / won", "p", "verdict"], lines, "Recovery"), notesBelow(notes));
}

const unique = (values) => [...new Set(values)];

/** Drafters by rules, for every target by itself: a table per task. Null unless several runs draft. */
function matrixSection({ matrix }) {
  if (!matrix) return null;
  if (matrix.refused) return section("matrix", "Drafters and rules", missing(`No matrix of these runs. ${matrix.refused}.`));
  const titleOf = (cell) => `${cell.task}: ${cell.metric}`;
  return section("matrix", "Drafters and rules",
    el("p", { class: "note" }, `Every run against its target alone: recovery of the score with a paired 95 % bootstrap interval, documents lost and won, time x end to end, and tau. The darker, the more of the score was lost; darkest from 10 %. p: that both score the same, corrected by Holm for ${plural(matrix.tests, "cell")}. A large p does not say that scores held: the interval says how much may be lost, and, where no document was, the share of the score that so few documents leave possible (95 %).`),
    unique(matrix.cells.map(titleOf)).map((title) => matrixFigure(title, matrix.cells.filter((cell) => titleOf(cell) === title))),
    notesBelow(matrix.notes));
}

function matrixFigure(title, cells) {
  const rules = unique(cells.map((cell) => cell.rule));
  const rows = unique(cells.map((cell) => cell.target)).flatMap((target) => {
    const family = cells.filter((cell) => cell.target === target), [{ baseline_score, documents, baseline_speed }] = family;
    const rate = baseline_speed?.pace.end_to_end_tok_s;
    const alone = `alone ${score(baseline_score)}, ${plural(documents, "document")}${rate ? `, ${fixed(rate, 1)} tok/s` : ""}`;
    return [[el("b", {}, target), alone, ...rules.slice(1).map(() => "")],
      ...unique(family.map((cell) => cell.drafter)).map((drafter) =>
        [drafter, ...rules.map((rule) => matrixCell(family.find((cell) => cell.drafter === drafter && cell.rule === rule)))])];
  });
  return el("figure", {}, caption(title.replace(",", ", ")), table(["target, drafter", ...rules], rows, title));
}

function matrixCell(cell) {
  if (!cell) return "";
  if (!isNumber(cell.p)) return cell.reason;
  const ratio = cell.speed?.end_to_end;
  const node = el("div", { class: "cell" }, el("b", {}, percent(cell.recovery)), isNumber(cell.bound) ? ` (loss up to ${percent(cell.bound)} possible)` : ` (${between(cell.interval, percent)})`,
    el("p", {}, `${cell.lost} lost, ${cell.won} won; p ${pValue(cell.p)}`),
    el("p", {}, `time x ${times(ratio?.value)}${ratio?.interval ? ` (${between(ratio.interval, times)})` : ""}; tau ${fixed(cell.speed?.pace.tau)}`));
  if (isNumber(cell.recovery)) node.style.setProperty("--loss", Math.min(1, Math.max(0, 10 * (1 - cell.recovery))));
  return node;
}

function speedFigure({ runs: [base, ...others], comparisons }) {
  const timed = [base, ...others].filter((run) => run.stats);
  if (!timed.length) return missing("No run has fly\u2019s records: lm-eval\u2019s own backends, and enable_statistics=false, keep no times.");
  const speedOf = (run) => run === base ? null : comparisons[run.number - 1].speed;
  const related = timed.filter((run) => speedOf(run)?.end_to_end), isRelative = related.length > 0;
  if (!isRelative && timed.length > 1) return missing("The runs\u2019 times do not compare: see the cards above.");
  const rows = (isRelative ? related : timed).flatMap((run) => [["end_to_end", "end to end"], ["decode", "decoding"]].map(([key, name]) => {
    const rate = run.stats[`${key}_tok_s`], value = isRelative ? speedOf(run)[key]?.value : rate;
    return { label: `${run.name}, ${name}`, text: isRelative ? times(value) : `${fixed(value)} tok/s`,
      parts: [{ value: value || 0, kind: kindOf(run), title: `${fixed(rate)} tok/s` }] };
  }));
  const most = Math.max(...rows.map((row) => row.parts[0].value));
  const title = isRelative ? "Time x" : "Speed";
  const note = isRelative ? `Seconds of ${base.name} over the run\u2019s, for the same documents: 2 is half of the time.` : "Tokens per second.";
  return figure(title, `${note} End to end is prefill and decoding.`,
    (width) => barRows(width, rows, most, `${title} of the runs`, isRelative ? 1 : null),
    table(["run", "end to end, tok/s", "decoding, tok/s", "tau", "tokens", "rounds", "peak memory"], timed.map(({ name, stats }) => [
      name, fixed(stats.end_to_end_tok_s), fixed(stats.decode_tok_s), fixed(stats.tau), whole(stats.emitted), whole(stats.rounds),
      `${fixed(stats.peak_memory_bytes / 2 ** 30, 1)} GiB`]), "Speed"));
}

function timeFigure({ runs }) {
  const timed = runs.filter((run) => run.stats);
  if (!timed.length) return null;
  const of = (run, phase) => run.stats.seconds[phase] || 0;  // runs of an earlier fly have no recording
  const total = (run) => sum(PHASES.map(([phase]) => of(run, phase)));
  const rows = timed.map((run) => ({
    label: run.name, text: seconds(total(run)),
    parts: PHASES.map(([phase, kind]) => ({ value: of(run, phase), kind, text: phase, title: `${phase}: ${seconds(of(run, phase))}` })),
  }));
  return figure("Where the time went", "Recording is traces and progress; compile is packing and quantising weights and capturing graphs. Both are in no speed.",
    (width) => barRows(width, rows, Math.max(...timed.map(total)), "Seconds by phase"),
    table(["run", ...PHASES.map(([phase]) => phase)], timed.map((run) => [run.name, ...PHASES.map(([phase]) => seconds(of(run, phase)))]), "Seconds by phase"),
    legend(PHASES.map(([phase, kind]) => [kind, phase])));
}

function draftedRuns({ runs }) {
  return runs.filter((run) => run.positions.drafted.length);
}

function positionFigures(summary) {
  return draftedRuns(summary).map((run) => {
    const { drafted, reached, accepted, deferred, unconditional, conditional } = run.positions, drafts = drafted[0];
    const places = [...drafted.keys()].map((at) => ({
      name: String(at + 1), drafted: drafted[at], reached: reached[at] || 0, accepted: accepted[at] || 0, deferred: deferred?.[at] || 0,
      unconditional: unconditional[at] || 0, conditional: conditional[at] || 0,
    }));
    const groups = places.map((at) => ({ label: at.name, columns: [[
      { value: (at.accepted - at.deferred) / drafts, kind: "a0", title: `position ${at.name}: ${percent((at.accepted - at.deferred) / drafts)} ${deferred ? "the target token" : "accepted"}` },
      { value: at.deferred / drafts, kind: "a1", title: `position ${at.name}: ${percent(at.deferred / drafts)} deferred and stood` }]] }));
    return figure(`Acceptance by draft position: ${run.name}`,
      `Columns: share of ${plural(drafts, "draft")} accepted up to a position. Line: of those that reached it, all before accepted.`,
      (width) => columns(width, groups, 1, { x: "position in the draft", y: "share accepted" }, "Acceptance by position",
        { format: (value) => percent(value, 0), dots: places.map((at) => at.conditional) }),
      table(["position", "drafted", "reached", "accepted", "deferred of them", "of all drafts", "of those that reached it"], places.map((at) => [
        at.name, whole(at.drafted), whole(at.reached), whole(at.accepted), deferred ? whole(at.deferred) : NONE, percent(at.unconditional), percent(at.conditional)]), "Acceptance by draft position"),
      deferred ? legend([["a0", "the target token"], ["a1", "deferred and stood"]]) : null);
  });
}

/** Mean acceptance lengths by task; null where no run has counted them. */
function lengthFigure({ runs }) {
  const rows = runs.flatMap(({ name, stats }) => Object.entries(stats?.tasks || {}).map(([task, found]) => [
    name, task, whole(found.documents), ...["tau", "tau_document_mean", "al", "al_document_mean"].map((key) => fixed(found[key]))]));
  if (!rows.length) return null;
  return el("figure", {}, caption("Mean acceptance lengths",
    "tau: tokens per round; AL: 1 + accepted draft tokens per draft. Of all tokens, long outputs weigh more; /doc: means over documents, which all count the same."),
  table(["run", "task", "documents", "tau", "tau/doc", "AL", "AL/doc"], rows, "Mean acceptance lengths"));
}

function blockFigure(summary) {
  const traced = draftedRuns(summary).filter((run) => run.blocks);
  if (!traced.length) return null;
  const count = (run, length) => run.blocks[length] || 0;
  const share = (run, length) => count(run, length) / sum(run.blocks);
  const lengths = [...Array(Math.max(...traced.map((run) => run.blocks.length))).keys()];
  const groups = lengths.map((length) => ({ label: String(length), columns: traced.map((run) => [
    { value: share(run, length), kind: kindOf(run), title: `${run.name}: ${percent(share(run, length))} of the rounds gave ${plural(length, "token")}` }]) }));
  const most = Math.max(...lengths.flatMap((length) => traced.map((run) => share(run, length))));
  return figure("Tokens per round", "What one pass of the target gave, its own token included. Zero: all of it was rolled back later.",
    (width) => columns(width, groups, most, { x: "tokens that stood", y: "share of rounds" }, "Accepted block lengths", { format: (value) => percent(value, 0) }),
    table(["tokens", ...traced.map((run) => run.name)], lengths.map((length) =>
      [String(length), ...traced.map((run) => `${whole(count(run, length))} (${percent(share(run, length))})`)]), "Tokens per round"),
    traced.length > 1 ? legend(traced.map((run) => [kindOf(run), run.name])) : null);
}

function entropyFigures({ runs }) {
  return runs.filter((run) => run.entropy).map((run) => {
    const { edges, counts, medians, theta, unit, kind } = run.entropy, last = edges.at(-1);
    const most = Math.max(1, ...Object.values(counts).flat());
    const line = isNumber(theta) && theta <= last ? { at: theta / last, text: `theta ${theta}` } : null;
    const part = (width, [fate, name, style], isLast) => {
      const groups = counts[fate].map((count, number) => ({ columns: [[{ value: count, kind: style, title: `${between({ low: edges[number], high: edges[number + 1] }, fixed)}: ${count}` }]] }));
      return columns(width, groups, most, { x: isLast ? `entropy (${kind}, ${unit})` : "", y: `${name}: ${sum(counts[fate])}`, end: last }, `Entropy, ${name}`, { line, high: 130 });
    };
    return figure(`Entropy at mismatches: ${run.name}`, "How unsure the target was where the draft token was not the target token, by what became of the draft token.",
      (width) => svg("svg", { width, height: 390, role: "group" }, FATES.map((fate, number) => svg("g", { transform: `translate(0 ${number * 130})` }, part(width, fate, number === 2)))),
      table(["fate", "mismatches", "median entropy"], FATES.map(([fate, name]) => [name, whole(sum(counts[fate])), fixed(medians[fate], 3)]), "Entropy at mismatches"));
  });
}
