/* The mouse and the arrow keys on the heatmap; its trace has in `meta` what its rows and columns are, see views/heat_figure.py. */
{
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const cursor = [Infinity, 0]; // column and row
  const heatmap = () => document.querySelector("#heat .js-plotly-plot");
  const number = (value) => value.toLocaleString("en-US");
  let asking = null;

  /* Return the row and the steps that a point is in. */
  const cell = (event) => {
    const point = event?.points[0], { x, meta } = heatmap()?.data?.[0] ?? {};
    if (!point || !meta) return null;
    const column = x.findLastIndex((edge) => edge <= point.x), row = meta.rows.findLast(({ at }) => at <= point.y);
    return row && column in meta.first ? { ...point, row, column, first: meta.first[column], last: meta.last[column] } : null;
  };

  const times = (value) => value === 255 ? "missing" : ({ 0: "≤ ", 254: "≥ " }[value] ?? "") + (4 ** ((value - 127) / 127)).toFixed(2) + "×";

  /* Return the page that a click leads to: path and query. */
  const open = (click) => {
    const at = cell(click), { no_update } = window.dash_clientside;
    if (!at?.row.href) return [no_update, no_update];
    const to = new URL(at.row.href, location);
    if (to.pathname.startsWith("/rank/")) to.searchParams.set("step", at.last);
    return [to.pathname, to.search];
  };

  /* Return the tooltip: shown, where, on which side, its words; and have the server asked for more of them. */
  const hover = (over) => {
    clearTimeout(asking);
    const at = cell(over), { no_update, set_props } = window.dash_clientside;
    if (!at) return [false, no_update, no_update, no_update];
    const { row: { name, ranks }, first, last } = at, time = window.traceml_ray.time(last);
    const steps = (first === last ? `step ${number(first)}` : `steps ${number(first)}–${number(last)}`) + (time ? ` (${time})` : "");
    const heading = `${name}, ${steps}: ${times(at.z)}`;
    asking = setTimeout(() => set_props("asked", { data: { ranks, first, last, heading } }), 120);
    return [true, at.bbox, 2 * at.column > heatmap().data[0].meta.first.length ? "left" : "right", heading];
  };

  /* Arrow keys move the cursor, Enter opens what is under it: as the mouse over a cell, and a click on it. */
  document.addEventListener("keydown", (event) => {
    const plot = event.target.matches?.(".heat-box") && heatmap(), trace = plot?.data?.[0];
    if (!trace?.meta || !(event.key in ARROWS || event.key === "Enter")) return;
    event.preventDefault();
    const { x, meta: { rows, first } } = trace, { xaxis, yaxis } = plot._fullLayout, z = plot.calcdata[0][0].z;
    [first.length, rows.length].forEach((end, way) => { cursor[way] = Math.max(0, Math.min(end - 1, cursor[way] + (ARROWS[event.key] ?? [0, 0])[way])); });
    const [column, row] = cursor, y = rows[row].at;
    const [x0, x1] = [x[column], x[column + 1]].map((edge) => xaxis.l2p(edge) + xaxis._offset);
    const [y0, y1] = [y, rows[row + 1]?.at ?? z.length].map((edge) => yaxis.l2p(edge) + yaxis._offset);
    const under = { points: [{ x: x[column], y, z: z[y][column], bbox: { x0, x1, y0, y1 } }] };
    Object.assign(document.getElementById("heat-cursor").style, { left: `${x0 - 2}px`, top: `${y0 - 2}px`, width: `${x1 - x0 + 4}px`, height: `${y1 - y0 + 4}px` });
    window.dash_clientside.set_props("heat", event.key === "Enter" ? { clickData: under } : { hoverData: under });
  });

  (window.dash_clientside ??= {}).heatmap = { open, hover };
}
