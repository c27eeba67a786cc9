/* One axis for all charts: a brush or a zoom goes into the URL, which the server draws; a line goes through all of them. */
{
  const linked = new WeakSet();
  const spine = () => document.querySelector("#spine .js-plotly-plot")?._fullLayout?.meta;
  const kind = (plot) => plot?._fullLayout?.meta?.axis;

  /* Return a value of one kind of axis on another: the spine has when its steps were over. */
  const converted = (value, from, to) => {
    const { steps, t_ms } = spine() ?? {};
    if (from === to) return value;
    if (!steps || !t_ms) return NaN;
    const wall = 60000 * new Date(t_ms.at(-1)).getTimezoneOffset(); // plotly.js has what a clock on the wall shows
    const [a, b, x] = from === "time" ? [t_ms, steps, value + wall] : [steps, t_ms, value];
    const after = a.findIndex((each) => each >= x), at = Math.max(1, after < 0 ? a.length - 1 : after);
    const found = b[at - 1] + ((b[at] - b[at - 1]) * (x - a[at - 1])) / (a[at] - a[at - 1] || 1);
    return to === "time" ? found - wall : found;
  };

  /* Return when a step was over, by the clock of the reader, with the date in a run of several days; "" where that is not known. */
  const time = (step) => {
    const { steps, t_ms } = spine() ?? {};
    if (!(t_ms?.length > 1) || !(step >= 0 && step <= steps.at(-1) + 0.5)) return "";
    const after = steps.findIndex((each) => each >= step), at = Math.max(1, after < 0 ? steps.length - 1 : after);
    const part = (step - steps[at - 1]) / (steps[at] - steps[at - 1] || 1), ms = t_ms[at - 1] + (t_ms[at] - t_ms[at - 1]) * part;
    const [first, last] = [t_ms[0], t_ms.at(-1)].map((ms) => new Date(ms).toDateString()), moment = new Date(Math.min(ms, t_ms.at(-1)));
    const day = first === last ? "" : moment.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) + " ";
    return day + moment.toLocaleTimeString("en-GB");
  };

  /* Show other steps; without any, the range that the page has by itself. */
  const choose = (from, to) => {
    const query = new URLSearchParams(location.search), first = Math.max(0, Math.ceil(from));
    ["from", "to"].forEach((name) => query.delete(name));
    if (from < to) query.set("from", first);
    if (from < to && to < spine()?.steps.at(-1)) query.set("to", Math.max(first + 1, Math.floor(to)));
    window.dash_clientside.set_props("url", { search: query.size ? "?" + query : "" });
  };

  const link = (plot) => {
    linked.add(plot);
    const range = (ends) => choose(...ends.map((end) => converted(end, kind(plot), "step")).sort((a, b) => a - b));
    plot.on("plotly_selected", (chosen) => chosen?.range?.x && range(chosen.range.x));
    plot.on("plotly_doubleclick", () => choose());
    plot.on("plotly_relayout", ({ "xaxis.range[0]": low, "xaxis.range[1]": high }) =>
      low !== undefined && range([low, high].map((end) => plot._fullLayout.xaxis.r2l(end))));
  };

  const cross = (event) => {
    const over = event.target.closest?.(".js-plotly-plot"), axis = kind(over) && over._fullLayout.xaxis;
    if (axis && !linked.has(over)) link(over);
    const value = axis ? axis.p2l(event.clientX - over.getBoundingClientRect().left - axis._offset) : NaN;
    for (const plot of document.querySelectorAll(".js-plotly-plot")) {
      if (!kind(plot)) continue;
      const { l2p, _length, _offset } = plot._fullLayout.xaxis, px = l2p(converted(value, kind(over), kind(plot)));
      const box = plot.closest(".graph"), inside = px >= 0 && px <= _length;
      if (!box) continue;
      box.style.setProperty("--cross", inside ? `${px + _offset}px` : "-9px");
      if (plot === over) box.dataset.time = inside && kind(plot) === "step" ? time(value) : "";
      else delete box.dataset.time;
    }
  };

  (window.traceml_ray ??= {}).time = time;
  for (const name of ["mousemove", "pointerdown"]) document.addEventListener(name, cross, true);

  /* A finger scrolls the page, over a chart as well, which plotly.js would take for a drag; the spine is for drags. */
  document.addEventListener("touchstart", (event) => event.target.closest?.(".graph:not(.spine) .js-plotly-plot") && event.stopPropagation(), { capture: true, passive: true });
}
