/* Charts as PNG: on white, with their title and their names, at twice the size they are shown in. */
{
  const INK = "#1a1f25", MOST_ROWS = 40;

  /* Return the names of the rows of a heatmap, which are beside it in the page, as labels of its axis. */
  const rows = ([{ type, meta }]) => {
    if (type !== "heatmap" || !meta?.rows) return {};
    const shown = meta.rows.filter((_, at) => at % Math.ceil(meta.rows.length / MOST_ROWS) === 0);
    return { visible: true, tickvals: shown.map(({ at }) => at + 0.5), ticktext: shown.map(({ name }) => name) };
  };

  const picture = async (button) => {
    const plot = document.querySelector(`#${CSS.escape(button.dataset.png)} .js-plotly-plot`);
    if (!plot) return;
    const { data, layout } = plot, { width, height } = plot._fullLayout, { margin = {}, font } = layout;
    const title = plot.closest(".panel")?.querySelector("h2")?.textContent ?? button.dataset.png;
    const several = data.filter(({ name, visible }) => name && visible !== false).length > 1;
    const session = document.querySelector("#session strong")?.textContent ?? "";
    const figure = {
      data,
      layout: {
        ...layout,
        width, height: height + (several ? 80 : 44),
        paper_bgcolor: "#fff", plot_bgcolor: "#fff",
        font: { ...font, color: INK },
        title: { text: [title, session].filter(Boolean).join(" · "), x: 0, xref: "paper", font: { size: 14 } },
        margin: { ...margin, t: (margin.t ?? 6) + 38, b: (margin.b ?? 38) + (several ? 36 : 0), r: Math.max(margin.r ?? 0, 16) },
        showlegend: several,
        legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
        yaxis: { ...layout.yaxis, automargin: true, ...rows(data) },
      },
    };
    const link = document.createElement("a");
    link.href = await window.Plotly.toImage(figure, { format: "png", width, height: figure.layout.height, scale: 2 });
    link.download = [session, button.dataset.png].filter(Boolean).join("-").replace(/[^\w.-]+/g, "_") + ".png";
    link.click();
  };

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-png]");
    if (button) picture(button);
  });
}
