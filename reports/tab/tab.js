// The tab. What comes from a run is only ever text: nothing of it is made markup.

const BLOCKS = {
  words: (block) => element("p", { prose: block.text }),
  heading: (block) => element("h3", { text: block.text }),
  said: (block) => element("dl", { class: "run said" }, block.lines.flatMap(([label, words]) => [
    element("dt", { text: label }), element("dd", { prose: words }),
  ])),
  tiles: (block) => element("dl", { class: "tiles" }, block.values.map(([name, value]) =>
    element("div", {}, [element("dt", { text: name }), element("dd", { text: value })]))),
  codes: (block) => element("p", {}, [
    `${block.label}: `,
    ...block.codes.flatMap((code, at) => [
      at === 0 ? "" : block.good ? " " : ", ", element("code", { class: block.good ? "ok" : "", text: code }),
    ]),
    block.reason ? `: ${block.reason}` : "",
  ]),
  stack: (block) => element("div", { class: "stack", role: "img", "aria-label": block.label }, block.shares.map((share) => {
    const part = element("div", { title: share.told }, share.percent >= 7
      ? [element("span", { class: share.percent < 20 ? "short" : "", text: share.label })] : []);
    Object.assign(part.style, { flexGrow: share.percent, background: share.color, color: share.ink });
    return part;
  })),
  table: drawTable,
  figure: drawFigure,
  findingcard: drawFinding,
  folded: (block) => element("details", {}, [element("summary", { text: block.summary }), ...block.blocks.map(draw)]),
};

function draw(block) {
  return BLOCKS[block.kind](block);
}

function element(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "prose") made.append(...prose(value));
    else if (value !== "") made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// What stands between backticks is code.
