/* Return what is wrong with the page that is open: a list, empty where nothing is. */
const inside = (element, ...of) => of.some((one) => element.closest(one));
const seen = (element) => element.getClientRects().length && !inside(element, ".unseen", ".skip", ".js-plotly-plot");
const controls = [...document.querySelectorAll("a, button, input, select, summary")].filter(seen);
const ids = [...document.querySelectorAll("[id]")].map(({ id }) => id);
const leaves = [...document.body.querySelectorAll("*:not(:has(*))")].filter((one) => !inside(one, "script"));
const charts = [...document.querySelectorAll("main .js-plotly-plot")];

const name = ({ ariaLabel, labels, textContent, title }) =>
  (ariaLabel || labels?.[0]?.textContent || textContent || title).trim();
const small = (control) => {
  const { width, height } = control.getBoundingClientRect();
  return !inside(control, "p") && (width < 23.9 || height < 23.9);
};
const blank = ({ data, layout }) => !data.length && !layout.annotations[0].text;
const tables = (id) => `#${id}-table, #${id}-details`;

const faults = {
  "chart without data or reason": charts.filter(blank),
  "chart without a table": charts.filter((plot) => !document.querySelector(tables(plot.parentElement.id))),
  "smaller than 24 px": controls.filter(small),
  "without a name": controls.filter((control) => !name(control)),
  "picture without text": [...document.images].filter(({ alt }) => !alt),
  "id of two": ids.filter((id, at) => ids.indexOf(id) !== at),
  "not one current page": document.querySelectorAll("#nav [aria-current=page]").length === 1 ? [] : ["#nav"],
  "traceback but of a rank": leaves.filter((one) => one.textContent.includes("Traceback") && !inside(one, "#page pre")),
};
return Object.entries(faults).flatMap(([what, found]) =>
  found.map((one) => `${what}: ${one.outerHTML?.slice(0, 200) ?? one}`));
