// The live page: one socket, cards with charts, and what is around them. A component of the page that page.py builds.
import { echarts } from "nicegui-echart";
import { AS_ITSELF, Plot, duration, exact, format, themes } from "/instrument/plot.js";

const RETRY = [300, 600, 1200, 2500, 5000]; // milliseconds before the next try to connect

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

const isDark = () => document.body.classList.contains("body--dark");

class Card {
  constructor(live, spec) {
    this.live = live;
    this.id = spec.id;
    this.kind = spec.kind;
    this.note = make("span", { class: "iv-note" });
    this.title = make("h3", {});
    this.tools = make("div", { class: "iv-tools" });
    this.area = make("div", { class: "iv-plot", role: "img", "aria-label": spec.title });
    const keys = { tabindex: "0", role: "group", "aria-label": `${spec.title}: plus and minus zoom, arrows move, Escape shows all, L changes the scale, F the size`, onkeydown: (event) => this.key(event) };
    this.holder = make("div", { class: "iv-holder", ...(spec.kind === "lines" ? keys : {}) }, this.area);
    this.element = make("article", { class: `iv-card iv-${spec.kind} iv-id-${spec.id.startsWith("pick:") ? "pick" : spec.id}`, "data-chart": spec.id }, make("header", {}, this.title, this.note, this.tools), this.holder);
    this.plot = new Plot(echarts, this.area, isDark(), {
      zoom: (low, high) => live.zoom(low, high),
      move: (by) => this.move(by),
      hover: (x) => live.hover(this, x),
      note: (text) => { this.left = text; this.say(); },
      pick: (step) => live.set("at", step),
      hide: (label) => live.set("hide", `${this.id}|${label}`),
    });
    this.extraNote = this.left = "";
    if (spec.kind === "lines") {
      this.log = make("button", { type: "button", text: "log", title: "Logarithmic axis", onclick: () => live.set("scale", this.id) });
      this.tools.append(this.log);
    }
    if (spec.choices) {
      this.select = make("select", { "aria-label": `What ${spec.title} shows`, onchange: () => live.set(spec.id, this.select.value) });
      this.tools.append(this.select);
    }
    if (spec.id === "heat") {
      this.slider = make("input", { type: "range", "aria-label": "Step", step: 1, oninput: () => this.slide() });
      this.stepText = make("output", {});
      this.newest = make("button", { type: "button", text: "newest", title: "Follow the newest step", onclick: () => live.set("at", null) });
      this.element.append(make("div", { class: "iv-slider" }, make("span", { text: "Step" }), this.slider, this.stepText, this.newest));
    }
    this.wide = make("button", { type: "button", class: "iv-wide", title: "Larger or smaller", "aria-label": `${spec.title}: larger or smaller`, "aria-pressed": "false", onclick: () => live.set("large", this.spec.large ? "" : this.id) }, "⤢");
    this.tools.append(this.wide);
    this.describe(spec);
  }

