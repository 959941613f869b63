// What the page says of whole runs: headline numbers, scores, speed and the charts of traces.

const PHASES = [["prefill", "s0"], ["draft", "s3"], ["verify", "s1"], ["other", "s2"], ["recording", "s4"], ["compile", "s5"]];
const FATES = [["stood", "deferred, stood", "f0"], ["rolled_back", "deferred, rolled back", "f1"], ["rejected", "rejected at once", "f2"]];
const SIGNS = { held: ["\u2713", "held"], unchanged: ["=", "unchanged"], fell: ["\u2717", "fell"], "decides nothing": ["\u2013", ""] };

const kindOf = (run) => `s${run.number % 6}`;
const unique = (values) => [...new Set(values)];
const signOf = (verdict) => SIGNS[verdict] ?? ["?", "undecided"];
const join = (parts) => parts.filter(Boolean).join("; ");
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

/** What all runs are of, above their cards: task, model, machine, date. */
function factsOfAll({ runs }) {
  const of = (key) => unique(runs.map((run) => run.facts[key]).filter(Boolean)).join(", ");
  return el("p", { class: "facts" }, ["task", "model", "machine", "date"].map(of).filter(Boolean).join(" \u00b7 "));
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
      join([`${plural(stats.emitted, "token")} in ${plural(stats.rounds, "round")} (passes of the target)`, ...acceptanceLengths(stats)]))),
    notesBelow(notes));
}

function notesBelow(notes) {
  return notes.map((note) => el("p", { class: "note" }, `Note: ${note}`));
}

/** What tau does not say: AL, and both where every document counts the same. */
function acceptanceLengths(stats) {
  const means = [["tau", stats.tau_document_mean], ["AL", stats.al_document_mean]].filter(([, mean]) => isNumber(mean));
  return [isNumber(stats.al) && `AL = 1 + accepted / drafts = ${fixed(stats.al)}`,
    means.length && `means over documents: ${means.map(([name, mean]) => `${name} ${fixed(mean)}`).join(", ")}`];
}

/** All rows of a comparison, the one over all tasks last. */
function rowsOf({ rows = [], overall = null }) {
  return overall ? [...rows, overall] : rows;
}

/** A compared run's speed over all tasks; null where there is none. */
function speedOf({ speeds = [] }) {
  return speeds.at(-1) ?? null;
}

function timeCard(comparison) {
  const speed = speedOf(comparison);
  if (speed?.withheld) return card("Time x", NONE, `Withheld: ${speed.withheld}.`);
  if (!speed?.end_to_end) return card("Time x", NONE, "Both runs need fly\u2019s records of the same documents.");
  return card("Time x, end to end", times(speed.end_to_end.value),
    join([intervalNote(speed.end_to_end, times), `decoding alone ${times(speed.decode?.value)}`, `${times(speed.tokens?.value)} the tokens`]));
}

function intervalNote({ interval }, format) {
  return interval && `95 % interval ${between(interval, format)}`;
}

function comparedCards(comparison) {
  if (comparison.refused) return [card("Not comparable", NONE, comparison.refused)];
  const { verdict, reason, texts } = comparison, main = rowsOf(comparison)[comparison.main]?.scores;
  const differing = texts.of && `${texts.differ} of ${plural(texts.of, "text")} differ`;
  if (!main) return [card("Scores", NONE, join([reason, differing])), timeCard(comparison)];
  const [sign, style] = signOf(verdict), isMissing = main.other === null;
  const changed = [!isMissing && `${main.lost} lost, ${main.won} won`, differing];
  return [
    card("Verdict", `${sign} ${verdict}`, `${reason[0].toUpperCase()}${reason.slice(1)}.`, style),
    card("Documents", String(main.documents), join(changed)),
    card("Recovery of the score", percent(main.recovery), isMissing ? null : intervalNote(main, percent)),
    timeCard(comparison),
  ];
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
  const namesIn = (key) => unique(runs.flatMap((run) => Object.keys(run[key])));
  const rows = namesIn("settings").map((name) => [name, ...runs.map((run) => run.settings[name] ?? NONE)]);
  const drafted = namesIn("sources").map((name) => [`drafted from ${name}`, ...runs.map((run) => ofSource(run.sources[name]))]);
  const heads = ["", ...runs.map((run) => run.name)], all = [...rows, ...drafted];
  const differing = all.filter(([, ...cells]) => unique(cells).length > 1), shared = all.filter((row) => !differing.includes(row));
  if (!differing.length) return table(heads, all, "Settings of the runs");
  return el("div", {}, table(heads, differing, "Settings in which the runs differ"),
    shared.length ? el("details", {}, el("summary", {}, `${plural(shared.length, "setting")} that all runs share`),
      table(["", "all runs"], shared.map(([name, cell]) => [name, cell]), "Settings that all runs share")) : null);
}

