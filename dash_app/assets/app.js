/* What the browser does itself: draw parts and the heatmap, keep a zoom, theme, pause. */
(function () {
  "use strict";

  const QUIET = 5000; // ms without an answer, after which the page says so
  const HEIGHT = 270; // px of the heatmap's rows: .heat-box in app.css without its axis
  const MOST_ROWS = 128; // of ranks in the heatmap: with more, a row of one rank is too thin to be seen
  const MOST_BLOCKS = 200;
  const TABLE_ROWS = 100;
  const TABLE_COLUMNS = 10;
  const LIGHT = [[0, "#1d5fa3"], [0.3, "#7fb3dc"], [0.44, "#d3e3ef"], [0.5, "#f4f4f2"],
    [0.56, "#fbdcb5"], [0.66, "#f2a154"], [0.8, "#d9660f"], [1, "#8a3500"]];
  const DARK = [[0, "#8cc8ff"], [0.3, "#3a7ab5"], [0.44, "#234058"], [0.5, "#22272e"],
    [0.56, "#4f3519"], [0.66, "#9c5a17"], [0.8, "#e07d14"], [1, "#ffb860"]];
  const MISSING = { light: "#b4bac1", dark: "#596069" };
  const number = (value) => value.toLocaleString("en-US");
  const root = document.documentElement;
  const { createElement } = window.React;

  let heat = null; // the heatmap, put together from the answers
  let laid = null; // how its rows are laid out
  let marks = { ranks: [], nodes: [] }; // what the verdict names
  const opened = new Map(); // nodes that a person opened or closed
  let shown = { page: null, sums: {} }; // the page, and the parts that it has
  let answered = Date.now();
  let paused = false;

  function set(id, props) {
    window.dash_clientside.set_props(id, props);
  }

  /* ---- answers ---- */

  function apply(answer) {
    if (!answer) return window.dash_clientside.no_update;
    answered = Date.now();
    const { seen } = answer;
    const moved = seen.page !== shown.page;
    const marked = JSON.stringify(answer.marks) !== JSON.stringify(marks);
    shown = { page: seen.page, sums: seen.sums || {} };
    marks = answer.marks || { ranks: [], nodes: [] };
    if (answer.heat && !merge(answer.heat)) heat = seen.heat = null; // the next request asks for all of it
    for (const [id, props] of Object.entries(answer.set)) {
      if (props.figure) {
        for (const trace of props.figure.data) trace.x ??= props.figure.data[0].x; // sent once
        keepZoom(id, props.figure.layout);
      }
      set(id, props);
    }
    if (answer.heat || moved || marked) draw(moved);
    return seen;
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

  /* ---- the heatmap ---- */

  function bytes(text) {
    const raw = atob(text);
    const made = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) made[i] = raw.charCodeAt(i);
    return made;
  }

  /* Put together the kept and the new columns; false where those that it builds on are not here. */
  function merge(delta) {
    const whole = delta.ranks !== undefined;
    if (!whole && (!heat || heat.id !== delta.base)) return false;
    const kept = whole ? null : heat;
    const next = { ...(kept || {}), ...delta, offset: kept ? kept.offset : 0 };
    const rows = next.ranks.length;
    const fresh = bytes(delta.z);
    const cells = new Uint8Array(rows * delta.columns.length); // column after column
    let come = 0;
    delta.columns.forEach((from, to) => {
      const source = from < 0 ? fresh.subarray(come * rows, (come + 1) * rows) : kept.cells.subarray(from * rows, (from + 1) * rows);
      if (from < 0) come += 1;
      cells.set(source, to * rows);
    });
    const same = delta.columns.findIndex((from) => from >= 0);
    if (kept && same >= 0) next.offset = kept.offset + delta.columns[same] - same; // a zoom stays where it is
    next.cells = cells;
    delete next.z;
    heat = next;
    return true;
  }

  function dark() {
    const chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function scale() {
    const stops = (dark() ? DARK : LIGHT).map(([at, colour]) => [(at * 254) / 255, colour]);
    const grey = MISSING[dark() ? "dark" : "light"];
    return [...stops, [254.01 / 255, grey], [1, grey]];
  }

  function short(name) {
    return name.length > 16 ? name.slice(0, 8) + "…" + name.slice(-7) : name;
  }

  /*
   * The rows to draw: ranks where there is a pixel for each, else whole nodes (of very many, some to a row),
   * each as its worst rank. A node that is opened, or that the verdict names, is drawn rank by rank, and higher.
   */
  function layRows() {
    const { ranks, nodes } = heat;
    const starts = nodes.map((_, i) => i).filter((i) => i === 0 || nodes[i] !== nodes[i - 1]);
    const single = (i) => ({ members: [i], label: byNode() ? "" : `${ranks[i]}`, first: starts.includes(i) });
    if (ranks.length <= MOST_ROWS) return { blocks: null, starts, rows: ranks.map((_, i) => single(i)) };
    const per = Math.ceil(starts.length / MOST_BLOCKS);
    const blocks = starts.filter((_, i) => i % per === 0).map((from, i, all) => {
      const to = i + 1 < all.length ? all[i + 1] : ranks.length;
      const members = ranks.map((_, r) => r).slice(from, to);
      const named = members.some(pointedAt);
      return { members, label: nodes[from], open: opened.has(nodes[from]) ? opened.get(nodes[from]) : named };
    });
    const shown = blocks.filter((block) => block.open).reduce((sum, block) => sum + block.members.length, 0);
    const higher = Math.max(1, Math.min(Math.round((12 * blocks.length) / HEIGHT), Math.round((0.7 * blocks.length) / Math.max(1, shown))));
    const rows = blocks.flatMap((block) => (block.open
      ? block.members.flatMap((i) => Array(higher).fill({ ...single(i), block, opened: true }))
      : [{ members: block.members, label: block.label, block, first: true }]));
    return { blocks, starts: [], rows };
  }

  /* In a very large job the server tells of nodes alone, each as its worst rank. */
  function byNode() {
    return heat.by === "node";
  }

  function pointedAt(i) {
    return byNode() ? marks.nodes.includes(heat.nodes[i]) : marks.ranks.includes(heat.ranks[i]);
  }

  /* Ticks of the rows, as many as there is room for; those of opened nodes come first. */
  function rowTicks({ rows, blocks }) {
    const room = (13 * rows.length) / HEIGHT;
    const ticks = [];
    rows.forEach((row, y) => {
      if (row === rows[y - 1]) return;
      const many = rows.filter((other) => other === row).length;
      const named = row.first || (row.opened && (!rows[y - 1] || !rows[y - 1].opened));
      const node = short(heat.nodes[row.members[0]]);
      const text = row.members.length > 1 ? node : named ? `${node}  ${row.label}` : row.label;
      const tick = { at: y + (many - 1) / 2, text, strong: row.opened || (!blocks && row.first) };
      const last = ticks[ticks.length - 1];
      if (!last || tick.at - last.at >= room) ticks.push(tick);
      else if (tick.strong && !last.strong) ticks[ticks.length - 1] = tick;
    });
    return { vals: ticks.map((tick) => tick.at), text: ticks.map((tick) => tick.text) };
  }

  /* The value of a row at a column: its worst rank's, and whose it is. */
  function worst(row, column) {
    const from = column * heat.ranks.length;
    let value = 255;
    let who = row.members[0];
    for (const i of row.members) {
      const one = heat.cells[from + i];
      if (one !== 255 && (value === 255 || one > value)) { value = one; who = i; }
    }
    return { value, who };
  }

  /* Ticks of the columns: about seven, at round numbers of steps. */
  function columnTicks() {
    const { first, last, offset } = heat;
    const rough = (last[last.length - 1] - first[0] + 1) / 7;
    const ten = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const each = [1, 2, 5, 10].map((times) => times * ten).find((step) => step >= rough);
    const picked = first.map((_, i) => i).filter((i) => Math.floor(last[i] / each) > Math.floor((first[i] - 1) / each));
    return { vals: picked.map((i) => offset + i), text: picked.map((i) => number(Math.floor(last[i] / each) * each)) };
  }

  function draw(whole = false) {
    if (!heat || !("heat" in shown.sums)) return;
    const count = heat.first.length;
    laid = layRows();
    const { rows, starts, blocks } = laid;
    const z = [];
    rows.forEach((row, y) => {
      if (row === rows[y - 1]) return z.push(z[y - 1]);
      const line = new Uint8Array(count);
      for (let c = 0; c < count; c++) line[c] = worst(row, c).value;
      return z.push(line);
    });
    const y = rowTicks(laid);
    const x = columnTicks();
    const edges = blocks ? rows.map((_, i) => i).filter((i) => i && Boolean(rows[i].opened) !== Boolean(rows[i - 1].opened)) : starts.slice(1);
    const lines = 14 * edges.length > HEIGHT ? [] : edges.map((at) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: at - 0.5, y1: at - 0.5, line: { width: 1.5, color: "#8b939c" },
    }));
    const pointers = heat.ranks.map((_, i) => i).filter(pointedAt).map((i) => {
      const at = rows.map((_, r) => r).filter((r) => rows[r].members.includes(i));
      return { text: byNode() ? "◀" : `◀ ${heat.ranks[i]}`, x: 1, xref: "paper", y: (at[0] + at[at.length - 1]) / 2, xanchor: "left", showarrow: false,
        font: { color: "#d9731a", size: 12 } };
    });
    set("heat-hint", { children: blocks || byNode() ? "A row is a node, as its worst rank; a click opens it." : "A click opens the rank; a drag zooms." });
    const figure = {
      data: [{ type: "heatmap", z, x0: heat.offset, dx: 1, zmin: 0, zmax: 255, colorscale: scale(), showscale: false, hoverinfo: "none" }],
      layout: {
        margin: { l: 48, r: 40, t: 6, b: 42 },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 11 },
        uirevision: `${heat.stage} ${rows.length}`,
        hovermode: "closest",
        xaxis: { title: { text: "step", standoff: 6 }, tickvals: x.vals, ticktext: x.text, showgrid: false, zeroline: false },
        yaxis: { title: { text: blocks || byNode() ? "node" : "rank", standoff: 6 }, tickvals: y.vals, ticktext: y.text, automargin: true,
          showgrid: false, zeroline: false, autorange: "reversed" },
        shapes: lines,
        annotations: pointers,
      },
    };
    if (!whole) keepZoom("heat", figure.layout);
    set("heat", { figure });
    table();
  }

  /* Return what is under a point of the heatmap. */
  function cellAt(point) {
    const column = Math.round(point.x) - heat.offset;
    const row = laid.rows[Math.round(point.y)];
    if (!row || heat.first[column] === undefined) return null;
    const { value, who } = worst(row, column);
    return { column, row, who, rank: heat.ranks[who], value };
  }

  function times(value) {
    if (value === 255) return "missing";
    const over = 0.5 + value / 254;
    return (value === 254 ? "≥ " : value === 0 ? "≤ " : "") + over.toFixed(2) + "×";
  }

  /* The heatmap in numbers, while a person wants them. */
  function table() {
    const details = document.getElementById("heat-details");
    if (!heat || !details || !details.open) return;
    const rows = heat.ranks.length;
    const from = Math.max(0, heat.first.length - TABLE_COLUMNS);
    const order = heat.ranks.map((_, r) => {
      let total = 0;
      let known = 0;
      for (let c = from; c < heat.first.length; c++) {
        const value = heat.cells[c * rows + r];
        if (value !== 255) { total += value; known += 1; }
      }
      return [known ? total / known : -1, r];
    }).sort((a, b) => b[0] - a[0]).slice(0, TABLE_ROWS);
    const line = (tag, cells) => ["tr", {}, ...cells.map((cell) => [tag, {}, cell])];
    const body = order.map(([, r]) => {
      const href = (byNode() ? "/node/" + encodeURIComponent(heat.nodes[r]) : "/rank/" + heat.ranks[r]) + window.location.search;
      const values = heat.last.slice(from).map((_, c) => times(heat.cells[(from + c) * rows + r]));
      return line("td", [["link", { href }, byNode() ? "open" : `${heat.ranks[r]}`], heat.nodes[r], ...values]);
    });
    const head = line("th", [byNode() ? "" : "rank", "node", ...heat.last.slice(from).map((step) => `step ${number(step)}`)]);
    const caption = `Busy time over the median of the step, newest ${heat.first.length - from} columns, worst first` +
      (rows > order.length ? `, ${order.length} of ${number(rows)} rows` : "");
    const content = ["table", {}, ["caption", {}, caption], ["thead", {}, head], ["tbody", {}, ...body]];
    set("heat-table", { content: ["div", { id: "heat-table", className: "scroll", tabIndex: 0 }, content] });
  }

  /* ---- what a click and the mouse do ---- */

  function open(click) {
    const at = click && heat && cellAt(click.points[0]);
    if (!at) return;
    if (at.row.members.length === 1) {
      set("url", { pathname: byNode() ? `/node/${encodeURIComponent(heat.nodes[at.who])}` : `/rank/${at.rank}` });
    } else {
      opened.set(at.row.block.label, true);
      draw();
    }
  }

  /* Offer the way back from a zoom: a double click would open a rank. */
  function zoomed() {
    const plot = document.querySelector("#heat .js-plotly-plot");
    if (!plot || !plot.layout) return;
    set("heat-whole", { hidden: plot.layout.xaxis.autorange !== false && plot.layout.yaxis.autorange !== false });
  }

  function whole() {
    draw(true);
    set("heat-whole", { hidden: true });
  }

  let waiting = null;
  let hovered = ""; // the cell that the tooltip is about, and its first line
  let heading = "";

  function hover(over) {
    clearTimeout(waiting);
    const point = over && heat && over.points && over.points[0];
    const at = point && cellAt(point);
    if (!("heat" in shown.sums)) return;
    if (!at) return set("heat-tip", { show: false });
    const first = heat.first[at.column];
    const last = heat.last[at.column];
    const steps = first === last ? `step ${number(first)}` : `steps ${number(first)}–${number(last)}`;
    hovered = `${at.rank} ${first} ${last}`;
    const who = byNode() ? heat.nodes[at.who] : `${at.row.members.length > 1 ? "worst: " : ""}rank ${at.rank} (${heat.nodes[at.who]})`;
    heading = `${who}, ${steps}: ${times(at.value)}`;
    const direction = 2 * at.column > heat.first.length ? "left" : "right";
    set("heat-tip", { show: true, bbox: point.bbox, direction, children: heading });
    if (!byNode()) waiting = setTimeout(() => set("asked", { data: { rank: at.rank, first, last } }), 120);
  }

  function describe(cell) {
    if (!cell || !("heat" in shown.sums) || hovered !== `${cell.rank} ${cell.first} ${cell.last}`) return;
    set("heat-tip", { children: heading + "\n" + cell.text });
  }

  document.addEventListener("toggle", (event) => { // Dash has no property of it
    if (event.target.id === "heat-details") table();
  }, true);

  /* ---- theme, pause, rank by number ---- */

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
    const stops = (dark() ? DARK : LIGHT).map(([at, colour]) => `${colour} ${100 * at}%`);
    root.style.setProperty("--scale", `linear-gradient(90deg, ${stops})`);
    root.style.setProperty("--missing", MISSING[dark() ? "dark" : "light"]);
    draw();
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
    return `The dashboard's server has not answered since ${since}. This page goes on by itself when it does.`;
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.getElementById("page")) return;
    answered = Date.now();
    set("tick", { disabled: paused || document.hidden });
  });

  document.addEventListener("click", (event) => {
    const menu = document.querySelector("#session details[open]");
    if (menu && !menu.contains(event.target)) menu.open = false;
  });

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set("theme", { children: theme() }));

  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  window.traceml_ray = { Content: ({ content }) => element(content) };
  const traceml = { apply, open, hover, zoomed, whole, describe, watch, theme, pause, goto };
  window.dash_clientside = Object.assign({}, window.dash_clientside, { traceml });
})();
