// What the page says of whole runs: headline numbers, scores, speed and the charts of traces.

const kindOf = (run) => `s${run % 6}`;
const PHASES = [["prefill", "p0"], ["draft", "p1"], ["verify", "p2"], ["other", "p3"], ["recording", "p5"], ["compile", "p4"]];
const FATES = [["stood", "deferred, stood", "f0"], ["rolled_back", "deferred, rolled back", "f1"], ["rejected", "rejected at once", "f2"]];

function card(title, value, note, verdict = null) {
  return el("div", { class: `card ${verdict || ""}` },
    el("p", { class: "card-title" }, title), el("p", { class: "card-value" }, value),
    note ? el("p", { class: "note" }, note) : null);
}

/** One row of cards per compared run; of the only run, if there is one. */
function headline(summary) {
  const [base, ...others] = summary.runs;
  const chosen = others.length ? others : [base];
  return chosen.map((run, number) => {
    const comparison = summary.comparisons[number];
    return el("div", { class: "headline" },
      el("h2", { class: "run-title" }, swatch(summary.runs.indexOf(run)), run.name,
        others.length ? el("span", { class: "against" }, ` against ${base.name}`) : null),
      el("div", { class: "cards" },
        others.length ? comparedCards(run, base, comparison) : ownCards(run, summary), tauCard(run)));
  });
}

function comparedCards(run, base, comparison) {
  if (comparison.refused) return [card("Not comparable", NONE, comparison.refused)];
  const speed = comparison.end_to_end;
  return [
    recoveryCard(comparison),
    speed
      ? card("Time x, end to end", times(speed.value), `${interval(speed, times)}decoding alone ${times(comparison.decode && comparison.decode.value)}; ${times(comparison.tokens && comparison.tokens.value)} the tokens${comparison.notes.map((note) => `. Note: ${note}`).join("")}`)
      : card("Time x", NONE, comparison.withheld ? `The runs differ in what times depend on: ${comparison.withheld}.` : "Both runs need fly\u2019s records of the same documents."),
  ];
}

function interval({ low, high }, format) {
  return isNumber(low) ? `95 % interval ${format(low)} to ${format(high)}; ` : "";
}

const SIGNS = { held: ["\u2713", "held"], unchanged: ["=", "held"], fell: ["\u2717", "fell"], "decides nothing": ["\u2013", ""] };

function recoveryCard({ main, verdict, reason, decides }) {
  const [sign, style] = SIGNS[verdict] || ["?", "undecided"];
  const more = verdict === "not enough evidence" && decides ? ` About ${whole(decides)} documents would decide.` : "";
  const result = card("Recovery of the score", percent(main.recovery),
    main.other === null ? plural(main.documents, "document") : `${interval(main, percent)}${plural(main.documents, "document")}: ${main.lost} lost, ${main.won} won`, style);
  result.append(el("p", { class: "verdict" }, `${sign} ${verdict}`),
    el("p", { class: "note" }, `${reason[0].toUpperCase()}${reason.slice(1)}.${more}`));
  return result;
}

function ownCards(run, summary) {
  const first = summary.scores[0];
  return [
    first && first.runs[0] ? card(`${first.task}, ${first.metric}`, fixed(first.runs[0].value, 3), plural(first.runs[0].documents, "document")) : null,
    run.stats ? card("Speed, end to end", `${fixed(run.stats.end_to_end_tok_s, 1)} tok/s`, `decoding alone ${fixed(run.stats.decode_tok_s, 1)} tok/s`) : null,
  ];
}

function tauCard(run) {
  if (!run.stats) return null;
  return card("tau, tokens per round", fixed(run.stats.tau), `${plural(run.stats.emitted, "token")} in ${plural(run.stats.rounds, "round")} (passes of the target)`);
}

function swatch(number) {
  return svg("svg", { width: 14, height: 14, class: "swatch", "aria-hidden": "true" }, bar(0, 0, 14, 14, kindOf(number)));
}

/** The table of runs: what each was. */
function settings(summary) {
  const names = [...new Set(summary.runs.flatMap((run) => Object.keys(run.settings)))];
  return table(["", ...summary.runs.map((run) => run.name)],
    names.map((name) => [name, ...summary.runs.map((run) => run.settings[name] ?? NONE)]), "Settings of the runs");
}

