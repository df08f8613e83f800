(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  function draw() {
    for (const [name, figure] of Object.entries(figures)) {
      const element = document.getElementById("plot-" + name);
      if (element) dsprofFigures.draw(element, name, figure);
    }
  }
  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  // Anything folded away is unfolded on paper.
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
  document.querySelectorAll("button.copy").forEach(dsprofFigures.copyButton);

  // A link to a section or to a finding, which may be folded away, or above figures that were not drawn yet.
  const follow = () => dsprofFigures.reveal(decodeURIComponent(location.hash.slice(1)));
  window.addEventListener("hashchange", follow);
  follow();
})();
