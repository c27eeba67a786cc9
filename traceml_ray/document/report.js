/* Moments in the timezone of the reader. Without a script they stay in that of the file, which it names. */
const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
const two = (number) => String(number).padStart(2, "0");
const clock = (date, seconds) => [date.getHours(), date.getMinutes(), ...(seconds ? [date.getSeconds()] : [])].map(two).join(":");
const day = (date) => date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
const zone = (date) => date.toLocaleTimeString("en-GB", { timeZoneName: "short" }).split(" ").slice(1).join(" ");
const write = (time, words) => {
  time.title = time.dateTime;
  time.textContent = words;
};
for (const axis of document.querySelectorAll(".x")) {
  const times = [...axis.querySelectorAll("time")], dates = times.map((time) => new Date(time.dateTime));
  const dated = new Set(dates.map((date) => date.toDateString())).size > 1, seconds = axis.dataset.seconds !== undefined;
  times.forEach((time, at) => write(time, (dated ? day(dates[at]) + " " : "") + clock(dates[at], seconds)));
}
for (const time of document.querySelectorAll("time[data-date]")) {
  const date = new Date(time.dateTime), named = time.dataset.date === "named";
  write(time, `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(date, true)}` + (named ? " " + zone(date) : ""));
}
for (const name of document.querySelectorAll(".zone")) name.textContent = zone(new Date());
for (const name of document.querySelectorAll(".zone-name")) name.textContent = timeZone;
