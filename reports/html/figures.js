// Shared by the report's page and the TensorBoard tab: how figures look and are drawn, how a fix is copied.
const dsprofFigures = (() => {
  "use strict";
  const config = {
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "svg" },
  };
  // Bars that there is nothing to look closer at: the toolbar would only cover them.
  const plain = new Set(["time", "budget", "memory-parts"]);
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
    const axes = Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name));
    return Object.assign({}, layout, Object.fromEntries(axes.map((name) => [name, axis(layout[name])])), {
      font: Object.assign({}, layout.font, { color: text }),
      hoverlabel: Object.assign({}, layout.hoverlabel, {
        bgcolor: paper, bordercolor: grid, font: Object.assign({}, layout.hoverlabel.font, { color: text }),
      }),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: text },
      dragmode: touch ? false : layout.dragmode || "zoom",
    });
  }

  // Draws a figure into an element, or draws it anew.
  function draw(element, name, figure) {
    const toolbar = { displayModeBar: plain.has(name) ? false : "hover" };
    return Plotly.react(element, figure.data, themed(figure.layout), Object.assign(toolbar, config));
  }

  // The figure, with a rank's row and a step's column framed where it has them. chosen: {rank, step}, or null.
  function marked(name, figure, chosen) {
    if (!chosen || (name !== "heatmap" && name !== "steps")) return figure;
    const line = { color: ink().text, width: 2 };
    const shapes = [];
    if (chosen.step !== null) {
      const at = name === "heatmap" ? columnOf(figure, chosen.step) : [chosen.step - 0.5, chosen.step + 0.5];
      if (at) shapes.push({ type: "rect", xref: "x", yref: "paper", x0: at[0], x1: at[1], y0: 0, y1: 1, line });
    }
    const row = name === "heatmap" && chosen.rank !== null ? rowOf(figure, chosen.rank) : -1;
    if (row >= 0) shapes.push({ type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line });
    const layout = { ...figure.layout, shapes: [...(figure.layout.shapes ?? []), ...shapes] };
    return { data: figure.data, layout };
  }

  // Where the heat map's column of a step begins and ends; null: it has none.
  function columnOf(heatmap, step) {
    const columns = heatmap.data[0].x;
    const numbers = Array.from(columns.bdata ? decoded(columns) : columns);
    const width = narrowest(numbers);
    const index = cellOf(numbers, width, step);
    return index < 0 ? null : [numbers[index] - width / 2, numbers[index] + width / 2];
  }

  // The number of the heat map's row of a rank; -1: it has none. "ranks 4-" is a row of several.
  function rowOf(heatmap, rank) {
    const labels = heatmap.data[0].y;
    const firsts = labels.map((label) => Number(/\d+/.exec(label)[0]));
    return cellOf(firsts, labels[0].startsWith("ranks ") ? narrowest(firsts) : 1, rank);
  }

  // Which cell a number is in: each bears the first one of its numbers.
  function cellOf(firsts, width, wanted) {
    const index = firsts.findLastIndex((first) => first <= wanted);
    return index >= 0 && wanted < firsts[index] + width ? index : -1;
  }

  function narrowest(firsts) {
    const gaps = firsts.slice(1).map((first, before) => first - firsts[before]);
    return gaps.reduce((least, gap) => Math.min(least, gap), gaps[0] ?? 1);
  }

  // plotly's arrays of numbers come as base64 of a typed array.
  function decoded(array) {
    const kinds = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };
    const bytes = Uint8Array.from(atob(array.bdata), (letter) => letter.charCodeAt(0));
    return new kinds[array.dtype](bytes.buffer);
  }

  function copyButton(button) {
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
        button.focus();
      }
      button.textContent = done ? "copied" : "select and copy";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  // Unfolds whatever hides an element, and goes there.
  function reveal(id) {
    const target = id ? document.getElementById(id) : null;
    if (!target) return false;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView();
    return true;
  }

  return { draw, marked, columnOf, rowOf, copyButton, reveal };
})();