function prose(words) {
  return words.split(/`([^`\n]+)`/).map((part, at) => at % 2 ? element("code", { text: part }) : part);
}

function drawTable(block) {
  const head = element("thead", {}, [element("tr", {}, block.columns.map((column) =>
    element("th", { scope: "col", class: column.number ? "n" : "", text: column.title })))]);
  const body = element("tbody", {}, block.rows.flatMap((row) => [
    [row, ""], ...row.below.map((one) => [one, "below"]),
  ]).map(([row, kind]) => element("tr",
    { class: [kind, row.marked && "blamed", row.bad && "bad"].filter(Boolean).join(" ") },
    row.cells.map((value, at) => {
      const column = block.columns[at];
      const cell = element("td", { class: column.number ? "n" : column.soft ? "meaning" : "" });
      if (at === 0 && row.swatch) {
        const swatch = element("i", { class: "swatch" });
        swatch.style.background = row.swatch;
        cell.append(swatch);
      }
      cell.append(column.code ? element("code", { text: value }) : column.strong ? element("strong", { text: value }) : value);
      if (at === row.cells.length - 1) {
        for (const code of row.codes) cell.append(" ", link(code, element("code", { text: code })));
      }
      return cell;
    }))));
  const name = block.tall ? "ranks" : block.bare ? "budget" : "plain";
  const table = element("table", { class: name }, block.bare ? [body] : [head, body]);
  return element("div", { class: block.tall ? "scroll tall" : "scroll", tabindex: "0" }, [table]);
}

const drawn = new Map();

function drawFigure(block) {
  const canvas = element("div", { id: `plot-${block.name}`, class: "canvas", role: "img", "aria-label": block.label });
  canvas.style.height = `${block.height}px`;
  drawn.set(canvas, block);
  const note = block.note ? [element("figcaption", { text: `Shown: ${block.note}.` })] : [];
  return element("figure", { class: "plot" }, [canvas, ...note]);
}

function drawFinding(card) {
  const facts = element("div", { class: "facts" });
  if (card.saving) {
    facts.append(element("div", { class: "saves" },
      [element("strong", { text: card.saving }), " ", element("small", { text: card.how })]));
  }
  if (card.measured) facts.append(element("div", { text: card.measured }));
  if (card.confidence) facts.append(element("div", {}, [element("small", { text: card.confidence })]));
  if (card.where) facts.append(element("div", {}, [element("small", { text: "where" }), ` ${card.where}`]));
  const article = element("article", { class: `card ${card.severity}`, id: card.id }, [
    element("header", {}, [
      element("span", { class: `badge ${card.severity}`, text: card.severity }),
      link(card.id, element("code", { text: card.code }), "code"),
      element("h3", { prose: card.title }),
    ]),
    facts,
    ...card.fixes.map((fix, at) => drawFix(fix, card.fixes.length > 1 ? ` ${at + 1}` : "")),
    ...(card.evidence ? [drawTable(card.evidence)] : []),
    ...(card.also ? [draw(card.also)] : []),
  ]);
  article.style.setProperty("--accent", card.color);
  return article;
}

function drawFix(fix, number) {
  const made = element("div", { class: "fix" }, [
    element("p", {}, [element("b", { text: `Fix${number}` }), " ", ...prose(fix.title), ...(fix.gain
      ? [" ", element("small", { text: `(${fix.gain})` })] : [])]),
  ]);
  if (fix.diff || fix.edits.length) {
    const button = element("button", { type: "button", class: "copy", text: "copy" });
    const code = fix.diff ? [drawDiff(fix.diff)] : fix.edits.flatMap((edit) => [
      ...(edit.place ? [element("div", { class: "place", text: edit.place })] : []), element("pre", { text: edit.text }),
    ]);
    made.append(element("div", { class: "copyable" }, [...code, button]));
    dsprofFigures.copyButton(button);
  }
  if (fix.applied_by) {
    made.append(element("p", {}, [element("small", {}, [
      "Without an edit: ", element("code", { text: fix.applied_by }), "; ",
      element("code", { text: "dsprof fix RUN --verify" }), " proves it.",
    ])]));
  }
  return made;
}

function drawDiff(text) {
  const kind = (line) => (/^(\+\+\+|---|@@)/.test(line) ? "at" : line.startsWith("+") ? "add" : line.startsWith("-") ? "del" : "");
  const lines = text.split("\n").filter((line, at, all) => line || at < all.length - 1);
  return element("pre", { class: "diff" }, lines.flatMap((line) => [element("span", { class: kind(line), text: line }), "\n"]));
}

// A link inside the tab, which the address of the whole TensorBoard keeps.
function link(id, inside, name = "") {
  const made = element("a", { href: `#${id}`, class: name }, [inside]);
  made.addEventListener("click", (event) => {
    event.preventDefault();
    remember({ at: id });
    dsprofFigures.reveal(id);
  });
  return made;
}

// --- the address: #dsprof&run=ID&at=rank.straggler&rank=3&step=12

const outer = (() => {
  try {
    return window.parent.location ? window.parent : window;
  } catch {
    return window;
  }
})();

// Empty of an address that is of another tab, or not well encoded.
function asked() {
  const [tab, ...words] = outer.location.hash.slice(1).split("&");
  if (tab !== "dsprof") return {};
  try {
    return Object.fromEntries(words.map((word) => word.split("=").map(decodeURIComponent)).filter((pair) => pair.length === 2));
  } catch {
    return {};
  }
}

// What of the address is a rank and a step: {rank, step}, each a number or null; null where neither is.
function chosen() {
  const words = asked();
  const number = (name) => (/^\d{1,9}$/.test(words[name] ?? "") ? Number(words[name]) : null);
  const found = { rank: number("rank"), step: number("step") };
  return found.rank === null && found.step === null ? null : found;
}

function remember(change) {
  const all = { ...asked(), ...change };
  const words = Object.entries(all).filter(([, value]) => value).map((pair) => pair.map(encodeURIComponent).join("="));
  outer.history.replaceState(outer.history.state, "", `#${["dsprof", ...words].join("&")}`);
}

// --- what the routes answer

