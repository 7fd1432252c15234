// Draws the figures from the page's own data, in the colours of the reader's scheme; redraws when that changes.
(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 720px)");

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const made = JSON.parse(JSON.stringify(layout));
    for (const name of ["xaxis", "yaxis", "yaxis2"]) {
      if (!made[name]) continue;
      made[name].gridcolor = line;
      made[name].linecolor = line;
      made[name].zerolinecolor = line;
    }
    made.paper_bgcolor = "rgba(0,0,0,0)";
    made.plot_bgcolor = "rgba(0,0,0,0)";
    made.font = { color: ink, size: 12 };
    made.modebar = { bgcolor: "rgba(0,0,0,0)" };
    made.margin = { l: 56, r: made.yaxis2 ? 56 : 12, t: 30, b: 48 }; // at the top the tool bar lies, and nothing else
    if (narrow.matches) { // a phone: the right axis keeps its numbers, long titles are small
      made.margin = { l: 44, r: made.yaxis2 ? 34 : 8, t: 12, b: 48 };
      for (const name of ["xaxis", "yaxis"]) if (made[name].title) made[name].title.font = { size: 10 };
      if (made.yaxis2) made.yaxis2.title = { text: "" };
    }
    made.hovermode = "closest";
    made.dragmode = narrow.matches ? false : "zoom";
    if (made.showlegend) {
      made.legend = { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", font: { size: 12 } };
    }
    return made;
  }

  function shown(traces) { // on a phone the caption names the dotted lines
    return narrow.matches ? traces.map((one) => (one.line && one.line.dash ? { ...one, showlegend: false } : one)) : traces;
  }

  const watcher = new ResizeObserver((seen) => seen.forEach((one) => one.target.data && Plotly.Plots.resize(one.target)));

  function draw() {
    for (const figure of figures) {
      const place = document.getElementById("plot-" + figure.name);
      if (place) {
        watcher.observe(place);
        Plotly.react(place, shown(figure.data), themed(figure.layout), { responsive: true, displaylogo: false, displayModeBar: "hover" });
      }
    }
  }
  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);

  // On paper nothing can be opened.
  const closed = [];
  window.addEventListener("beforeprint", function () {
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      closed.push(part);
    }
  });
  window.addEventListener("afterprint", function () {
    while (closed.length) closed.pop().open = false;
  });
})();
