/* Charts as PNG: on white, with their title, page and session, and the names of their lines; as large as on the screen,
   with two pixels for each of its own. */
{
  const INK = "#1a1f25", MOST_ROWS = 40, HEAD = 52; // px above the chart

  /* Return the names of the lines, and how high they are in all below a chart of a width, px: in columns that are all as
     wide as the longest of them. */
  const legend = (data, width) => {
    const names = data.filter(({ name, visible, showlegend }) => name && visible !== false && showlegend !== false).map(({ name }) => name);
    const columns = Math.max(1, Math.floor(width / (48 + 7 * Math.max(...names.map(({ length }) => length)))));
    return { several: names.length > 1, px: names.length > 1 ? 17 + 19 * Math.ceil(names.length / columns) : 0 };
  };

  const text = (selector, within = document) => within?.querySelector(selector)?.textContent ?? "";

  /* Return the name of a file: "job-rank-3-on-host-1-stage-data.png". */
  const file = (...names) => names.filter(Boolean).join("-").replace(/[^\w.]+/g, "-") + ".png";

  /* Return the names of the rows of a heatmap, which are beside it in the page, as labels of its axis. */
  const rows = ([{ type, meta }]) => {
    if (type !== "heatmap" || !meta?.rows) return {};
    const shown = meta.rows.filter((_, at) => at % Math.ceil(meta.rows.length / MOST_ROWS) === 0);
    return { visible: true, showgrid: false, tickvals: shown.map(({ at }) => at + 0.5), ticktext: shown.map(({ name }) => name) };
  };

  /* Return a heatmap with the scale of its colours, which the page has below it: 127 is the median, see analysis/spread.py. */
  const scaled = ([trace, ...others]) => {
    if (trace?.type !== "heatmap") return [trace, ...others];
    const factors = [0.25, 0.5, 1, 2, 4], tickvals = factors.map((factor) => 127 + 63.5 * Math.log2(factor));
    return [{ ...trace, showscale: true, colorbar: { thickness: 10, outlinewidth: 0, tickvals, ticktext: factors.map((factor) => `${factor}×`) } }, ...others];
  };

  const picture = async (button) => {
    const plot = document.querySelector(`#${CSS.escape(button.dataset.png)} .js-plotly-plot`);
    if (!plot) return;
    const { data, layout } = plot, { width, height } = plot._fullLayout, { margin = {}, font } = layout;
    const title = text("h2", plot.closest(".panel")) || plot.closest(".graph").getAttribute("aria-label").split(";")[0];
    const session = text("#session strong"), page = text("main h1");
    const right = Math.max(margin.r ?? 0, data[0]?.type === "heatmap" ? 60 : 16);
    const { several, px } = legend(data, width - (margin.l ?? 0) - right);
    const figure = {
      data: scaled(data),
      layout: {
        ...layout,
        width, height: height + HEAD + px,
        paper_bgcolor: "#fff", plot_bgcolor: "#fff",
        font: { ...font, color: INK },
        title: {
          text: `${title}<br><span style="font-size:11px">${[page, session].filter(Boolean).join(" · ")}</span>`,
          x: 0, xref: "paper", y: 1, yref: "container", yanchor: "top", pad: { t: 20 }, font: { size: 14 },
        },
        margin: { ...margin, t: (margin.t ?? 6) + HEAD, b: (margin.b ?? 38) + px, r: right },
        showlegend: several,
        legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
        yaxis: { ...layout.yaxis, automargin: true, ...rows(data) },
      },
    };
    const link = document.createElement("a");
    link.href = await window.Plotly.toImage(figure, { format: "png", width, height: figure.layout.height, scale: 2 });
    link.download = file(session, page.toLowerCase(), button.dataset.png);
    link.click();
  };

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-png]");
    if (button) picture(button);
  });
}
