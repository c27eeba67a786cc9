/* What the browser does itself: draw parts, keep a zoom, theme, pause, and what the mouse does on the heatmap. */
(function () {
  "use strict";

  const QUIET = 5000; // ms without an answer, after which the page says so
  const TABLE_ROWS = 100;
  const TABLE_COLUMNS = 10;
  const number = (value) => value.toLocaleString("en-US");
  const root = document.documentElement;
  const { createElement } = window.React;

  let answered = Date.now();
  let paused = false;

  function set(id, props) {
    window.dash_clientside.set_props(id, props);
  }

  /* ---- answers ---- */

  function apply(answer) {
    if (!answer) return window.dash_clientside.no_update;
    answered = Date.now();
    for (const [id, props] of Object.entries(answer.set)) {
      if (props.figure) {
        for (const trace of props.figure.data) trace.x ??= props.figure.data[0].x; // sent once
        keepZoom(id, props.figure.layout);
      }
      set(id, props);
    }
    table();
    reveal();
    return answer.seen;
  }

  /* Scroll to the part that a link is to, once it is there. */
  let revealed = "";
  function reveal() {
    const part = revealed !== location.href && document.getElementById(location.hash.slice(1));
    if (!part) return;
    revealed = location.href;
    part.scrollIntoView({ block: "center" });
  }

  /* Return `[tag, properties, ...children]` as an element of React: Content in components.py. */
  function element(content) {
    if (!Array.isArray(content)) return content ?? null;
    const [tag, props, ...children] = content;
    return createElement(tag === "link" ? window.dash_core_components.Link : tag, props, ...children.map(element));
  }

  /* A zoom stays while `uirevision` does. Plotly's own memory of it ends where dcc.Graph writes the zoom into `figure`. */
  function keepZoom(id, layout) {
    const plot = document.querySelector(`#${id} .js-plotly-plot`);
    const before = plot && plot.layout;
    if (!before || before.uirevision !== layout.uirevision) return;
    for (const axis of ["xaxis", "yaxis"]) {
      if (before[axis] && before[axis].autorange === false && before[axis].range) {
        layout[axis] = { ...layout[axis], autorange: false, range: [...before[axis].range] };
      }
    }
  }

  /* ---- the heatmap: its trace has in `meta` what its rows and columns are, see heatmap.py ---- */

  function heatmap() {
    return document.querySelector("#heat .js-plotly-plot");
  }

  /* Return what is under the mouse: its row, its steps, and how far over the median it is. */
  function cellAt(event) {
    const plot = heatmap();
    const point = event && event.points[0];
    if (!point || !plot || !plot.data.length) return null;
    const { x, meta } = plot.data[0];
    const column = x.findLastIndex((edge) => edge <= point.x);
    const row = meta.rows.findLast(({ at }) => at <= point.y);
    if (!row || meta.first[column] === undefined) return null;
    return { row, first: meta.first[column], last: meta.last[column], value: point.z, left: 2 * column > meta.first.length, bbox: point.bbox };
  }

  function times(value) {
    if (value === 255) return "missing";
    const over = 0.5 + value / 254;
    return (value === 254 ? "≥ " : value === 0 ? "≤ " : "") + over.toFixed(2) + "×";
  }

  /* The heatmap in numbers, while a person wants them. */
  function table() {
    const details = document.getElementById("heat-details");
    const trace = details && details.open && heatmap()?.data[0];
    if (!trace) return;
    const { rows, last } = trace.meta;
    const cells = Uint8Array.from(atob(trace.z.bdata), (one) => one.charCodeAt(0));
    const from = Math.max(0, last.length - TABLE_COLUMNS);
    const lines = rows.map((row) => {
      const values = [...cells.subarray(row.at * last.length + from, (row.at + 1) * last.length)];
      const known = values.filter((value) => value !== 255);
      return { row, values, mean: known.length ? known.reduce((sum, value) => sum + value) / known.length : -1 };
    }).sort((a, b) => b.mean - a.mean).slice(0, TABLE_ROWS);
    const line = (tag, found) => ["tr", {}, ...found.map((cell) => [tag, {}, cell])];
    const body = lines.map(({ row, values }) => line("td", [["link", { href: row.href }, row.name], ...values.map(times)]));
    const head = line("th", ["", ...last.slice(from).map((step) => `step ${number(step)}`)]);
    const caption = `Busy time over the median of the step, newest ${last.length - from} columns, worst first` +
      (rows.length > lines.length ? `, ${lines.length} of ${number(rows.length)} rows` : "");
    const content = ["table", {}, ["caption", {}, caption], ["thead", {}, head], ["tbody", {}, ...body]];
    set("heat-table", { content: ["div", { id: "heat-table", className: "scroll", tabIndex: 0 }, content] });
  }

  function open(click) {
    const at = cellAt(click);
    if (!at) return;
    const [pathname, search] = at.row.href.split("?");
    set("url", { pathname, search: search ? "?" + search : "" });
  }

  /* Offer the way back from a zoom: a double click would open a rank. */
  function zoomed() {
    const { xaxis, yaxis } = heatmap()?.layout || {};
    if (xaxis) set("heat-whole", { hidden: xaxis.autorange !== false && yaxis.autorange !== false });
  }

  function whole() {
    window.Plotly.relayout(heatmap(), { "xaxis.autorange": true, "yaxis.autorange": "reversed" });
  }

  let waiting = null;
  let hovered = ""; // the cell that the tooltip is about, and its first line
  let heading = "";

  function hover(over) {
    clearTimeout(waiting);
    if (!document.getElementById("heat")) return;
    const at = cellAt(over);
    if (!at) return set("heat-tip", { show: false });
    const { row: { name, ranks }, first, last } = at;
    const steps = first === last ? `step ${number(first)}` : `steps ${number(first)}–${number(last)}`;
    hovered = `${ranks} ${first} ${last}`;
    heading = `${name}, ${steps}: ${times(at.value)}`;
    set("heat-tip", { show: true, bbox: at.bbox, direction: at.left ? "left" : "right", children: heading });
    waiting = setTimeout(() => set("asked", { data: { ranks, first, last } }), 120);
  }

  function describe(cell) {
    if (!cell || !document.getElementById("heat") || hovered !== `${cell.ranks} ${cell.first} ${cell.last}`) return;
    set("heat-tip", { children: heading + "\n" + cell.text });
  }

  document.addEventListener("toggle", (event) => { // Dash has no property of it
    if (event.target.id === "heat-details") table();
  }, true);

  /* ---- theme, pause, rank by number ---- */

  function dark() {
    const chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const THEME = "traceml-theme"; // not dcc.Store: that reads it when the page has been painted already
  function stored(theme) {
    try {
      if (theme) localStorage.setItem(THEME, theme);
      return localStorage.getItem(THEME);
    } catch (refused) {
      return theme; // kept for this page alone
    }
  }

  /* Change the theme with a click, else draw the one there is; return what the button offers. */
  function theme(clicks) {
    if (clicks) root.dataset.theme = stored(dark() ? "light" : "dark");
    return dark() ? "Light" : "Dark";
  }

  function pause(clicks) {
    paused = clicks % 2 === 1;
    answered = Date.now();
    const since = paused ? "paused at " + new Date().toLocaleTimeString("en-GB") : null;
    return [paused || document.hidden, paused ? "Resume" : "Pause", since];
  }

  function goto(_, text) {
    const rank = (text || "").trim();
    return /^\d+$/.test(rank) ? "/rank/" + rank : window.dash_clientside.no_update;
  }

  /* Return what a page says whose server is silent; asked at each tick. */
  function watch() {
    if (Date.now() - answered <= QUIET) return null;
    const since = new Date(answered).toLocaleTimeString("en-GB");
    const name = document.querySelector("#session strong")?.textContent ?? "";
    return `The dashboard's server has not answered since ${since}. If it has ended, this opens it again: traceml-ray dashboard ${name}`;
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.getElementById("page")) return;
    answered = Date.now();
    set("tick", { disabled: paused || document.hidden });
  });

  /* Copy what a button has; `navigator.clipboard` is there on localhost and over HTTPS alone. */
  function copy(button) {
    const field = document.body.appendChild(document.createElement("textarea"));
    field.value = button.dataset.copy.replace("{link}", () => location.origin + button.dataset.link);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 2000);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button);
    const menu = document.querySelector("#session details[open]");
    if (menu && !menu.contains(event.target)) menu.open = false;
  });

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set("theme", { children: theme() }));

  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  window.traceml_ray = { Content: ({ content }) => element(content) };
  const traceml = { apply, open, hover, zoomed, whole, describe, watch, theme, pause, goto };
  window.dash_clientside = Object.assign({}, window.dash_clientside, { traceml });
})();