function ofSource(counts) {
  if (!counts) return NONE;
  return `${whole(counts.accepted)} of ${whole(counts.drafted)} accepted (${percent(counts.accepted / counts.drafted)})`;
}

function scoreFigures({ runs, scores }) {
  return scores.map((entry) => {
    const found = entry.runs.map((each, number) => ({ ...each, run: runs[number] })).filter((each) => isNumber(each.value));
    const isShare = found.every(({ right }) => right !== undefined);
    const all = found.flatMap(({ value, interval }) => [value, ...ends(interval)]);
    const high = isShare ? 1 : Math.max(...all), low = isShare ? 0 : Math.min(0, ...all);
    const rows = found.map(({ run, value, interval, right, documents }) => ({
      label: run.name, value, interval, kind: kindOf(run), text: fixed(value, 3) + (right === undefined ? "" : ` (${right} of ${documents})`),
    }));
    const filter = entry.filter === "none" ? "" : `, filter ${entry.filter}`;
    return figure(`${entry.task}: ${entry.metric}${filter}`,
      `Lines are 95 % intervals of each run by itself${isShare ? " (Wilson)" : ""}.${entry.higher_is_better ? "" : " Lower is better."}`,
      { draw: (width) => intervals(width, rows, low, high, `Scores of ${entry.task}`),
        columns: [["run", ({ run }) => run.name], ["score", "value", three], ["95 % interval", "interval", (interval) => between(interval, three)], ["documents", "documents", whole]],
        values: found });
  });
}

/** Every metric of every compared run: the pairs and their verdict. Null for one run. */
function comparisonFigure({ runs: [base], comparisons, notes }) {
  const all = comparisons.flatMap((comparison) => rowsOf(comparison).map(({ task, metric, verdict, scores }) => ({
    ...scores, verdict, label: `${comparison.name}: ${task} ${metric.replace(",", ", ")}` })));
  if (!all.length) return null;
  const lines = all.map((row) => {
    const isMissing = row.other === null, [sign, style] = signOf(row.verdict);
    const more = style === "undecided" && row.decides ? `; ${whole(row.decides)} documents would decide` : "";
    return [row.label, three(row.baseline), three(row.other), percent(row.recovery),
      between(row.interval, percent), isMissing ? NONE : `${row.lost} / ${row.won}`, isMissing ? NONE : `${pValue(row.p)} (${row.test})`,
      [el("b", { class: style }, `${sign} ${row.verdict}`), more]];
  });
  const made = figure("Did the scores hold?",
    `Against ${base.name}, in pairs of the same documents. Recovery is the share of its score that is kept, with a paired 95 % bootstrap interval; docs/compare.md defines the verdicts.`,
    { shown: table(["run: task and metric", base.name, "score", "recovery", "95 % interval", "lost / won", "p", "verdict"], lines, "Recovery"),
      columns: [["run: task and metric", "label"], "documents", "baseline", ["score", "other"], "recovery", ["95 % interval", "interval"], "lost", "won", "p", "test", "verdict", ["documents that would decide", "decides"]],
      values: all });
  made.append(...notesBelow(notes));
  return made;
}

/** Every value of the field of `--by`: scores and acceptance. Null without any. */
function categoryFigure({ categories }) {
  if (!categories.length) return null;
  const shown = categories.map((row) => [`${row.task}: ${row.category} (${row.documents})`, row.run, three(row.score), percent(row.recovery),
    isNumber(row.lost) ? `${row.lost} / ${row.won}` : NONE, isNumber(row.equal_texts) ? whole(row.equal_texts) : NONE, fixed(row.tau), fixed(row.al), times(row.decode_x)]);
  return figure("By category", "Recovery against the first run, in pairs of the same documents; p is not corrected for the number of categories.", {
    shown: table(["task: category", "run", "score", "recovery", "lost / won", "equal texts", "tau", "AL", "decoding x"], shown, "By category"),
    columns: ["task", "category", "documents", "run", "model", ["K", "k"], "metric", "score", "recovery", ["95 % interval", "interval"], "lost", "won", "p", ["equal texts", "equal_texts"], "tau", ["AL", "al"], ["decoding x", "decode_x"]],
    values: categories });
}

