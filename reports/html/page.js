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

  // What the timeline below is not of, and how to have it.
  function tell() {
    const canvas = document.getElementById("plot-timeline");
    if (!canvas) return;
    document.getElementById("other-step")?.remove();
    const of = figures.timeline.layout.meta?.step;
    if (!chosen || chosen.step === null || chosen.step === of) return;
    const note = document.createElement("p");
    note.id = "other-step";
    note.className = "lead";
    const ranks = chosen.rank === null ? "" : ` --ranks ${chosen.rank}`;
    note.textContent = `This timeline is of step ${of}. For step ${chosen.step}: `;
    const command = document.createElement("code");
    command.textContent = `dsprof report RUN --step ${chosen.step}${ranks}`;
    note.append(command);
    canvas.parentElement.before(note);
  }

  // A link to a section or to a finding, which may be folded away, or above figures that were not drawn yet; or to a
  // rank and a step (#rank=3&step=120), which are marked where ranks and steps are drawn.
  function follow() {
    const id = decodeURIComponent(location.hash.slice(1));
    const words = new URLSearchParams(id);
    const number = (name) => (/^\d+$/.test(words.get(name) ?? "") ? Number(words.get(name)) : null);
    const before = chosen;
    chosen = words.has("rank") || words.has("step") ? { rank: number("rank"), step: number("step") } : null;
    if (chosen || before) draw();
    tell();
    if (!chosen) dsprofFigures.reveal(id);
    else dsprofFigures.reveal("heatmap") || dsprofFigures.reveal("steps");
  }
  document.getElementById("plot-heatmap")?.on?.("plotly_click", (event) => {
    const rank = /\d+/.exec(event.points[0].y);
    location.hash = `rank=${rank[0]}&step=${event.points[0].x}`;
  });
  window.addEventListener("hashchange", follow);
  follow();
})();