async function ask(route, words = {}) {
  const response = await fetch(`./${route}?${new URLSearchParams(words)}`);
  const answer = await response.json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

// --- the page

let shown = null;
let follow = () => {};  // the address, which somebody else has changed

function theme() {
  let dark = null;
  try {
    dark = window.parent !== window && window.parent.document.body.classList.contains("dark-mode");
  } catch {
    dark = null;  // a page of another origin around it
  }
  if (dark !== null) document.documentElement.dataset.scheme = dark ? "dark" : "light";
  drawFigures();
}

function drawFigures() {
  for (const [canvas, block] of drawn) {
    if (canvas.isConnected) dsprofFigures.draw(canvas, block.name, dsprofFigures.marked(block.name, block.figure, chosen()));
    else drawn.delete(canvas);
  }
}

// Marks the rank and step of the address where ranks and steps are drawn, and says what of them the run has not.
function mark() {
  drawFigures();
  document.getElementById("not-captured")?.remove();
  const wanted = chosen();
  const entry = [...drawn].find(([, block]) => block.name === "heatmap");
  if (!wanted || !entry) return;
  const [canvas, block] = entry;
  const missing = [];
  if (wanted.rank !== null && dsprofFigures.rowOf(block.figure, wanted.rank) < 0) missing.push(`rank ${wanted.rank}`);
  if (wanted.step !== null && !dsprofFigures.columnOf(block.figure, wanted.step)) missing.push(`step ${wanted.step}`);
  if (missing.length === 0) return;
  const text = `The address names ${missing.join(" and ")}, which this run has not captured.`;
  canvas.parentElement.before(element("p", { id: "not-captured", class: "lead", text }));
}

// A click on the heat map chooses its rank and step: marked, kept in the address, and shown as the timeline.
function choosable(choose) {
  const canvas = document.getElementById("plot-heatmap");
  canvas?.on?.("plotly_click", (event) => {
    const [rank] = /\d+/.exec(event.points[0].y);
    remember({ rank, step: String(event.points[0].x), at: "" });
    mark();
    choose();
  });
}

async function show(run, runs, main) {
  shown = run;
  for (const button of document.querySelectorAll(".runs button")) {
    button.setAttribute("aria-current", button.dataset.run === run ? "true" : "false");
  }
  main.replaceChildren(element("p", { class: "lead", role: "status", text: "Reading the run…" }));
  let report;
  try {
    report = await ask("report", { run });
  } catch (error) {
    if (shown === run) main.replaceChildren(element("p", { class: "warning", role: "alert", text: error.message }));
    return;
  }
  if (shown !== run) return;  // another was chosen meanwhile
  const nav = element("nav", { "aria-label": "sections" }, report.sections.map((section) => link(section.id, section.title)));
  main.replaceChildren(drawHead(report.head), nav, ...report.sections.map(drawSection));
  const timeline = document.getElementById("timeline");
  let chooser = null;
  if (timeline && report.steps) {
    chooser = stepChooser(run, report, timeline);
    timeline.insertBefore(chooser.form, timeline.querySelector("figure"));
  }
  if (runs.length > 1) main.append(comparison(run, runs));
  mark();
  follow = () => {
    mark();
    chooser?.follow();
  };
  choosable(() => chooser?.follow());
  chooser?.follow();
  const wanted = asked();
  if (wanted.at) dsprofFigures.reveal(wanted.at);
  else if (chosen()) dsprofFigures.reveal("heatmap") || dsprofFigures.reveal("steps");
}

function drawHead(head) {
  return element("header", { class: "top" }, [
    element("p", { class: "crumb" }, [element("b", { text: "dsprof" }), ` ${head.name} `, element("span", { text: head.run })]),
    element("p", { class: "verdict" }, [element("small", { text: "verdict " }), element("span", { class: `status ${head.tone}`, text: head.status })]),
    element("h1", { class: head.headline.length > 160 ? `${head.tone} long` : head.tone, prose: head.headline }),
    ...head.notes.map((note) => element("p", { class: "note", prose: note })),
    ...head.warnings.map((warning) => element("p", { class: "warning", prose: warning })),
    ...(head.tiles.values.length ? [draw(head.tiles)] : []),
    ...(head.step_is ? [element("p", { class: "lead step-is", text: `${head.step_is}.` })] : []),
  ]);
}

function drawSection(section) {
  return element("section", { id: section.id }, [
    element("h2", { text: section.title }),
    ...(section.lead ? [element("p", { class: "lead", prose: section.lead })] : []),
    ...section.blocks.map(draw),
  ]);
}

function stepChooser(run, report, section) {
  const [first, last] = report.steps;
  const step = element("input", { type: "number", min: first, max: last, "aria-label": "step", placeholder: `${first} to ${last}` });
  const ranks = element("input", { type: "text", "aria-label": "ranks", placeholder: "ranks: 0,5" });
  const button = element("button", { type: "submit", text: "Show this step" });
  const said = element("span", { role: "status" });
  const form = element("form", { class: "controls" }, ["step", step, ...(report.ranks.length > 8 ? [ranks] : []), button, said]);
  const look = async () => {
    said.textContent = "";
    try {
      const block = await ask("timeline", { run, step: step.value, ranks: ranks.value.replaceAll(" ", "") });
      section.querySelector("figure").replaceWith(drawFigure(block));
      drawFigures();
      remember({ step: step.value });
      mark();
    } catch (error) {
      said.textContent = error.message;
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    look();
  });
  // The step of the address, and its rank before all others.
  const follow = () => {
    const wanted = chosen();
    if (!wanted || wanted.step === null) return;
    step.value = wanted.step;
    if (wanted.rank !== null) ranks.value = wanted.rank;
    look();
  };
  return { form, follow };
}

function comparison(run, runs) {
  const others = runs.filter((one) => one.id !== run);
  const select = element("select", { "aria-label": "the run to compare with" }, others.map((one) => element("option", { value: one.id, text: one.name })));
  const button = element("button", { type: "button", text: "Compare" });
  const text = element("pre", { class: "text", hidden: "" });
  button.addEventListener("click", async () => {
    text.hidden = false;
    text.textContent = "Reading the runs…";
    try {
      text.textContent = (await ask("comparison", { before: select.value, after: run })).text;
    } catch (error) {
      text.textContent = error.message;
    }
  });
  return element("section", { id: "compare" }, [
    element("h2", { text: "Compare" }),
    element("p", { class: "lead", text: "What changed from another run to this one. Of one run a side only large differences are certain." }),
    element("div", { class: "controls" }, [select, button]), text,
  ]);
}

export async function render() {
  document.title = "dsprof";
  document.head.append(element("link", { rel: "stylesheet", href: "./style.css" }));
  const list = element("ul");
  const main = element("main");
  document.body.append(element("div", { class: "tab" }, [
    element("aside", { class: "runs", "aria-label": "runs" }, [element("h2", { text: "Runs" }), list]), main,
  ]));
  theme();
  try {
    new MutationObserver(theme).observe(window.parent.document.body, { attributes: true, attributeFilter: ["class"] });
  } catch {
    // The theme of a page of another origin cannot be followed.
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawFigures);
  let runs;
  try {
    ({ runs } = await ask("runs"));
  } catch (error) {
    main.append(element("p", { class: "warning", role: "alert", text: error.message }));
    return;
  }
  for (const run of runs) {
    const button = element("button", { type: "button" }, [run.name, element("small", { text: run.headline ? `${run.status}: ${run.headline}` : "not analyzed yet" })]);
    button.dataset.run = run.id;
    button.addEventListener("click", () => {
      remember({ run: run.id, at: "", rank: "", step: "" });
      show(run.id, runs, main);
    });
    list.append(element("li", {}, [button]));
  }
  outer.addEventListener("hashchange", () => {
    const { run, at } = asked();
    if (!outer.location.hash.startsWith("#dsprof")) return;
    const other = run && run !== shown && runs.find((one) => one.id === run);
    if (other) show(run, runs, main);
    else follow();
    if (!other && at) dsprofFigures.reveal(at);
  });
  const wanted = asked().run;
  const first = runs.find((run) => run.id === wanted) || runs[0];
  if (first) await show(first.id, runs, main);
  else main.append(element("p", { text: "No run of dsprof lies below the log folder. Make one with: dsprof run train.py" }));
}