/** Drafters by rules, for every target by itself: a table per task. Null unless several runs draft. */
function matrixSection(summary) {
  const { matrix } = summary;
  if (!matrix) return null;
  if (matrix.refused) return section("matrix", "Drafters and rules", missing(`No matrix of these runs. ${matrix.refused}.`), frontierFigures(summary));
  const titleOf = (cell) => `${cell.task}: ${cell.metric}`;
  return section("matrix", "Drafters and rules",
    el("p", { class: "note" }, `Every run against its target alone: recovery of the score with a paired 95 % bootstrap interval, documents lost and won, time x end to end, and tau. The darker, the more of the score was lost; darkest from 10 %. p: that both score the same, corrected by Holm for ${plural(matrix.tests, "cell")}. A large p does not say that scores held: the interval says how much may be lost, and, where no document was, the share of the score that so few documents leave possible (95 %).`),
    unique(matrix.cells.map(titleOf)).map((title) => matrixFigure(title, matrix.cells.filter((cell) => titleOf(cell) === title))),
    frontierFigures(summary),
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
  return figure(`${title.replace(",", ", ")}, by drafter and rule`, null, { shown: table(["target, drafter", ...rules], rows, title),
    columns: ["target", "drafter", "rule", "run", "baseline", "documents", ["baseline score", "baseline_score"], "score", "recovery", ["95 % interval", "interval"], "lost", "won", "p",
      ["time x", ({ speed }) => speed?.end_to_end?.value], ["time x interval", ({ speed }) => speed?.end_to_end?.interval], ["tau", ({ speed }) => speed?.pace.tau]],
    values: cells });
}

/** Recovery over time x: a figure per task and metric, its points numbered as in the legend. */
function frontierFigures({ runs, frontier }) {
  return frontier.map(({ task, metric, points }) => {
    const title = `Recovery over time x: ${task}, ${metric}`, runOf = (point) => runs.find((run) => run.name === point.run);
    const best = points.filter((point) => point.is_best).sort((a, b) => a.time_x - b.time_x);
    const corners = best.flatMap((point, at) => [{ x: (best[at - 1] ?? point).time_x, y: point.recovery }, { x: point.time_x, y: point.recovery }]);
    const x = range(points.flatMap((point) => [point.time_x, ...ends(point.time_x_interval)]), false);
    const y = range(points.flatMap((point) => [point.recovery, ...ends(point.recovery_interval)]), false);
    const series = points.map((point) => ({ kind: kindOf(runOf(point)), points: [{ x: point.time_x, y: point.recovery, across: point.time_x_interval, along: point.recovery_interval,
      text: String(runOf(point).number + 1), title: `${point.run}: recovery ${percent(point.recovery)}, time x ${times(point.time_x)}` }] }));
    return figure(title, "Every run against its target alone. Thin lines are 95 % intervals, paired by document; they do not cover how a second run would differ. The stepped line joins the runs that no other surpasses in both.",
      { draw: (width) => scatter(width, series, { ...x, name: "time x over the target alone, end to end", format: times }, { ...y, name: "recovery", format: (value) => percent(value, 0) }, title, { level: 1, steps: corners }),
        legend: legend(points.map((point) => [kindOf(runOf(point)), `${runOf(point).number + 1}: ${point.run}`])),
        columns: ["run", ["recovery", "recovery", percent], ["recovery interval", "recovery_interval", (interval) => between(interval, percent)], ["time x", "time_x", times], ["time x interval", "time_x_interval", (interval) => between(interval, times)], ["on the front", "is_best", (value) => value ? "yes" : "no"]],
        values: points });
  });
}

/** tau and time x by K, where runs differ in it: a line per setting besides K. */
function draftLengthFigures({ points }) {
  const drafted = points.filter(({ k }) => isNumber(k));
  return unique(drafted.map(({ task }) => task)).flatMap((task) => {
    const own = drafted.filter((point) => point.task === task), marks = unique(own.map(({ k }) => k));
    if (marks.length < 2) return [];
    return [["tau", "Mean acceptance length (tau)", fixed], ["time_x", "Time x", times]].map(([key, name, format]) =>
      lineFigure(`${name} by K: ${task}`, own.filter((point) => isNumber(point[key])), "series", "", ["k", "K, the most draft tokens per round", String, marks], [key, name, format], 1));
  });
}

/** Tokens per second of a GPU over those of a user, where runs differ in the batch size. */
function throughputFigures({ points }) {
  const left = unique(points.filter(({ tok_s_user }) => !isNumber(tok_s_user)).map(({ run }) => run));
  const note = `Every point is a run at the batch size beside it. A user\u2019s tokens per second: emitted tokens over the time from the end of a request\u2019s prefill to its end. A GPU\u2019s: emitted tokens over the seconds of prefill and decoding together, over the devices of one copy of the pair.${left.length ? ` Left out, as their records have no wall_seconds: ${left.join(", ")}.` : ""}`;
  return unique(points.map(({ task }) => task)).map((task) => {
    const own = points.filter((point) => point.task === task && isNumber(point.tok_s_user));
    if (unique(own.map((point) => point.batch_size)).length < 2) return null;
    return lineFigure(`Throughput: ${task}`, own, "curve", note, ["tok_s_user", "tokens per second per user", short], ["tok_s_gpu", "tokens per second per GPU", short], null);
  });
}

/** Points joined by what they have in common. over, up: [key, name, format] of the two scales. */
function lineFigure(title, points, group, note, [over, xName, xFormat, marks], [up, yName, yFormat], level) {
  if (!points.length) return null;
  const names = unique(points.map((point) => point[group])), kind = (number) => `s${number % 6} d${number % 5}`;
  const series = names.map((name, number) => ({ kind: kind(number), isJoined: true,
    points: points.filter((point) => point[group] === name).sort((a, b) => a[over] - b[over]).map((point) => ({ x: point[over], y: point[up],
      text: group === "curve" ? point.batch_size : "", title: `${point.run}: ${xName} ${xFormat(point[over])}, ${yName} ${yFormat(point[up])}` })) }));
  const x = { ...range(points.map((point) => point[over]), !marks), name: xName, format: xFormat, marks };
  const y = { ...range([level ?? 0, ...points.map((point) => point[up])]), name: yName, format: yFormat };
  return figure(title, note || null, { draw: (width) => scatter(width, series, x, y, title, { level }),
    legend: legend(names.map((name, number) => [kind(number), name]), (style) => svg("line", { class: `join ${style}`, x1: 0, x2: 28, y1: 7, y2: 7 }), 28),
    columns: ["run", ["settings", group], ["batch size", "batch_size"], [xName, over], [yName, up]], values: points });
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
  const against = (run) => run === base ? null : speedOf(comparisons[run.number - 1]);
  const related = timed.filter((run) => against(run)?.end_to_end), isRelative = related.length > 0;
  if (!isRelative && timed.length > 1) return missing("The runs\u2019 times do not compare: see the cards above.");
  const kinds = [["end_to_end", "end to end"], ["decode", "decoding"]], ratios = isRelative ? kinds : [];
  const rows = (isRelative ? related : timed).flatMap((run) => kinds.map(([key, name]) => {
    const rate = run.stats[`${key}_tok_s`], value = isRelative ? against(run)[key]?.value : rate;
    return { label: `${run.name}, ${name}`, text: isRelative ? times(value) : `${fixed(value)} tok/s`,
      parts: [{ value: value || 0, kind: kindOf(run), title: `${fixed(rate)} tok/s` }] };
  }));
  const most = Math.max(...rows.map((row) => row.parts[0].value));
  const title = isRelative ? "Time x" : "Speed";
  const note = isRelative ? `Seconds of ${base.name} over the run\u2019s, for the same documents: 2 is half of the time.` : "Tokens per second.";
  return figure(title, `${note} End to end is prefill and decoding.`,
    { draw: (width) => barRows(width, rows, most, `${title} of the runs`, isRelative ? 1 : null),
      columns: [["run", "name"], ...ratios.flatMap(([key, name]) => [[`time x, ${name}`, (run) => against(run)?.[key]?.value, times],
        [`${name}, 95 %`, (run) => against(run)?.[key]?.interval, (interval) => between(interval, times)]]),
        ["end to end, tok/s", ({ stats }) => stats.end_to_end_tok_s, fixed], ["decoding, tok/s", ({ stats }) => stats.decode_tok_s, fixed],
        ["tau", ({ stats }) => stats.tau, fixed], ["tokens", ({ stats }) => stats.emitted, whole], ["rounds", ({ stats }) => stats.rounds, whole],
        ["peak memory, GiB", ({ stats }) => isNumber(stats.peak_memory_bytes) ? stats.peak_memory_bytes / 2 ** 30 : null, (value) => fixed(value, 1)]],
      values: timed });
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
    { draw: (width) => barRows(width, rows, Math.max(...timed.map(total)), "Seconds by phase"),
      columns: [["run", "name"], ...PHASES.map(([phase]) => [phase, (run) => of(run, phase), seconds])], values: timed,
      legend: legend(PHASES.map(([phase, kind]) => [kind, phase])) });
}

