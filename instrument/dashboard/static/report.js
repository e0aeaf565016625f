// The report's stand-in for the server: answers what the page asks from what is in the file.

class Stored {
  constructor(stored) {
    this.stored = stored;
    this.message = stored.message;
    this.layout = this.message.layout || [];
    this.charts = this.message.charts || {};
    this.log = new Set();
    this.ends = Object.fromEntries(Object.entries(this.charts).filter(([, chart]) => chart.kind === "lines").map(([id, { option }]) => [id, [option.xAxis.min, option.xAxis.max]]));
    this.readyState = WebSocket.OPEN;
    setTimeout(() => {
      this.onopen();
      this.tell(this.message);
    });
  }

  close() {}

  tell(message) {
    this.onmessage({ data: JSON.stringify(message) });
  }

  send(text) {
    const wish = JSON.parse(text);
    if (wish.do === "zoom") this.zoom(wish.x);
    else if (wish.do === "steps") this.zoom(wish.range);
    else if (wish.do === "set") this.set(wish.name, wish.value);
  }

  zoom(range) {
    this.range = range;
    const charts = {};
    for (const [id, [low, high]] of Object.entries(this.ends)) {
      const [from, to] = range ? [Math.max(Math.round(range[0]), low), Math.min(Math.max(Math.round(range[1]), Math.round(range[0]) + 1), high)] : [low, high];
      if (from >= to) continue;
      this.charts[id].option.xAxis = { ...this.charts[id].option.xAxis, min: from, max: to };
      // Only what is in sight, so that the y axes fit it.
      const series = this.charts[id].option.series.filter((each) => !each.id.startsWith("marks")).map((each) => ({ id: each.id, keep: 0, add: each.data.filter(([x]) => x >= from && x <= to) }));
      charts[id] = { option: { xAxis: { min: from, max: to } }, series };
    }
    this.tell({ charts });
  }

  set(name, value) {
    const charts = {};
    let layout = true;
    if (name === "large") {
      this.layout = this.layout.map((spec) => ({ ...spec, large: spec.id === value }));
    } else if (name === "hide") {
      const [id, label] = [value.slice(0, value.indexOf("|")), value.slice(value.indexOf("|") + 1)];
      this.layout = this.layout.map((spec) => (spec.id !== id ? spec : { ...spec, hidden: spec.hidden.includes(label) ? spec.hidden.filter((each) => each !== label) : [...spec.hidden, label] }));
    } else if (name === "scale" && this.stored.scales[value]) {
      const chart = this.charts[value];
      const other = this.stored.scales[value];
      this.stored.scales[value] = { yAxis: chart.option.yAxis, log: chart.extra.log };
      chart.option.yAxis = other.yAxis;
      chart.extra.log = other.log;
      charts[value] = chart;
      this.layout = this.layout.map((spec) => (spec.id === value ? { ...spec, log: other.log[0] } : spec));
    } else if ((name === "heat" || name === "histogram") && this.stored[name][value]) {
      const chosen = this.layout.find((spec) => spec.id === name).chosen;
      this.stored[name][chosen] = Object.fromEntries(Object.keys(this.stored[name][value]).map((id) => [id, this.charts[id]]));
      Object.assign(this.charts, this.stored[name][value]);
      Object.assign(charts, this.stored[name][value]);
      this.layout = this.layout.map((spec) => (spec.id === name ? { ...spec, chosen: value } : spec));
    } else {
      layout = false;
    }
    const message = layout ? { layout: this.layout, charts } : {};
    if (name === "text" && this.message.texts) {
      message.texts = { ...this.message.texts, chosen: value, items: this.message.texts.items.filter((item) => !value || item.name === value) };
    }
    if (name === "filter" && this.message.table) {
      const rows = this.message.table.rows.filter((row) => row.name.toLowerCase().includes(value.toLowerCase()));
      message.table = { ...this.message.table, rows, all: value ? rows.length : this.message.table.all, wanted: value };
    }
    this.tell(message);
    if (name === "scale" && this.range) this.zoom(this.range);
  }
}

const preferred = matchMedia("(prefers-color-scheme: dark)");
const dark = (on) => {
  document.body.classList.toggle("body--dark", on);
  document.body.classList.toggle("body--light", !on);
};
dark(preferred.matches);
preferred.addEventListener("change", () => dark(preferred.matches));
document.getElementById("theme").addEventListener("click", () => dark(!document.body.classList.contains("body--dark")));
const page = new Live(document.getElementById("page"), null, () => new Stored(JSON.parse(document.getElementById("stored").textContent)));
document.getElementById("whole").addEventListener("click", () => page.zoom(null, null));
window.instrumentLive = page; // for tests and for the curious
