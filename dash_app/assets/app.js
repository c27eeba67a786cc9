/* What the browser does itself: take answers and draw parts, lead to other pages, keep a theme, pause, copy. */
{
  const QUIET = 10; // s without an answer, after which the page says so
  const root = document.documentElement, scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const set = (id, props) => window.dash_clientside.set_props(id, props);
  const clock = (moment) => moment.toLocaleTimeString("en-GB", { timeZoneName: "short" });

  let answered = Date.now(), silent = 0; // s since an answer in which this page ran: it may be too busy to take one
  let paused = false, revealed = ""; // the last link to a part of a page that was followed
  let seen = {}; // of the last answer: the page, and a checksum of each part
  const charts = new Map(); // by id: the newest figure, and which share of it is not drawn yet

  /* ---- answers ---- */

  const apply = (answer) => {
    if (answer) heard();
    if (!answer?.seen) return window.dash_clientside.no_update; // nothing is new
    if (answer.seen.page !== seen.page) charts.clear();
    for (const [id, props] of Object.entries(answer.set)) {
      const chart = props.figure ? { figure: props.figure, due: 1 } : props.of && props.of === seen.sums?.[id] && longer(id, props.grown);
      if (chart) charts.set(id, chart);
      else if (props.of) delete answer.seen.sums[id]; // not drawn, or another answer was quicker: send all of it
      else if (id === "tab") [document.title, document.querySelector("link[rel=icon]").href] = [props.title, props.icon];
      else if (document.activeElement?.id !== id) set(id, props); // what a person types stays
    }
    if (paused) set("paused", { children: "paused at " + clock(new Date()) }); // another page was opened
    seen = answer.seen;
    draw();
    reveal();
    return seen;
  };

  const heard = () => { [answered, silent] = [Date.now(), 0]; };

  /* Return a chart with new points at its end, and only so many of those before: _longer in app.py. */
  const longer = (id, { keep, data, layout }) => {
    const before = charts.get(id), shown = before?.figure ?? document.querySelector(`#${id} .js-plotly-plot`);
    if (!shown?.data) return null;
    const traces = shown.data.map((trace, at) => Object.entries(data[at]).reduce(
      (all, [name, ends]) => ({ ...all, [name]: [...trace[name].slice(trace[name].length - keep), ...ends] }), trace));
    return { figure: { data: traces, layout }, due: (before?.due ?? 0) + 1 - keep / traces[0].x.length };
  };

  /* Charts out of sight wait, and those with less than 4 px of news: one of 8 lines takes 10 ms (by
     Plotly.extendTraces 9), and a node page has 17. */
  const draw = () => {
    for (const [id, chart] of charts) {
      const box = chart.due && document.getElementById(id)?.getBoundingClientRect();
      if (!box || box.top > window.innerHeight || box.bottom < 0 || chart.due * box.width < 4) continue;
      chart.due = 0;
      set(id, { figure: chart.figure });
    }
  };
  for (const name of ["scroll", "resize"]) window.addEventListener(name, draw, { passive: true, capture: true });

  /* A chart is made when it comes into sight: the 17 of a node page at once take half a second. The others follow
     one by one while the browser has nothing to do, so that a picture of the whole page, and paper, has them. */
  const unmade = new Set();
  const whenIdle = window.requestIdleCallback ?? ((act) => setTimeout(act, 200));
  const makeNext = () => {
    const [make] = unmade;
    if (!make) return;
    unmade.delete(make);
    make();
    whenIdle(makeNext);
  };
  const Chart = ({ head, box, children: [graph, table] }) => {
    const { createElement, useEffect, useRef, useState } = window.React;
    const [made, setMade] = useState(false), at = useRef();
    useEffect(() => {
      const make = () => setMade(true);
      const observer = new IntersectionObserver((found) => found.some((one) => one.isIntersecting) && make());
      observer.observe(at.current);
      if (unmade.add(make).size === 1) whenIdle(makeNext);
      return () => { observer.disconnect(); unmade.delete(make); };
    }, []);
    useEffect(draw, [made]);
    const inside = createElement("div", { "aria-hidden": true }, made && graph); // a picture, to who cannot see it
    return createElement("section", { className: "panel" }, element(head), createElement("div", { ...box, ref: at }, inside), table);
  };

  /* dcc.Graph has a new chart drawn once more 0.1 s later, for its size: only where that is another. */
  document.addEventListener("DOMContentLoaded", () => {
    const { resize } = window.Plotly.Plots;
    window.Plotly.Plots.resize = async (plot) => {
      const { width, height } = plot._fullLayout;
      return Math.abs(width - plot.clientWidth) < 1 && Math.abs(height - plot.clientHeight) < 1 ? plot : resize(plot);
    };
  });

  /* ---- paper ---- */

  /* Draw every chart as it is now, as wide as its place; React takes no turn before a page is printed. */
  const redraw = () => {
    for (const plot of document.querySelectorAll("main .js-plotly-plot")) {
      const chart = charts.get(plot.parentElement.id), { data, layout } = chart?.figure ?? plot;
      const { clientWidth: width, clientHeight: height } = plot.parentElement;
      window.Plotly.react(plot, data, { ...layout, width, height }, plot._context);
    }
  };
  const paper = (on) => {
    root.classList.toggle("paper", on); // as wide as a sheet: the style sheet has the rest
    redraw();
  };
  window.addEventListener("beforeprint", () => paper(true));
  window.addEventListener("afterprint", () => paper(false));

  /* Scroll to the part that a link is to, once it is there. */
  const reveal = () => {
    const id = location.hash.slice(1), part = document.getElementById(id) ?? document.getElementById(`${id}-table`);
    if (part && revealed !== location.href) part.scrollIntoView({ block: "center" });
    if (part) revealed = location.href;
  };

  /* Return `[tag, properties, ...children]` as an element of React: Content in elements.py has the figures. */
  const element = (content) => {
    if (!Array.isArray(content)) return content ?? null;
    const [tag, props, ...children] = content;
    return window.React.createElement(tag, tag === "a" ? { ...props, onClick: follow } : props, ...children.map(element));
  };

  /* Lead to another page without a reload, as dcc.Link does, which takes no ARIA properties. */
  const follow = (event) => {
    const { pathname, search, hash, download } = event.currentTarget;
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey || download) return;
    event.preventDefault();
    if (pathname !== location.pathname) window.scrollTo(0, 0);
    set("url", { pathname, search, hash });
  };

  /* ---- theme, pause, a server that is silent ---- */

  /* Change the theme with a click; return what the button offers. */
  const theme = (clicks) => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : scheme.matches;
    if (!clicks) return dark ? "Light" : "Dark";
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `traceml-theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
    return theme();
  };
  // Before anything is painted: dcc.Store would be read after that.
  root.dataset.theme = document.cookie.match(/traceml-theme=(light|dark)/)?.[1] ?? "";
  scheme.addEventListener("change", () => set("theme", { children: theme() }));

  const resting = () => (heard(), paused || document.hidden);
  const pause = (clicks) => {
    paused = clicks % 2 === 1;
    return [resting(), paused ? "Resume" : "Pause", paused ? "paused at " + clock(new Date()) : null];
  };
  document.addEventListener("visibilitychange", () => document.getElementById("page") && set("tick", { disabled: resting() }));

  /* Return what a page says whose server is silent; asked each second. */
  const watch = () => {
    silent += !paused && !document.hidden;
    return silent <= QUIET ? null : `The dashboard's server has not answered since ${clock(new Date(answered))}. ` +
      `If it has ended, this opens it again: traceml-ray dashboard ${document.querySelector("#session strong")?.textContent ?? ""}`;
  };

  /* ---- clicks ---- */

  /* Copy what a button has; `navigator.clipboard` is there on localhost and over HTTPS alone. */
  const copy = (button) => {
    const field = document.body.appendChild(document.createElement("textarea"));
    field.value = button.dataset.copy.replace("{link}", () => location.origin + button.dataset.link + location.hash);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 2000);
  };

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-copy]"), menu = document.querySelector("#session details[open]");
    if (button) copy(button);
    if (menu && !menu.contains(target)) menu.open = false;
  });

  /* IANA, and minutes ahead of UTC for a server that does not know it. */
  const timezone = () => `${Intl.DateTimeFormat().resolvedOptions().timeZone} ${-new Date().getTimezoneOffset()}`;

  window.traceml_ray = { ...window.traceml_ray, Content: ({ content }) => element(content), Chart };
  (window.dash_clientside ??= {}).traceml = { apply, watch, theme, timezone, pause };
}