  describe(spec) {
    this.spec = spec;
    this.title.textContent = spec.title;
    this.extraNote = spec.note || "";
    this.enlarge(spec.large);
    this.plot.hide(spec.hidden || []);
    if (this.log) {
      this.log.setAttribute("aria-pressed", String(Boolean(spec.log)));
      this.log.setAttribute("aria-label", `${spec.title}: logarithmic axis`);
    }
    if (this.select) {
      const known = JSON.stringify(spec.choices);
      if (this.known !== known) {
        this.known = known;
        this.select.replaceChildren(...spec.choices.map((choice) => make("option", { value: choice, text: choice.replace(/^histogram\//, "") })));
      }
      this.select.value = spec.chosen;
    }
    this.say();
  }

  say() {
    this.note.textContent = this.note.title = [this.caption, this.unit, this.extraNote, this.left].filter(Boolean).join(" · ");
  }

  update(chart) {
    if (chart.kind) {
      this.caption = chart.extra.caption || "";
      const units = chart.extra.units || [];
      this.unit = units.length === 1 && !AS_ITSELF.has(units[0]) ? units[0] : "";
      this.plot.draw(chart);
      if (this.slider && chart.extra.at) {
        const { low, high, step, newest } = chart.extra.at;
        this.slider.min = low;
        this.slider.max = high;
        if (document.activeElement !== this.slider) this.slider.value = step;
        this.stepText.textContent = step.toLocaleString("en");
        this.newest.setAttribute("aria-pressed", String(newest));
      }
    } else {
      this.plot.grow(chart);
    }
    this.say();
    const now = performance.now();
    if (!(now - this.described < 2000)) {
      this.described = now;
      this.area.setAttribute("aria-label", `${this.spec.title}. ${this.plot.summary() || this.caption || ""}`);
    }
  }

  slide() {
    this.stepText.textContent = Number(this.slider.value).toLocaleString("en");
    clearTimeout(this.sliding);
    this.sliding = setTimeout(() => this.live.set("at", Number(this.slider.value)), 60);
  }

  enlarge(large) {
    this.element.classList.toggle("iv-large", large);
    this.wide.setAttribute("aria-pressed", String(large));
  }

  ends() {
    return (this.plot.option && this.plot.option.xAxis) || {};
  }

  // As far as the runs go, and not so that the range gets smaller.
  move(by) {
    const { min, max } = this.ends(), [first, last] = this.live.whole;
    const far = this.plot.extra.x === "step" ? Math.sign(by) * Math.max(Math.round(Math.abs(by)), 1) : by;
    const low = by < 0 ? Math.max(min + far, Math.min(first, min)) : Math.min(min + far, Math.max(last - (max - min), min));
    if (low !== min) this.live.zoom(low, low + max - min);
  }

  key(event) {
    const { min, max } = this.ends(), [first, last] = this.live.whole;
    if (min === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const span = max - min, middle = (min + max) / 2;
    const wish = { "+": [middle - span / 4, middle + span / 4], "=": [middle - span / 4, middle + span / 4], "-": [Math.max(middle - span, Math.min(first, min)), Math.min(middle + span, Math.max(last, max))], Escape: [null, null], 0: [null, null] }[event.key];
    if (wish) this.live.zoom(...wish);
    else if (event.key === "ArrowLeft") this.move(-span / 4);
    else if (event.key === "ArrowRight") this.move(span / 4);
    else if (event.key === "l" && this.log) this.log.click();
    else if (event.key === "f") this.wide.click();
    else return;
    event.preventDefault();
  }
}

class Live {
  // open: makes what is used as a WebSocket.
  constructor(element, desk, open = () => new WebSocket(location.origin.replace(/^http/, "ws") + "/live")) {
    this.desk = desk;
    this.open = open;
    this.cards = new Map();
    this.sections = new Map();
    this.visible = new Set();
    this.tries = 0;
    this.root = element;
    themes(echarts);
    this.strip = make("div", { class: "iv-strip" });
    this.banner = make("div", { class: "iv-banner", role: "status", hidden: true });
    this.alarms = make("div", { class: "iv-alarms", role: "log", "aria-label": "Alarms", "aria-live": "polite" });
    this.charts = make("div", { class: "iv-charts" });
    this.empty = make("p", { class: "iv-empty", text: "Connecting …" });
    this.texts = make("section", { class: "iv-panel", hidden: true });
    this.table = make("section", { class: "iv-panel", hidden: true });
    // What is hidden is never on the screen: these stand for the panels, which are asked for when they come near.
    this.textsNear = make("div", { class: "iv-near", "data-chart": "texts" });
    this.tableNear = make("div", { class: "iv-near", "data-chart": "table" });
    this.parameters = make("section", { class: "iv-panel", hidden: true });
    element.replaceChildren(this.banner, this.strip, this.alarms, this.empty, this.charts, this.textsNear, this.texts, this.tableNear, this.table, this.parameters);
    this._panels();
    this.watcher = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "150px" });
    for (const panel of [this.textsNear, this.tableNear]) this.watcher.observe(panel);
    new MutationObserver(() => this.cards.forEach((card) => card.plot.theme(isDark()))).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    // A page in the background draws nothing, but its title goes on to tell of alarms.
    document.addEventListener("visibilitychange", () => { this.look(); this.answer(); });
    new ResizeObserver(() => this.arrange()).observe(this.charts);
    this.connect();
  }

  connect() {
    const socket = (this.socket = this.open());
    socket.onopen = () => {
      this.tries = 0;
      this.owed = null;
      socket.send(JSON.stringify({ do: "open", desk: this.desk, address: location.search }));
      this.lookSent = "";
      this.look();
      this.say("");
    };
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      this.owed = message.n;
      this.take(message);
      // After it was drawn: a browser that cannot follow is asked less. Frames do not come in the background.
      if (document.hidden) setTimeout(() => this.answer(), 2000);
      else requestAnimationFrame(() => this.answer());
    };
    socket.onclose = () => {
      if (this.gone) return;
      this.say("The connection is lost. Training is not affected. Trying to connect again …");
      setTimeout(() => !this.gone && this.connect(), RETRY[Math.min(this.tries++, RETRY.length - 1)]);
    };
  }

  answer() {
    if (this.owed === null || this.owed === undefined) return;
    this.send({ do: "got", n: this.owed });
    this.owed = null;
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  say(text) {
    this.banner.hidden = !text;
    this.banner.textContent = text;
  }

  set(name, value) {
    this.send({ do: "set", name, value });
  }

  zoom(low, high) {
    this.send({ do: "zoom", x: low === null ? null : [low, high] });
  }

  hover(source, x) {
    this.cards.forEach((card) => card !== source && card.plot.showCursor(x));
    source.plot.showCursor(null);
  }

  seen(entries) {
    for (const entry of entries) {
      const id = entry.target.dataset.chart;
      if (!id) continue;
      if (entry.isIntersecting) this.visible.add(id); else this.visible.delete(id);
    }
    clearTimeout(this.looking);
    this.looking = setTimeout(() => this.look(), 60);
  }

  look() {
    const text = JSON.stringify(document.hidden ? [] : [...this.visible].sort());
    if (text === this.lookSent) return;
    this.lookSent = text;
    this.send({ do: "look", visible: JSON.parse(text) });
  }

  take(message) {
    this.messages = (this.messages || 0) + 1;
    if (message.address !== undefined) {
      const query = message.address || location.pathname;
      if (location.search !== message.address) history.replaceState(history.state, "", query);
    }
    if (message.runs) this.showRuns(message.runs);
    if (message.runs || message.address !== undefined) this.showMissing(message.address);
    if (message.alarms) this.showAlarms(message.alarms);
    if (message.whole) this.whole = message.whole;
    if (message.layout) this.lay(message.layout);
    for (const [id, chart] of Object.entries(message.charts || {})) {
      const card = this.cards.get(id);
      if (card) card.update(chart);
    }
    if (message.texts) this.showTexts(message.texts);
    if (message.table) this.showTable(message.table);
    if (message.parameters) this.showParameters(message.parameters);
  }

  showRuns(runs) {
    this.runs = runs;
    document.title = runs.length ? `${runs.some((run) => run.alarms) ? "⚠ " : ""}${runs[0].loss !== null ? format(runs[0].loss) + " · " : ""}${runs[0].name}` : "instrument";
    this.strip.classList.toggle("iv-several", runs.length > 1);
    this.strip.replaceChildren(...runs.map((run) => {
      const tile = (label, value, more = "", kind = "") => make("div", { class: `iv-tile ${kind}` }, make("dt", { text: label }), make("dd", {}, make("span", { text: value }), more ? make("small", { text: more }) : ""));
      const share = run.total ? Math.min(run.step / run.total, 1) : null;
      const name = make("div", { class: "iv-run" }, make("i", { style: `background:${run.color}` }), make("div", {}, make("h2", { text: run.name }), make("span", { class: `iv-state iv-${run.state}`, text: run.state === "running" ? "running" : run.text }), run.error ? make("small", { class: "iv-bad", text: run.error }) : "", run.differs ? make("small", { text: run.differs }) : "", run.skipped ? make("small", { text: `${run.skipped} ${run.skipped === 1 ? "line" : "lines"} could not be read` }) : ""));
      if (run.progress !== null) {
        const percent = Math.round(run.progress * 100);
        return make("section", { class: "iv-head", "aria-label": `Run ${run.name}` }, name, make("div", { class: "iv-index" }, make("span", { text: `Reading the history, ${percent} %` }), make("progress", { max: 100, value: percent, "aria-label": "Reading the history" })));
      }
      const step = make("div", { class: "iv-tile iv-step" }, make("dt", { text: "Step" }), make("dd", {}, make("span", { text: run.step.toLocaleString("en") }), run.total ? make("small", { text: `of ${run.total.toLocaleString("en")}` }) : ""));
      if (share !== null) step.append(make("div", { class: "iv-bar", role: "progressbar", "aria-label": "Steps", "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100 }, make("i", { style: `width:${(share * 100).toFixed(2)}%` })));
      const bad = typeof run.loss === "string";
      return make("section", { class: "iv-head", "aria-label": `Run ${run.name}` }, name, make("dl", { class: "iv-tiles" }, step,
        tile("Loss", format(run.loss), "", bad ? "iv-bad" : ""),
        run.speed === null ? tile("Pace", run.pace === null ? "–" : format(run.pace, "seconds"), run.pace === null ? "" : "a step") : tile("Throughput", format(run.speed), `${run.unit}/s`),
        tile("Time left", run.left === null ? "–" : duration(run.left)),
        tile("Alarms", String(run.alarms), run.seen > run.alarms ? `${run.seen} so far` : "", run.alarms ? "iv-bad" : "")));
    }));
  }

  // Which runs of the address there are not, or that there is none at all.
  showMissing(address = this.address) {
    this.address = address;
    const known = new Set((this.runs || []).map((run) => run.name));
    const missing = [...new Set(new URLSearchParams(address || "").getAll("run"))].filter((name) => !known.has(name));
    const names = missing.map((name) => `'${name}'`).join(", ");
    this.empty.hidden = known.size > 0 && !missing.length;
    this.empty.textContent = (missing.length ? `There is no run ${names}.` : "No run yet.") + " As soon as a training writes its run directory here, it is shown.";
  }

  showAlarms(alarms) {
    const several = this.runs && this.runs.length > 1;
    const rows = alarms.map((alarm) => make("li", { class: alarm.active ? "iv-active" : "" },
      make("button", { type: "button", title: "Show these steps", onclick: () => this.send({ do: "steps", range: [alarm.step - 50, Math.max(alarm.last, alarm.step) + 50] }) },
        make("b", { text: alarm.alarm }), make("span", { text: ` step ${alarm.step.toLocaleString("en")}${alarm.last > alarm.step ? " to " + alarm.last.toLocaleString("en") : ""}${alarm.where ? ", " + alarm.where : ""}${several ? ", " + alarm.run : ""}` })),
      make("span", { class: "iv-message", text: alarm.message + (alarm.active ? "" : (alarm.message ? " " : "") + "(over)") })));
    const shown = alarms.filter((alarm) => alarm.active).length || 1;
    const first = make("ul", {}, ...rows.slice(0, Math.min(shown, 4)));
    const rest = rows.slice(Math.min(shown, 4));
    const open = this.alarms.querySelector("details[open]") !== null;
    this.alarms.replaceChildren(...(rows.length ? [first] : []), ...(rest.length ? [make("details", { open }, make("summary", { text: `${rest.length} more` }), make("ul", {}, ...rest))] : []));
    this.alarms.classList.toggle("iv-red", alarms.some((alarm) => alarm.active));
  }

  lay(layout) {
    const ids = new Set(layout.map((spec) => spec.id));
    for (const [id, card] of this.cards) {
      if (!ids.has(id)) {
        this.watcher.unobserve(card.element);
        this.visible.delete(id);
        card.plot.dispose();
        card.element.remove();
        this.cards.delete(id);
      }
    }
    const used = new Set();
    for (const spec of layout) {
      let section = this.sections.get(spec.section);
      if (!section) {
        const grid = make("div", { class: `iv-grid${spec.section ? "" : " iv-core"}${spec.kind === "heat" ? " iv-pair" : ""}` });
        section = { element: make("section", { "aria-label": spec.section || "Core" }, ...(spec.section ? [make("h2", { class: "iv-section", text: spec.section })] : []), grid), grid };
        this.sections.set(spec.section, section);
      }
      if (!used.has(spec.section)) {
        used.add(spec.section);
        const at = this.charts.children[used.size - 1];
        if (at !== section.element) this.charts.insertBefore(section.element, at || null);
      }
      let card = this.cards.get(spec.id);
      if (!card) {
        card = new Card(this, spec);
        this.cards.set(spec.id, card);
        this.watcher.observe(card.element);
      } else {
        card.describe(spec);
      }
      if (card.element.parentNode !== section.grid) section.grid.append(card.element);
    }
    for (const [name, section] of this.sections) {
      if (!used.has(name)) {
        section.element.remove();
        this.sections.delete(name);
      }
    }
    this.arrange();
  }

  // As many columns as fit, but rows of about the same length.
  arrange() {
    const fit = Math.max(Math.floor((this.charts.clientWidth + 12) / 392), 1);
    for (const { grid } of this.sections.values()) {
      const count = Math.max(grid.children.length, 1);
      grid.style.setProperty("--columns", Math.ceil(count / Math.ceil(count / fit)));
    }
  }

  _panels() {
    this.textList = make("div", { class: "iv-texts" });
    this.textSelect = make("select", { "aria-label": "Which texts", onchange: () => this.set("text", this.textSelect.value) });
    this.texts.append(make("header", {}, make("h2", { class: "iv-section", text: "Text samples" }), this.textSelect), this.textList);
    this.tableBody = make("tbody", {});
    this.tableHead = make("thead", {});
    this.tableNote = make("span", { class: "iv-note" });
    const filter = make("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter metrics by name", oninput: () => { clearTimeout(this.filtering); this.filtering = setTimeout(() => this.set("filter", filter.value), 150); } });
    this.filter = filter;
    this.table.append(make("header", {}, make("h2", { class: "iv-section", text: "Latest values" }), this.tableNote, filter), make("div", { class: "iv-scroll", tabindex: "0", role: "region", "aria-label": "Latest values" }, make("table", {}, this.tableHead, this.tableBody)));
    this.parameterList = make("div", { class: "iv-parameters" });
    this.parameters.append(make("header", {}, make("h2", { class: "iv-section", text: "Hyper-parameters" })), this.parameterList);
  }

  showTexts({ names, chosen, items }) {
    this.texts.hidden = !names.length;
    this.textSelect.hidden = names.length < 2;
    this.textSelect.replaceChildren(make("option", { value: "", text: "all" }), ...names.map((name) => make("option", { value: name, text: name })));
    this.textSelect.value = chosen;
    this.textList.replaceChildren(...items.map((item) => make("figure", {}, make("figcaption", { text: `Step ${item.step.toLocaleString("en")} · ${item.name}` }), make("pre", { text: item.text }))));
  }

  showTable({ runs, rows, all, wanted }) {
    this.table.hidden = false;
    if (document.activeElement !== this.filter) this.filter.value = wanted;
    this.tableNote.textContent = rows.length < all ? `the first ${rows.length} of ${all}` : all === 1 ? "1 metric" : `${all} metrics`;
    const columns = runs.length > 1 ? runs.flatMap((run) => [run, "at step"]) : ["Value", "at step", "Least", "Largest"];
    this.tableHead.replaceChildren(make("tr", {}, make("th", { scope: "col", text: "Metric" }), ...columns.map((text) => make("th", { scope: "col", text })), make("th", { scope: "col", text: "Unit" })));
    const cell = (value) => make("td", { class: typeof value === "string" && value !== "" ? "iv-bad" : "", text: typeof value === "number" ? exact(value) : format(value) });
    this.tableBody.replaceChildren(...rows.map((row) => make("tr", {}, make("th", { scope: "row", text: row.name }), ...row.values.flatMap((latest) => (latest === null ? (runs.length > 1 ? ["", ""] : ["", "", "", ""]) : runs.length > 1 ? [latest[1], latest[0]] : [latest[1], latest[0], latest[2], latest[3]]).map(cell)), make("td", { class: "iv-unit", text: row.unit === "1" ? "" : row.unit }))));
  }

  showParameters(runs) {
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.items)))].sort();
    this.parameters.hidden = !keys.length && !runs.some((run) => run.command);
    const unlike = (key) => new Set(runs.map((run) => run.items[key])).size > 1;
    this.parameterList.replaceChildren(
      make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "Name" }), ...runs.map((run) => make("th", { scope: "col", text: run.name })))),
        make("tbody", {}, ...keys.map((key) => make("tr", { class: unlike(key) ? "iv-unlike" : "" }, make("th", { scope: "row", text: key }), ...runs.map((run) => make("td", { text: run.items[key] === undefined ? "–" : run.items[key] })))))),
      ...runs.filter((run) => run.command).map((run) => make("p", { class: "iv-command" }, make("code", { text: run.command }), make("small", { text: Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(", ") }))));
  }
}

export default {
  template: "<div class='iv'></div>",
  props: { desk: String },
  mounted() {
    this.live = new Live(this.$el, this.desk);
    window.instrumentLive = this.live; // for tests and for the curious
  },
  unmounted() {
    this.live.gone = true;
    this.live.socket.close();
  },
};