function scoreSection(summary) {
  return summary.scores.map((entry) => {
    const runs = entry.runs.map((found, number) => ({ found, number })).filter(({ found }) => found);
    const rows = runs.map(({ found, number }) => ({
      label: summary.runs[number].name, value: found.value, low: found.low, high: found.high, kind: kindOf(number),
      text: found.right === undefined ? fixed(found.value, 3) : `${fixed(found.value, 3)} (${found.right} of ${found.documents})`,
    }));
    const bounded = runs.every(({ found }) => found.right !== undefined);
    const all = rows.flatMap((row) => [row.value, row.low, row.high]).filter(isNumber);
    const high = bounded ? 1 : Math.max(...all), low = bounded ? 0 : Math.min(0, ...all);
    const filter = entry.filter === "none" ? "" : `, filter ${entry.filter}`;
    const direction = entry.higher_is_better ? "" : " Lower is better.";
    return figure(`${entry.task}: ${entry.metric}${filter}`,
      `Lines are 95 % intervals of each run by itself${bounded ? " (Wilson)" : ""}.${direction}`,
      (width) => intervals(width, rows, low, high, `Scores of ${entry.task}`),
      table(["run", "score", "95 % interval", "documents"], runs.map(({ found, number }) => [
        summary.runs[number].name, fixed(found.value, 3),
        isNumber(found.low) ? `${fixed(found.low, 3)} to ${fixed(found.high, 3)}` : NONE, whole(found.documents)]), "Scores"));
  });
}

/** Every metric of every compared run: the pairs and their verdict. Null for one run. */
function comparisonFigure(summary) {
  const compared = summary.comparisons.filter((comparison) => !comparison.refused);
  const lines = compared.flatMap(({ name, rows }) => rows.map((row) => [
    `${name}: ${row.label.replace(",", ", ")}`, fixed(row.baseline, 3), fixed(row.other, 3), percent(row.recovery),
    isNumber(row.low) ? `${percent(row.low)} to ${percent(row.high)}` : NONE, row.other === null ? NONE : `${row.lost} / ${row.won}`, row.other === null ? NONE : `${fixed(row.p, 3)} (${row.test})`,
    verdictOf(row)]));
  if (!lines.length) return null;
  return el("figure", {}, el("figcaption", {}, el("h3", {}, "Did the scores hold?"),
    el("p", { class: "note" }, `Against ${summary.runs[0].name}, in pairs of the same documents. Recovery is the share of its score that is kept, with a paired 95 % bootstrap interval; docs/compare.md defines the verdicts.`)),
  table(["run: task and metric", summary.runs[0].name, "score", "recovery", "95 % interval", "lost / won", "p", "verdict"], lines, "Recovery"));
}

function verdictOf({ verdict, decides }) {
  const [sign, style] = SIGNS[verdict] || ["?", "undecided"];
  const more = style === "undecided" && decides ? `; ${whole(decides)} documents would decide` : "";
  return [el("b", { class: style }, `${sign} ${verdict}`), more];
}

function missing(text) {
  return el("p", { class: "empty" }, text);
}

function speedFigure(summary) {
  const timed = summary.runs.map((run, number) => ({ run, number })).filter(({ run }) => run.stats);
  if (!timed.length) return missing("No run has fly\u2019s records: lm-eval\u2019s own backends, and enable_statistics=false, keep no times.");
  const base = summary.runs[0];
  const related = timed.filter(({ number }) => number && summary.comparisons[number - 1].end_to_end);
  const many = related.length > 0;
  if (!many && timed.length > 1) return missing("The runs\u2019 times do not compare: see the cards above.");
  const rows = (many ? related : timed).flatMap(({ run, number }) => [["end_to_end", "end to end"], ["decode", "decoding"]].map(([key, name]) => {
    const rate = run.stats[`${key}_tok_s`];
    const found = many ? summary.comparisons[number - 1][key] : null, value = many ? (found ? found.value : NaN) : rate;
    return { label: `${run.name}, ${name}`, text: many ? times(value) : `${fixed(value, 2)} tok/s`,
      parts: [{ value: isNumber(value) ? value : 0, kind: kindOf(number), title: `${fixed(rate, 2)} tok/s` }] };
  }));
  const most = Math.max(...rows.map((row) => row.parts[0].value));
  return figure(many ? "Time x" : "Speed", many ? `Seconds of ${base.name} over the run\u2019s, for the same documents: 2 is half of the time. End to end is prefill and decoding.` : "Tokens per second. End to end is prefill and decoding.",
    (width) => barRows(width, rows, most, many ? "Time x of the runs" : "Speed of the runs", many ? 1 : null),
    table(["run", "end to end, tok/s", "decoding, tok/s", "tau", "tokens", "rounds", "peak memory"], timed.map(({ run: { name, stats } }) => [
      name, fixed(stats.end_to_end_tok_s), fixed(stats.decode_tok_s), fixed(stats.tau), whole(stats.emitted), whole(stats.rounds),
      `${fixed(stats.peak_memory_bytes / 2 ** 30, 1)} GiB`]), "Speed"));
}

function timeFigure(summary) {
  const timed = summary.runs.filter((run) => run.stats);
  if (!timed.length) return null;
  const of = (run, phase) => run.stats.seconds[phase] || 0; // runs of an earlier fly have no recording
  const total = (run) => PHASES.reduce((sum, [phase]) => sum + of(run, phase), 0);
  const rows = timed.map((run) => ({
    label: run.name, text: seconds(total(run)),
    parts: PHASES.map(([phase, kind]) => ({ value: of(run, phase), kind, text: phase, title: `${phase}: ${seconds(of(run, phase))}` })),
  }));
  return figure("Where the time went", "Recording is traces and progress; compile is packing and quantising weights and capturing graphs. Both are in no speed.",
    (width) => barRows(width, rows, Math.max(...timed.map(total)), "Seconds by phase"),
    table(["run", ...PHASES.map(([phase]) => phase)], timed.map((run) => [run.name, ...PHASES.map(([phase]) => seconds(of(run, phase)))]), "Seconds by phase"),
    legend(PHASES.map(([phase, kind]) => [kind, phase])));
}