function draftedRuns({ runs }) {
  return runs.filter((run) => run.positions.drafted.length);
}

function positionFigures(summary) {
  return draftedRuns(summary).map((run) => {
    const { drafted, reached, accepted, deferred, unconditional, conditional } = run.positions, drafts = drafted[0];
    const places = [...drafted.keys()].map((at) => ({
      position: String(at + 1), drafted: drafted[at], reached: reached[at] || 0, accepted: accepted[at] || 0, deferred: deferred?.[at] || 0,
      unconditional: unconditional[at] || 0, conditional: conditional[at] || 0,
    }));
    const groups = places.map((at) => ({ label: at.position, columns: [[
      { value: (at.accepted - at.deferred) / drafts, kind: "a0", title: `position ${at.position}: ${percent((at.accepted - at.deferred) / drafts)} ${deferred ? "the target token" : "accepted"}` },
      { value: at.deferred / drafts, kind: "a1", title: `position ${at.position}: ${percent(at.deferred / drafts)} deferred and stood` }]] }));
    return figure(`Acceptance by draft position: ${run.name}`,
      `Columns: share of ${plural(drafts, "draft")} accepted up to a position. Line: of those that reached it, all before accepted.`,
      { draw: (width) => columns(width, groups, { name: "position in the draft" }, { name: "share accepted", to: 1, format: (value) => percent(value, 0) },
        "Acceptance by position", { dots: places.map((at) => at.conditional) }),
        columns: ["position", ["drafted", "drafted", whole], ["reached", "reached", whole], ["accepted", "accepted", whole], ["deferred of them", (at) => deferred ? at.deferred : null, whole],
          ["of all drafts", "unconditional", percent], ["of those that reached it", "conditional", percent]],
        values: places,
        legend: deferred ? legend([["a0", "the target token"], ["a1", "deferred and stood"]]) : null });
  });
}

