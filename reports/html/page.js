"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = {
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "svg" },
  };
  // Bars that there is nothing to look closer at: the toolbar would only cover them.
  const plain = new Set(["time", "budget", "memory-parts"]);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;

  // The figures bring no ink of their own: it follows the page's.
  function ink() {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim();
    const grid = style.getPropertyValue("--grid").trim();
    const paper = style.getPropertyValue("--card").trim();
    return { text, grid, paper };
  }

  function themed(layout) {
    const { text, grid, paper } = ink();
    const axis = (old) => Object.assign({}, old, { gridcolor: grid, linecolor: grid, zerolinecolor: grid });
    return Object.assign({}, layout, {
      font: Object.assign({}, layout.font, { color: text }),
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      hoverlabel: Object.assign({}, layout.hoverlabel, {
        bgcolor: paper, bordercolor: grid, font: Object.assign({}, layout.hoverlabel.font, { color: text }),
      }),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: text },
      dragmode: touch ? false : layout.dragmode || "zoom",
    });
  }

  const drawn = Object.entries(figures).filter(([name]) => document.getElementById("plot-" + name));
  function draw() {
    for (const [name, figure] of drawn) {
      Plotly.react("plot-" + name, figure.data, themed(figure.layout), Object.assign({ displayModeBar: plain.has(name) ? false : "hover" }, config));
    }
  }
  draw();
  dark.addEventListener("change", draw);

  // Anything folded away is unfolded on paper.
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });

  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = [...button.parentElement.querySelectorAll("pre")].map((pre) => pre.textContent).join("\n");
      let done = false;
      try {
        await navigator.clipboard.writeText(text);
        done = true;
      } catch {
        const area = document.createElement("textarea");
        area.value = text;
        document.body.append(area);
        area.select();
        done = document.execCommand("copy");
        area.remove();
      }
      button.textContent = done ? "copied" : "select and copy";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
})();
