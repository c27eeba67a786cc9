/* What the browser does itself: take answers and draw parts, lead to other pages, keep a theme, pause, copy. */
{
  const QUIET = 10; // s without an answer, after which the page says so
  const root = document.documentElement, scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const set = (id, props) => window.dash_clientside.set_props(id, props);
  const clock = (moment) => moment.toLocaleTimeString("en-GB", { timeZoneName: "short" });

  let answered = Date.now(), silent = 0; // s since an answer in which this page ran: it may be too busy to take one
  let asked = Date.now(), requests = 0; // when the answer was requested that is awaited; 0: none is
  let shown = {}; // pathname and search of the newest request
  let paused = false, revealed = ""; // the last link to a part of a page that was followed
  let seen = {}; // of the last answer: the page, and a checksum of each part
  const charts = new Map(); // by id: the newest figure, and which share of it is not drawn yet

  /* ---- answers ---- */

  /* Return the number of the next refresh. While an answer is awaited a tick requests no other one: Dash discards an
     answer when it requests the next, and where each takes longer than a tick the page would never have any. */
  const due = (_, pathname, search) => {
    const moved = shown.pathname !== pathname || shown.search !== search;
    if (!moved && asked && Date.now() - asked < 1000 * QUIET) return window.dash_clientside.no_update;
    if (moved && shown.pathname === pathname) showSearched(search);
    shown = { pathname, search };
    asked = Date.now();
    return ++requests;
  };
  window.addEventListener("online", () => { asked = 0; });

  const apply = (answer) => {
    asked = 0;
    if (answer) heard();
    if (!answer?.seen) return window.dash_clientside.no_update; // nothing is new
    if (answer.seen.page !== seen.page) charts.clear();
    for (const [id, props] of Object.entries(answer.set)) {
      const chart = props.figure ? { figure: props.figure, due: 1 } : props.of && props.of === seen.sums?.[id] && longer(id, props.grown);
      if (chart) charts.set(id, chart);
      else if (props.of) delete answer.seen.sums[id]; // not drawn, or another answer was quicker: send all of it
      else if (id === "tab") [document.title, document.querySelector("link[rel=icon]").href] = [props.title, props.icon];
      else set(id, props);
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

  /* ---- the search field of a page: its text is `q` in the URL ---- */

  const PAUSE = 300; // ms without another letter, after which a text is searched
  let typed = null; // { pathname, value, timer }: of a text that is not in the URL yet
  let removed = null; // { pathname, range }: of the field that had the focus, while its page is made again

  const searched = (search) => new URLSearchParams(search).get("q") ?? "";

  /* Show what the URL searches for, unless a person has typed something else since. */
  const showSearched = (search) => {
    const field = document.getElementById("find");
    if (field && !typed && field.value !== searched(search)) field.value = searched(search);
  };

  const type = ({ target: { value } }) => {
    const { pathname } = location;
    clearTimeout(typed?.timer);
    const search = () => {
      typed = null;
      if (pathname !== location.pathname) return;
      const query = new URLSearchParams(location.search);
      query.delete("page");
      if (value) query.set("q", value); else query.delete("q");
      set("url", { search: query.size ? `?${query}` : "" });
    };
    typed = { pathname, value, timer: setTimeout(search, PAUSE) };
  };

  /* A page that is made again (it has another part) takes its field away: the new one goes on where that was. */
  const SearchField = ({ id, placeholder }) => {
    const { createElement, useLayoutEffect, useRef } = window.React, at = useRef();
    useLayoutEffect(() => {
      const field = at.current, { pathname } = location;
      field.value = typed?.pathname === pathname ? typed.value : searched(location.search);
      if (removed?.pathname === pathname) {
        field.focus({ preventScroll: true });
        field.setSelectionRange(...removed.range);
      }
      return () => {
        if (document.activeElement !== field) return;
        removed = { pathname, range: [field.selectionStart, field.selectionEnd] };
        setTimeout(() => { removed = null; }); // another field of the same page comes now or never
      };
    }, []);
    return createElement("input", { id, ref: at, type: "search", className: "goto find", placeholder, autoComplete: "off", onInput: type });
  };

  /* ---- the search box of all pages: it is empty as soon as its text is on its way, and what is typed next stays ---- */

  const open = (box) => {
    if (!box.value.trim()) return;
    set("wanted", { data: box.value });
    box.value = "";
    set("sought", { data: "" });
  };
  document.addEventListener("input", ({ target }) => {
    if (target.id !== "goto") return;
    const chosen = [...target.list.options].some(({ value }) => value === target.value); // a suggestion
    if (chosen) open(target); else set("sought", { data: target.value });
  });
  document.addEventListener("keydown", ({ target, key }) => {
    if (target.id === "goto" && key === "Enter") open(target);
  });

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

  window.traceml_ray = { ...window.traceml_ray, Content: ({ content }) => element(content), Chart, SearchField };
  (window.dash_clientside ??= {}).traceml = { apply, due, watch, theme, timezone, pause };
}
