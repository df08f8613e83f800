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

  return { draw, copyButton, reveal };
})();