/** Mean acceptance lengths by task; null where no run has counted them. */
function lengthFigure({ runs }) {
  const values = runs.flatMap(({ name, stats }) => Object.entries(stats?.tasks || {}).map(([task, found]) => ({ ...found, run: name, task })));
  if (!values.length) return null;
  return figure("Mean acceptance lengths",
    "tau: tokens per round; AL: 1 + accepted draft tokens per draft. Of all tokens, long outputs weigh more; /doc: means over documents, which all count the same.",
    { columns: ["run", "task", ["documents", "documents", whole], ["tau", "tau", fixed], ["tau/doc", "tau_document_mean", fixed], ["AL", "al", fixed], ["AL/doc", "al_document_mean", fixed]], values });
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
    { draw: (width) => columns(width, groups, { name: "tokens that stood" }, { name: "share of rounds", to: most, format: (value) => percent(value, 0) }, "Accepted block lengths"),
      columns: [["tokens", Number], ...traced.flatMap((run) => [[`${run.name}, rounds`, (length) => count(run, length), whole], [`${run.name}, share`, (length) => share(run, length), percent]])],
      values: lengths,
      legend: traced.length > 1 ? legend(traced.map((run) => [kindOf(run), run.name])) : null });
}

function entropyFigures({ runs }) {
  return runs.filter((run) => run.entropy).map((run) => {
    const { edges, counts, medians, theta, unit, kind } = run.entropy, last = edges.at(-1);
    const most = Math.max(1, ...Object.values(counts).flat());
    const line = isNumber(theta) && theta <= last ? { at: theta / last, text: `theta ${theta}` } : null;
    const part = (width, [fate, name, style], isLast) => {
      const groups = counts[fate].map((count, number) => ({ columns: [[{ value: count, kind: style, title: `${between({ low: edges[number], high: edges[number + 1] }, fixed)}: ${count}` }]] }));
      return columns(width, groups, { name: isLast ? `entropy (${kind}, ${unit})` : "", end: last }, { name: `${name}: ${sum(counts[fate])}`, to: most, format: String },
        `Entropy, ${name}`, { line, high: 130 });
    };
    return figure(`Entropy at mismatches: ${run.name}`, "How unsure the target was where the draft token was not the target token, by what became of the draft token.",
      { draw: (width) => svg("svg", { width, height: 390, role: "group" }, FATES.map((fate, number) => svg("g", { transform: `translate(0 ${number * 130})` }, part(width, fate, number === 2)))),
        shown: table(["fate", "mismatches", "median entropy"], FATES.map(([fate, name]) => [name, whole(sum(counts[fate])), three(medians[fate])]), "Entropy at mismatches"),
        columns: [["entropy", (at) => ({ low: edges[at], high: edges[at + 1] })], ...FATES.map(([fate, name]) => [name, (at) => counts[fate][at], whole])],
        values: [...counts.stood.keys()] });
  });
}
