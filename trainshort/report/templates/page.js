// Draw the figures from the data in the page. Redraw them if the color scheme or the width of the page changes.
(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
  const narrowScreen = window.matchMedia("(max-width: 720px)");

  // Return a copy of a layout with the colors of the page and the margins for the width of the screen.
  function styleLayout(originalLayout) {
    const style = getComputedStyle(document.documentElement);
    const textColor = style.getPropertyValue("--ink").trim();
    const gridColor = style.getPropertyValue("--line").trim();
    const layout = JSON.parse(JSON.stringify(originalLayout));
    for (const name of ["xaxis", "yaxis", "yaxis2"]) {
      const axis = layout[name];
      if (!axis) continue;
      axis.gridcolor = gridColor;
      axis.linecolor = gridColor;
      axis.zerolinecolor = gridColor;
    }
    layout.paper_bgcolor = "rgba(0,0,0,0)";
    layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: textColor, size: 12 };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)" };
    // The space at the top is for the tool bar.
    layout.margin = { l: 56, r: layout.yaxis2 ? 56 : 12, t: 30, b: 48 };
    if (narrowScreen.matches) {
      // On a phone, titles of axes are small, and the right axis has no title.
      layout.margin = { l: 44, r: layout.yaxis2 ? 34 : 8, t: 12, b: 48 };
      for (const name of ["xaxis", "yaxis"]) {
        if (layout[name].title) layout[name].title.font = { size: 10 };
      }
      if (layout.yaxis2) layout.yaxis2.title = { text: "" };
    }
    layout.hovermode = "closest";
    layout.dragmode = narrowScreen.matches ? false : "zoom";
    if (layout.showlegend) {
      layout.legend = { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", font: { size: 12 } };
    }
    return layout;
  }

  // On a phone, hide the legend entries of dotted lines. The caption explains dotted lines.
  function hideReferenceLegend(traces) {
    if (!narrowScreen.matches) return traces;
    return traces.map(function (trace) {
      const isDotted = trace.line && trace.line.dash;
      return isDotted ? { ...trace, showlegend: false } : trace;
    });
  }

  const resizeObserver = new ResizeObserver(function (entries) {
    for (const entry of entries) {
      const isDrawn = entry.target.data;
      if (isDrawn) Plotly.Plots.resize(entry.target);
    }
  });

  function drawFigures() {
    const config = { responsive: true, displaylogo: false, displayModeBar: "hover" };
    for (const figure of figures) {
      const element = document.getElementById("plot-" + figure.name);
      if (element) {
        resizeObserver.observe(element);
        Plotly.react(element, hideReferenceLegend(figure.data), styleLayout(figure.layout), config);
      }
    }
  }
  drawFigures();
  darkScheme.addEventListener("change", drawFigures);
  narrowScreen.addEventListener("change", drawFigures);

  // Open all folded parts before printing, and fold them again afterwards.
  const openedForPrint = [];
  window.addEventListener("beforeprint", function () {
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      openedForPrint.push(details);
    }
  });
  window.addEventListener("afterprint", function () {
    while (openedForPrint.length) openedForPrint.pop().open = false;
  });
})();
