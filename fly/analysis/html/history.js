// The history's page: for every series its verdict, its figures over the runs, and its newest runs.

const NUMBERS = [
  ["score", "Score", three], ["recovery", "Recovery against the night\u2019s own baseline", percent, (value) => percent(value, 0)], ["tau", "Mean acceptance length (tau)", fixed],
  ["time_x", "Time x, end to end", times], ["tok_s", "Tokens per second, end to end", (value) => fixed(value, 1)], ["truncated", "Answers cut at the length limit", percent],
];
const NEWEST = 50;

function overTime({ title, runs, rows, trend }, [key, name, format, onAxis = format], first) {
  const there = rows.map((row, at) => ({ ...row, at: first + at })).filter((row) => isNumber(row[key]));
  if (!there.length) return null;
  const interval = (row) => key === "recovery" && isNumber(row.recovery_low) ? { low: row.recovery_low, high: row.recovery_high } : null;
  const points = there.map((row) => ({ x: row.at, y: row[key], along: interval(row), text: trend.first_lost?.[1] === row.at && key === "score" ? "began" : "",
    title: `${row.date.slice(0, 19)} ${row.run}, commit ${text(row.commit).slice(0, 10)}, revision ${text(row.revision)}: ${format(row[key])}` }));
  const values = points.flatMap((point) => [point.y, ...ends(point.along)]);
  const dates = new Map(there.map((row) => [row.at, row.date.slice(0, 10)]));
  const every = Math.max(1, Math.ceil(there.length / 5)), marks = there.filter((_, at) => at % every === 0).map((row) => row.at);
  const x = { ...range(points.map((point) => point.x), false), name: `runs, ${first + 1} to ${runs}`, format: (at) => dates.get(at) ?? "", marks };
  return figure(name, null, {
    draw: (width) => scatter(width, [{ kind: "s0", isJoined: true, points }], x, { ...range(values, false), name: "", format: onAxis }, `${name}: ${title}`),
    columns: ["date", "run", "commit", "revision", [name, key, format]], values: there });
}

function seriesSection(series, number) {
  const { title, runs, rows, trend, words } = series, [sign, style] = signOf(trend.verdict), first = runs - rows.length;
  const newest = rows.slice(-NEWEST).reverse();
  return section(`series-${number}`, title,
    el("div", { class: "cards" }, card(`Decline over ${plural(runs, "run")}`, `${sign} ${trend.verdict}`, `${words}.`, style)),
    first ? el("p", { class: "note" }, `The newest ${rows.length} of ${plural(runs, "run")} are drawn; the trend is of all.`) : null,
    el("div", { class: "grid" }, NUMBERS.map((of) => overTime(series, of, first))),
    el("details", {}, el("summary", {}, `The newest ${plural(newest.length, "run")}`),
      table(["date", "run", "commit", "revision", "documents", ...NUMBERS.map(([key]) => key.replace("_", " ")), "machine"],
        newest.map((row) => [row.date.slice(0, 19), row.run, text(row.commit).slice(0, 10), text(row.revision), whole(row.documents),
          ...NUMBERS.map(([key, , format]) => format(row[key])), row.machine]), `Newest runs of ${title}`)));
}

const { series, ...written } = block("summary");
fillPage(written, [], series.map(seriesSection), series.map(({ title }) => title), "docs/history.md");
