// Makes dash_app/assets/plotly.min.js, and beside it the licences of what is in it: `make plotly`.
//
// The file that the Python package of plotly brings has 47 kinds of traces, and is 4.8 MB (1.5 MB gzip); the web
// app draws with three. The versions are those of the day below, so that the same bytes come out again.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

const VERSIONS = ["plotly.js@4.1.1", "esbuild@0.28.2"];
const DAY = "2026-11-01";
const TRACES = ["bar", "heatmap"]; // scatter is always there

const out = resolve(process.argv[2]);
const folder = mkdtempSync(join(tmpdir(), "plotly-"));
const options = ["--prefix", folder, "--before", DAY, "--ignore-scripts", "--no-audit", "--no-fund"];
execFileSync("npm", ["install", ...options, ...VERSIONS], { stdio: ["ignore", "ignore", "inherit"] });

const traces = TRACES.map((name) => `require("plotly.js/lib/${name}")`);
const { metafile } = await createRequire(join(folder, "-"))("esbuild").build({
  stdin: { contents: `module.exports = require("plotly.js/lib/core"); module.exports.register([${traces}]);`, resolveDir: folder },
  absWorkingDir: folder,
  outfile: join(out, "plotly.min.js"),
  bundle: true,
  minify: true,
  metafile: true,
  format: "iife",
  globalName: "Plotly",
  target: "es2020",
  legalComments: "none",
  loader: { ".css": "empty" }, // of maps
  define: { global: "window", "define.amd": "false" },
  banner: { js: `/* ${VERSIONS[0]} with scatter, ${TRACES.join(", ")}; licences: plotly.LICENSE.txt */` },
});

// Packages may lie inside of others: the last folder of that name counts.
const used = Object.entries(Object.values(metafile.outputs)[0].inputs).filter(([, { bytesInOutput }]) => bytesInOutput);
const inside = used.map(([path]) => path.match(/^.*node_modules\/(?:@[^/]+\/)?[^/]+(?=\/)/)?.[0]);
const licences = [...new Set(inside)].filter(Boolean).sort().map((at) => {
  const { name, version, license } = JSON.parse(readFileSync(join(folder, at, "package.json")));
  const file = readdirSync(join(folder, at)).find((each) => /^licen[cs]e/i.test(each));
  return `${name} ${version} (${license})\n\n${file ? readFileSync(join(folder, at, file), "utf8").trim() : ""}\n`;
});
writeFileSync(join(out, "plotly.LICENSE.txt"), licences.join("\n" + "-".repeat(80) + "\n\n"));
rmSync(folder, { recursive: true });
