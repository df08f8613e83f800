(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  let chosen = null;  // {rank, step} of the address, each a number or null
  function draw() {
    for (const [name, figure] of Object.entries(figures)) {
      const element = document.getElementById("plot-" + name);
      if (element) dsprofFigures.draw(element, name, dsprofFigures.marked(name, figure, chosen));
    }
  }
  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  // Anything folded away is unfolded on paper.
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
  document.querySelectorAll("button.copy").forEach(dsprofFigures.copyButton);

  // What of the rank and step is not there; or that the timeline below is of another step, and how to have that one.
  function tell() {
    document.getElementById("other-step")?.remove();
    const place = document.getElementById("plot-timeline") ?? document.getElementById("plot-heatmap");
    if (!place || !chosen) return;
    const { rank, step } = chosen;
    const missing = [];
    if (figures.heatmap && rank !== null && dsprofFigures.rowOf(figures.heatmap, rank) < 0) missing.push(`rank ${rank}`);
    if (figures.heatmap && step !== null && !dsprofFigures.columnOf(figures.heatmap, step)) missing.push(`step ${step}`);
    const of = figures.timeline?.layout.meta?.step;
    const note = document.createElement("p");
    note.id = "other-step";
    note.className = "lead";
    if (missing.length) {
      note.textContent = `The link to this page names ${missing.join(" and ")}, which this run has not captured.`;
      (document.getElementById("plot-heatmap") ?? place).parentElement.before(note);
    } else if (of !== undefined && step !== null && step !== of) {
      note.textContent = `This timeline is of step ${of}. For step ${step}: `;
      const command = document.createElement("code");
      command.textContent = `dsprof report RUN --step ${step}${rank === null ? "" : ` --ranks ${rank}`}`;
      note.append(command);
      place.parentElement.before(note);
    }
  }

  // A link to a section or to a finding, which may be folded away, or above figures that were not drawn yet; or to a
  // rank and a step (#rank=3&step=120), which are marked where ranks and steps are drawn.
  function follow() {
    const id = unquoted(location.hash.slice(1));
    const words = new URLSearchParams(id);
    const number = (name) => (/^\d+$/.test(words.get(name) ?? "") ? Number(words.get(name)) : null);
    const before = chosen;
    chosen = words.has("rank") || words.has("step") ? { rank: number("rank"), step: number("step") } : null;
    if (chosen || before) draw();
    tell();
    if (!chosen) dsprofFigures.reveal(id);
    else dsprofFigures.reveal("heatmap") || dsprofFigures.reveal("steps");
  }
  // Of an address that is not well encoded, as it stands.
  function unquoted(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return text;
    }
  }
  document.getElementById("plot-heatmap")?.on?.("plotly_click", (event) => {
    const rank = /\d+/.exec(event.points[0].y);
    location.hash = `rank=${rank[0]}&step=${event.points[0].x}`;
  });
  window.addEventListener("hashchange", follow);
  follow();
})();
