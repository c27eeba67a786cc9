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

/* Contrast of a text with what is behind it, as WCAG 2 counts it (1 to 21). */
const rgb = (colour) => colour.match(/[\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], below) => [r, g, b].map((one, at) => one * a + below[at] * (1 - a));
const behind = (element) => {
  const above = element.parentElement ? behind(element.parentElement) : [255, 255, 255];
  return over(rgb(getComputedStyle(element).backgroundColor), above);
};
const linear = (one) => one <= 10.3 ? one / 3295 : ((one / 255 + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const pale = (element) => {
  const style = getComputedStyle(element), ground = behind(element.closest(".js-plotly-plot") ?? element);
  const ink = light(over(rgb(element instanceof SVGElement ? style.fill : style.color), ground));
  const [less, more] = [ink, light(ground)].sort((a, b) => a - b);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
  return (more + 0.05) / (less + 0.05) < (large ? 3 : 4.5);
};
const words = [
  ...leaves.filter((one) => one.textContent.trim() && seen(one) && !one.closest("[aria-hidden=true], :disabled")),
  ...document.querySelectorAll("main .js-plotly-plot text"),
];

const faults = {
  "too little contrast": words.filter(pale),
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