function positionFigures(summary) {
  return summary.runs.filter((run) => run.acceptance && run.acceptance.positions.length).map((run) => {
    const places = run.acceptance.positions;
    const groups = places.map((at, number) => ({ label: String(number + 1), columns: [[
      { value: at.native / at.drafted, kind: "a0", title: `position ${number + 1}: ${percent(at.native / at.drafted)} the target\u2019s own choice` },
      { value: at.deferred / at.drafted, kind: "a1", title: `position ${number + 1}: ${percent(at.deferred / at.drafted)} deferred and stood` }]] }));
    const conditional = places.map((at) => at.reached ? (at.native + at.deferred) / at.reached : 0);
    return figure(`Acceptance by draft position: ${run.name}`,
      "Columns: share of the tokens drafted at a position that stood. Line: the same where all before it stood.",
      (width) => columns(width, groups, 1, { x: "position in the draft", y: "share that stood" }, "Acceptance by position", { format: (value) => percent(value, 0), dots: conditional }),
      table(["position", "drafted", "target\u2019s choice", "deferred, stood", "stood", "if all before stood"], places.map((at, number) => [
        String(number + 1), whole(at.drafted), whole(at.native), whole(at.deferred), percent((at.native + at.deferred) / at.drafted), percent(conditional[number])]), "Acceptance by draft position"),
      legend([["a0", "the target\u2019s own choice"], ["a1", "deferred and stood"]]));
  });
}

function blockFigure(summary) {
  const traced = summary.runs.map((run, number) => ({ run, number })).filter(({ run }) => run.acceptance && run.acceptance.positions.length);
  if (!traced.length) return null;
  const share = (run, length) => (run.acceptance.blocks[length] || 0) / run.stats_rounds;
  traced.forEach(({ run }) => { run.stats_rounds = run.acceptance.blocks.reduce((sum, count) => sum + count, 0); });
  const longest = Math.max(...traced.map(({ run }) => run.acceptance.blocks.length));
  const groups = Array.from({ length: longest }, (_, length) => ({ label: String(length), columns: traced.map(({ run, number }) => [
    { value: share(run, length), kind: kindOf(number), title: `${run.name}: ${percent(share(run, length))} of the rounds gave ${plural(length, "token")}` }]) }));
  const most = Math.max(...groups.flatMap((group) => group.columns.map(([part]) => part.value)));
  return figure("Tokens per round", "What one pass of the target gave, its own token included. Zero: all of it was rolled back later.",
    (width) => columns(width, groups, most, { x: "tokens that stood", y: "share of rounds" }, "Accepted block lengths", { format: (value) => percent(value, 0) }),
    table(["tokens", ...traced.map(({ run }) => run.name)], groups.map((group, length) => [String(length), ...traced.map(({ run }) => `${whole(run.acceptance.blocks[length] || 0)} (${percent(share(run, length))})`)]), "Tokens per round"),
    traced.length > 1 ? legend(traced.map(({ run, number }) => [kindOf(number), run.name])) : null);
}

function entropyFigures(summary) {
  return summary.runs.filter((run) => run.entropy).map((run) => {
    const { edges, counts, medians, theta, unit, kind } = run.entropy;
    const last = edges[edges.length - 1];
    const most = Math.max(1, ...Object.values(counts).flat());
    const part = (width, [fate, name, style], isLast) => {
      const total = counts[fate].reduce((sum, count) => sum + count, 0);
      const groups = counts[fate].map((count, number) => ({ columns: [[{ value: count, kind: style, title: `${fixed(edges[number])} to ${fixed(edges[number + 1])}: ${count}` }]] }));
      const line = isNumber(theta) && theta <= last ? { at: theta / last, text: `theta ${theta}` } : null;
      return columns(width, groups, most, { x: isLast ? `entropy (${kind}, ${unit})` : "", y: `${name}: ${total}`, end: last }, `Entropy, ${name}`, { line, high: 130 });
    };
    return figure(`Entropy at mismatches: ${run.name}`, "How unsure the target was where the draft differed from its choice, by what became of the draft token.",
      (width) => svg("svg", { width, height: 390, role: "group" }, FATES.map((fate, number) => svg("g", { transform: `translate(0 ${number * 130})` }, part(width, fate, number === 2)))),
      table(["fate", "mismatches", "median entropy"], FATES.map(([fate, name]) => [name, whole(counts[fate].reduce((sum, count) => sum + count, 0)), fixed(medians[fate], 3)]), "Entropy at mismatches"));
  });
}
