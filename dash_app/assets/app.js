/* What the browser does itself: draw parts, keep a zoom, theme, pause, and what the mouse does on the heatmap. */
(function () {
  "use strict";

  const QUIET = 10; // s without an answer, after which the page says so
  const number = (value) => value.toLocaleString("en-US");
  const root = document.documentElement;
  const { createElement } = window.React;

  let answered = Date.now();
  let silent = 0; // s since then in which this page ran: it may itself be too busy to take an answer
  let paused = false;
  let seen = {}; // of the last answer: the page, and a checksum of each part
  const charts = new Map(); // the newest figure of each, by id, and whether it is to be drawn yet

  function set(id, props) {
    window.dash_clientside.set_props(id, props);
  }

  /* ---- answers ---- */

  function apply(answer) {
    if (!answer) return window.dash_clientside.no_update;
    heard();
    if (answer.seen.page !== seen.page) charts.clear();
    for (const [id, props] of Object.entries(answer.set)) {
      if (id === "tab") {
        document.title = props.title;
        document.querySelector("link[rel=icon]").href = props.icon;
        continue;
      }
      const figure = props.figure ?? (props.of && props.of === seen.sums?.[id] && longer(id, props.grown));
      if (figure) charts.set(id, { figure, due: true });
      else if (props.of) delete answer.seen.sums[id]; // not drawn, or another answer was quicker: send all of it
      else if (document.activeElement?.id !== id) set(id, props); // what a person types stays
    }
    if (paused) set("paused", { children: "paused at " + clock(new Date()) }); // another page was opened
    seen = answer.seen;
    draw();
    reveal();
    return seen;
  }

  /* Return a chart's figure with new points at its end, and only so many of those before: _longer in app.py. */
  function longer(id, { keep, data, layout }) {
    const shown = charts.get(id)?.figure ?? document.querySelector(`#${id} .js-plotly-plot`);
    return shown?.data && { layout, data: shown.data.map((trace, at) => Object.entries(data[at]).reduce(
      (all, [name, ends]) => ({ ...all, [name]: [...trace[name].slice(trace[name].length - keep), ...ends] }), trace)) };
  }

  /* Charts out of sight wait: one of 8 lines takes 10 ms (by Plotly.extendTraces 9), and a node page has 17. */
  function draw() {
    for (const [id, chart] of charts) {
      const box = chart.due && document.getElementById(id)?.getBoundingClientRect();
      if (!box || box.top > window.innerHeight || box.bottom < 0) continue;
      chart.due = false;
      set(id, { figure: chart.figure });
    }
  }
  document.addEventListener("scroll", draw, { passive: true, capture: true });
  window.addEventListener("resize", draw);

  function heard() {
    answered = Date.now();
    silent = 0;
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
    const own = tag === "link" || tag === "a" ? ["a", { ...props, onClick: follow }] : [tag, props];
    return createElement(...own, ...children.map(element));
  }

  /* Lead to another page without a reload, as dcc.Link does, which takes no ARIA properties. */
  function follow(event) {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    if (event.currentTarget.pathname !== location.pathname) window.scrollTo(0, 0);
    go(event.currentTarget);
  }

  function go({ pathname, search, hash }) {
    set("url", { pathname, search, hash });
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
    const over = 4 ** ((value - 127) / 127);
    return (value === 254 ? "≥ " : value === 0 ? "≤ " : "") + over.toFixed(2) + "×";
  }

  function open(click) {
    const at = cellAt(click);
    if (!at?.row.href) return;
    const to = new URL(at.row.href, location);
    if (to.pathname.startsWith("/rank/")) to.searchParams.set("step", at.last);
    go(to);
  }

  let asking = null;
  let hovered = ""; // the cell that the tooltip is about, and its first line
  let heading = "";

  function hover(over) {
    clearTimeout(asking);
    if (!document.getElementById("heat")) return;
    const at = cellAt(over);
    if (!at) return set("heat-tip", { show: false });
    const { row: { name, ranks }, first, last } = at;
    const steps = first === last ? `step ${number(first)}` : `steps ${number(first)}–${number(last)}`;
    hovered = `${ranks} ${first} ${last}`;
    heading = `${name}, ${steps}: ${times(at.value)}`;
    set("heat-tip", { show: true, bbox: at.bbox, direction: at.left ? "left" : "right", children: heading });
    if (ranks.length) asking = setTimeout(() => set("asked", { data: { ranks, first, last } }), 120);
  }

  function describe(cell) {
    if (!cell || !document.getElementById("heat") || hovered !== `${cell.ranks} ${cell.first} ${cell.last}`) return;
    set("heat-tip", { children: heading + "\n" + cell.text });
  }

  /* The cursor of the heatmap: arrow keys move it, Enter opens what is under it. */
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const cursor = [Infinity, 0];
  document.addEventListener("keydown", (event) => {
    const plot = event.target.matches?.(".heat-box") && heatmap();
    if (!plot?.data?.[0]?.meta || !(event.key in ARROWS || event.key === "Enter")) return;
    event.preventDefault();
    const { x, meta: { rows, first } } = plot.data[0], { xaxis, yaxis } = plot._fullLayout, z = plot.calcdata[0][0].z;
    const most = [first.length - 1, rows.length - 1];
    most.forEach((end, way) => { cursor[way] = Math.max(0, Math.min(end, cursor[way] + (ARROWS[event.key] ?? [0, 0])[way])); });
    const [column, row] = cursor, at = rows[row].at;
    const [x0, x1] = [x[column], x[column + 1]].map((edge) => xaxis.l2p(edge) + xaxis._offset);
    const [y0, y1] = [at, rows[row + 1]?.at ?? z.length].map((edge) => yaxis.l2p(edge) + yaxis._offset);
    const under = { points: [{ x: x[column], y: at, z: z[at][column], bbox: { x0, x1, y0, y1 } }] };
    if (event.key === "Enter") return open(under);
    Object.assign(document.getElementById("heat-cursor").style, { left: `${x0 - 2}px`, top: `${y0 - 2}px`, width: `${x1 - x0 + 4}px`, height: `${y1 - y0 + 4}px` });
    hover(under);
  });

  /* ---- theme, pause ---- */

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

  const clock = (moment) => moment.toLocaleTimeString("en-GB", { timeZoneName: "short" });
  const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone;

  function pause(clicks) {
    paused = clicks % 2 === 1;
    heard();
    return [paused || document.hidden, paused ? "Resume" : "Pause", paused ? "paused at " + clock(new Date()) : null];
  }

  /* Return what a page says whose server is silent; asked each second. */
  function watch() {
    silent += !paused && !document.hidden;
    if (silent <= QUIET) return null;
    const since = clock(new Date(answered));
    const name = document.querySelector("#session strong")?.textContent ?? "";
    return `The dashboard's server has not answered since ${since}. If it has ended, this opens it again: traceml-ray dashboard ${name}`;
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.getElementById("page")) return;
    heard();
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
  const traceml = { apply, open, hover, describe, watch, theme, zone, pause };
  window.dash_clientside = Object.assign({}, window.dash_clientside, { traceml });
})();
